"""Quality against documents, and masks beside each other: the grid, its runs and scores on a tiny model, the tables."""

import csv
import json
from concurrent.futures import Executor, Future

import pytest
import torch
from safetensors.torch import save_file

from leank.mask import ChannelMask
from leank.tensor_files import write_checkpoint
from leank_train.objective import steering
from leank_train.settings import check
from scripts.bench import documents, same_masks
from scripts.bench.documents import Training, configured, table
from tests.helpers.tiny_run import OVERRIDES, save_model

TINY = [text for text in OVERRIDES if not text.startswith("stage")]


def rows(method, scores, kl=0.25, seed=1):
    near = {"tokens": 9, "kl": kl, "top1": 0.5, "loss": None, "dense_loss": None, "non_finite": None}
    return [
        {"model": "m", "method": method, "config": "c", "benchmark": "ruler", "task": task, "length": 2048,
         "sample": str(i), "seed": seed, "compress": "after_question", "score": score, "fidelity": near}
        for task, of in scores.items() for i, score in enumerate(of)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("training", "together", "steps"),
    [
        (Training("kl", 16, 1), 1, (13, 3)),
        (Training("l2", 100, 1), 4, (21, 4)),
        (Training("kl", 960, 1), 4, (200, 40)),
        (Training("one_document", 2000, 1), 1, (1667, 333)),
    ],
)
def test_documents_of_both_stages_are_those_asked_for(training, together, steps):
    assert (training.together, training.steps) == (together, steps)
    config = check(configured("leank.conf.train", "train", training.overrides))
    assert (config.stage1.steps, config.stage2.steps, config.data.documents) == (*steps, together)
    assert config.pruning.ratio == 0.9
    assert {config.stage1.objective, config.stage2.objective} == {"l2" if training.variant == "l2" else "kl"}
    assert config.stage1.lam == "auto"


def test_variants_change_what_they_say():
    def stage1(variant):
        return check(configured("leank.conf.train", "train", Training(variant, 100, 1).overrides)).stage1

    assert stage1("kl").lr == "auto"
    assert stage1("usual_momentum").lr == steering.learning_rate(21)  # a number: Adam's own momentum
    assert (stage1("kl").patience, stage1("stopping").patience) == (0, 3)


def test_a_run_in_two_grids_is_one(tmp_path):
    line = ["train", str(tmp_path), "--grid", "kl,l2", "100,16", "2", "--grid", "kl", "100", "3"]
    found = documents.parse(line).trainings
    assert len(found) == len(set(found)) == 9
    assert [t.name for t in found[:3]] == ["kl_100_seed1", "kl_100_seed2", "l2_100_seed1"]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (["lk", "100", "1"], "lk is no variant"),
        (["kl", "2", "1"], "documents=2 do not fill steps of 1 in both stages"),
        (["kl", "102", "1"], "documents=102 do not fill steps of 4 in both stages"),
    ],
)
def test_a_grid_that_cannot_be_trained_is_refused(grid, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        documents.parse(["train", str(tmp_path), "--grid", *grid])
    assert f"--grid: {said}" in capsys.readouterr().err


def test_scoring_is_shared_by_samples_then_by_masks():
    masks = {f"{v}_{n}_seed{s}": "path" for v in ("kl", "l2") for n in (16, 100) for s in (1, 2)}
    for jobs in (1, 3, 8, 16, 40):
        parts = documents.shares(masks, 8, jobs)
        assert len(parts) <= max(1, jobs)
        for name in masks:  # every sample of every mask once
            found = [shard for some, shard in parts if name in some]
            assert found == [f"{i}/{len(found)}" for i in range(min(8, jobs))]
    assert [name[-1] for name in documents.shares(masks, 8, 8)[0][0]] == ["1"] * 4 + ["2"] * 4
    assert documents.shares({}, 8, 2) == [({}, "0/2"), ({}, "1/2")]


def test_a_line_for_each_mask_that_is_scored_whole(tmp_path):
    scores = {"a": [1.0, 1.0], "b": [0.5]}
    worse = {"a": [1.0, 0.0], "b": [0.5]}
    some = {"a": [1.0, 1.0], "b": []}  # the clock ended it
    found = rows("dense", scores, 0.0) + rows("kl_100_seed2", worse) + rows("kl_16_seed1", scores)
    write_rows(tmp_path, found + rows("l2_100_seed1", some))
    dense, few, many = table(tmp_path)
    assert (dense["variant"], dense["recall"], dense["samples"], dense["kl"]) == ("dense", 75.0, 3, 0.0)
    assert (few["documents"], few["minus_dense"], few["low"], few["high"]) == (16, 0.0, 0.0, 0.0)
    assert (many["documents"], many["seed"], many["recall"], many["minus_dense"]) == (100, 2, 50.0, -25.0)
    assert many["low"] < -25 < many["high"]
    assert (many["kl"], many["top1"], many["margin"], many["steps"]) == (0.25, 50.0, 0.6, "21+4")


def write_rows(out, found):
    """Rows of a scored grid, and the metrics that its table reads."""
    (out / "rows").mkdir(parents=True)
    (out / "rows/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    for name in {row["method"] for row in found} - {"dense"}:
        (out / "runs" / name).mkdir(parents=True)
        metrics = {"separation": {"between": 0.1, "margin": 0.6}, "seconds": {"training": 3.0}}
        (out / "runs" / name / "metrics.json").write_text(json.dumps(metrics))


def test_a_mask_is_compared_on_what_dense_was_asked(tmp_path):
    """Another task, more samples, or another order of the tasks leave the line as it was."""
    dense, of = {"a": [1.0, 0.0], "b": [0.5]}, {"a": [0.0, 0.0], "b": [1.0]}
    write_rows(tmp_path / "alone", rows("dense", dense, 0.0) + rows("kl_16_seed1", of))
    more = {"c": [0.0] * 9, "b": [1.0, 0.0], "a": [0.0, 0.0, 1.0]}
    write_rows(tmp_path / "more", rows("dense", dense, 0.0) + rows("kl_16_seed1", more))
    _, line = table(tmp_path / "more")
    assert line == table(tmp_path / "alone")[1]
    assert (line["samples"], line["recall"], line["minus_dense"]) == (3, 50.0, 0.0)


def test_samples_of_two_seeds_are_not_mixed(tmp_path):
    of = rows("dense", {"a": [1.0]}, 0.0) + rows("dense", {"a": [0.0]}, 0.0, seed=2)
    write_rows(tmp_path, of + rows("kl_16_seed1", {"a": [1.0]}) + rows("kl_16_seed1", {"a": [0.0]}, seed=2))
    dense, line = table(tmp_path)
    assert (dense["samples"], dense["recall"]) == (2, 50.0)
    assert (line["samples"], line["recall"], line["low"], line["high"]) == (2, 50.0, 0.0, 0.0)


def test_a_grid_is_trained_scored_and_tabulated(tmp_path, capsys, monkeypatch):
    model = save_model(tmp_path / "model", max_position_embeddings=1024)
    monkeypatch.setattr(Training, "steps", (3, 2))
    monkeypatch.setattr(documents, "ProcessPoolExecutor", lambda *_: InThisProcess())
    out = [str(tmp_path / "out")]
    more = ["--set", f"model.name={model}", *TINY]
    for _ in range(2):
        documents.main(["train", *out, "--grid", "kl,stopping", "16", "1", *more])
    assert capsys.readouterr().out.count("was there") == 2
    documents.main(["train", *out, "--grid", "kl", "32", "1", "--seconds", "-1", *more])
    assert "left out" in capsys.readouterr().out
    score = ["score", *out, "--length", "600", "--samples", "1", "--set", f"model.name={model}", "max_new_tokens=4"]
    documents.main([*score, "benchmark.tasks=[niah_single_1]", "cache={sink: 4, window: 32, flush: 8}"])
    documents.main(["table", *out, "--csv", str(tmp_path / "table.csv")])
    with (tmp_path / "table.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["variant"] for row in found] == ["dense", "kl", "stopping"]
    assert {row["samples"] for row in found} == {"1"}
    best, ended = int(found[2]["stage1_best_at"]), int(found[2]["stage1_ended_at"])
    assert 1 <= best <= ended <= 3


class InThisProcess(Executor):
    """Does at once what a pool of processes would do."""

    def submit(self, work, *args):
        done = Future()
        done.set_result(work(*args))
        return done


def test_masks_of_two_runs(tmp_path):
    scores = torch.tensor([[[0.9, 0.8, 0.2, 0.1]]])
    for name, alpha, loss in (("one", scores, 2.0), ("other", scores.flip(-1), 2.5)):
        folder = tmp_path / name
        (folder / "checkpoints/stage1").mkdir(parents=True)
        ChannelMask(alpha > 0.15).save(folder / "mask.safetensors")
        save_file({"alpha": alpha.contiguous()}, folder / "alpha.safetensors")
        record = {"steps": [{"distillation": 7.0}, {"distillation": loss}]}
        write_checkpoint(folder / "checkpoints/stage1/done.ckpt", {"record": record})
    same_masks.main(
        [str(tmp_path / "one"), str(tmp_path / "one"), str(tmp_path / "other"), "--out", str(tmp_path / "csv")]
    )
    with (tmp_path / "csv").open(newline="") as file:
        same, other = csv.DictReader(file)
    assert (float(same["equal"]), float(same["largest"]), float(same["loss"])) == (1, 0, 0)
    assert float(other["equal"]) == 0.5
    assert float(other["largest"]) == pytest.approx(0.8)
    assert float(other["mean"]) == pytest.approx(0.7)
    assert float(other["loss"]) == pytest.approx(0.25)


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    for name, steps in (("none", []), ("zero", [{"distillation": 0.0}])):
        folder = tmp_path / name / "checkpoints/stage1"
        folder.mkdir(parents=True)
        scores = torch.tensor([[[0.9, 0.8, 0.2, 0.1]]])
        ChannelMask(scores > 0.5).save(tmp_path / name / "mask.safetensors")
        save_file({"alpha": scores}, tmp_path / name / "alpha.safetensors")
        write_checkpoint(folder / "done.ckpt", {"record": {"steps": steps}})
    zero, out = str(tmp_path / "zero"), ["--out", str(tmp_path / "csv")]
    same_masks.main([zero, zero, *out])
    with (tmp_path / "csv").open(newline="") as file:
        assert [line["loss"] for line in csv.DictReader(file)] == ["0.0"]
    with pytest.raises(ValueError, match=r"none has no step of stage 1"):
        same_masks.main([zero, str(tmp_path / "none"), *out])
    assert same_masks.relative(1.0, 0.0) == float("inf")
