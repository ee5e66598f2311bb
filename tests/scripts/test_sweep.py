"""Sweeps: members are judged by their files, those that failed run again as they were, tables from metrics alone."""

import csv
import json
import random
import re
import statistics
from importlib.resources import files
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image

from leank_train.settings import fingerprint
from scripts import sweep
from tests.helpers.report_rows import row as eval_row

CONF = str(files("leank.conf.train"))


def composed(overrides, **kwargs):
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", overrides=list(overrides), **kwargs)


def begin(folder, *overrides):
    """What Hydra writes as `python -m leank_train -m` begins in `folder`."""
    single = [o for o in overrides if "," not in o]
    found = composed([*single, f"hydra.sweep.dir='{folder}'"], return_hydra_config=True)
    OmegaConf.set_readonly(found.hydra, False)
    found.hydra.runtime.merge_with({"cwd": str(folder), "config_sources": []})
    found.hydra.overrides.task = [o for o in overrides if not o.startswith("hydra")]
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(found, folder / "multirun.yaml")


def member(folder, overrides, job="7_0", scores=None):
    """A member's folder as a run leaves it; with scores (method -> task -> recall) it is done."""
    config = composed(overrides, return_hydra_config=True)
    out = folder / config.hydra.job.override_dirname
    config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    (out / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(list(overrides)), out / ".hydra/overrides.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": {"job": {"id": job}}}), out / ".hydra/hydra.yaml")
    OmegaConf.save(config, out / "config.yaml", resolve=True)
    if scores is not None:
        (out / "metrics.json").write_text(json.dumps({"validation": {"recall": scores}}))
    return out


@pytest.mark.parametrize("file", sorted(p.stem for p in Path(CONF).glob("sweep/*.yaml")))
def test_members_are_the_product_of_command_line_and_sweep_file(tmp_path, file):
    begin(tmp_path, "+experiment=reference_demo", f"+sweep={file}", "seed=3,4")
    planned = sweep.planned(sweep.record(tmp_path))
    found = [composed(one) for one in planned]
    assert len({*map(fingerprint, found)}) == len(planned) >= 4
    assert {(config.seed, config.name) for config in found} == {(3, "reference_demo"), (4, "reference_demo")}
    if file == "ratio":
        assert {config.pruning.ratio for config in found} == {0.5, 0.6, 0.7, 0.8}


def test_a_job_asks_for_what_the_trainer_uses():
    given = ["trainer=ddp", "trainer.devices=8", "trainer.num_nodes=2"]
    for launcher, gpus in (("slurm", 8), ("slurm_cpu", None)):
        found = composed([*given, f"hydra/launcher={launcher}"], return_hydra_config=True).hydra.launcher
        assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (2, 8, gpus)
        assert found.additional_parameters == {"signal": "USR1@120", "requeue": True}


def test_status_judges_by_result_files_and_rerun_repeats_the_member(tmp_path, capsys):
    root = tmp_path / "a sweep, of $ratios"
    begin(root, "+experiment=reference_demo", "pruning.ratio=0.5,0.6", "seed=1,2", "hydra/launcher=basic")
    planned = sweep.planned(sweep.record(root))
    done = member(root, planned[0], "0", {"dense": {"a": 1.0}})
    failed = member(root, planned[2], "2")
    log = root / ".submitit/2/2_0_log.out"
    log.parent.mkdir(parents=True)
    log.touch()
    assert [m.state for m in sweep.members(root)] == ["done", "not started", "failed", "not started"]
    with pytest.raises(SystemExit) as left:
        sweep.main(["status", str(root)])
    assert left.value.code == 1
    said = capsys.readouterr().out
    assert str(log) in said
    assert "1 of 4 done, 3 to run again" in said

    for overrides, folder in ((planned[0], done), (planned[2], failed)):
        _, _, module, multirun, *arguments = sweep.command(root, overrides)
        assert (module, multirun) == ("leank_train", "--multirun")
        config = composed(arguments, return_hydra_config=True)
        assert Path(config.hydra.sweep.dir, config.hydra.sweep.subdir) == folder
        assert config.hydra.launcher._target_.endswith("BasicLauncher")
        assert fingerprint(composed(arguments)) == fingerprint(composed(overrides))


def test_a_slurm_job_in_its_queue_is_not_lost(tmp_path, monkeypatch):
    begin(tmp_path, "+experiment=reference_demo", "seed=1,2,3,4", "hydra/launcher=slurm_cpu")
    planned = sweep.planned(sweep.record(tmp_path))
    member(tmp_path, planned[0], "9_0")
    member(tmp_path, planned[1], "9_1")
    for number in range(4):
        (tmp_path / f".submitit/9_{number}").mkdir(parents=True)
    monkeypatch.setattr(sweep, "queue", lambda: {"9_0": "running", "9_2": "pending"})
    assert [m.state for m in sweep.members(tmp_path)] == ["running", "failed", "pending", "not started"]
    assert [m.lost for m in sweep.members(tmp_path)] == [False, True, False, True]


def test_a_folder_that_is_no_sweep(tmp_path):
    with pytest.raises(SystemExit, match=r"multirun.yaml does not exist; give the hydra.sweep.dir"):
        sweep.main(["status", str(tmp_path)])
    with pytest.raises(SystemExit, match="no member with scores"):
        sweep.main(["report", str(tmp_path)])


def cells(table):
    """The rows of a Markdown table, as lists."""
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines() if line.startswith("|")][2:]


def test_cells_are_means_over_seeds():
    """Against `statistics`, in any order of the scores; a task that a seed lacks has no cell."""
    draw = random.Random(0)
    drawn = {key: 100 * draw.random() for key in product((0.5, 0.7), (1, 2, 5), "ab")}
    lines = [(ratio, seed, "leank", task, score) for (ratio, seed, task), score in drawn.items()]
    lines += [(0.9, 1, "leank", "a", 50.0), (0.9, 1, "leank", "b", 50.0), (0.9, 2, "leank", "a", 70.0)]
    draw.shuffle(lines)
    mean, deviation = sweep.averaged(pd.DataFrame(lines, columns=["pruning.ratio", "seed", "method", "task", "score"]))
    for ratio in (0.5, 0.7):
        values = {task: [drawn[ratio, seed, task] for seed in (1, 2, 5)] for task in "ab"}
        values["average"] = [sum(pair) / 2 for pair in zip(values["a"], values["b"], strict=True)]
        at = ("leank", str(ratio))
        assert mean.loc[at, "seeds"] == 3
        for name, of in values.items():
            assert mean.loc[at, name] == pytest.approx(statistics.mean(of), abs=1e-9)
            assert deviation.loc[at, name] == pytest.approx(statistics.stdev(of), abs=1e-6)
    assert mean.loc[("leank", "0.9"), "a"] == 60
    assert mean.loc[("leank", "0.9"), ["b", "average"]].isna().all()


def test_report_of_a_sweep_over_ratios_and_lambda(tmp_path, drawn):
    scores = {}
    for i, (ratio, lam, seed) in enumerate(product((0.5, 0.8), (0.04, 0.1), (1, 2))):
        leank = {
            "x": 90 - 40 * (ratio == 0.8) - 10 * seed,
            "y": 100 * lam,
            "average": -1,
        }  # the average is computed anew
        dense = {"x": 95 + seed, "y": 100.0, "average": -1}
        scores[ratio, lam, seed] = leank
        overrides = ["+experiment=reference_demo", f"pruning.ratio={ratio}", f"stage1.lam={lam}", f"seed={seed}"]
        out = member(tmp_path, overrides, f"7_{i}", {"dense": dense, "leank": leank})
    member(tmp_path, ["+experiment=reference_demo", "pruning.ratio=0.9"])  # failed: counts nowhere
    row = eval_row("leank", "0", 0.25, "vt", 1024)
    (out / "eval").mkdir()
    (out / "eval/results.jsonl").write_text(json.dumps(row) + "\n")

    written = {file.name: file for file in sweep.report(tmp_path)}
    assert set(written) == {"scores.csv", "report.md", "figure4_validation.png", f"figure4_{row['benchmark']}.png"}
    with written["scores.csv"].open() as file:
        kept = [r for r in csv.DictReader(file) if r["method"] == "leank" and r["source"] == "validation"]
    assert {
        (float(r["pruning.ratio"]), float(r["stage1.lam"]), int(r["seed"]), r["task"]): float(r["score"]) for r in kept
    } == {(*key, task): float(values[task]) for key, values in scores.items() for task in ("x", "y")}
    with Image.open(written["figure4_validation.png"]) as image:
        assert len(image.convert("RGB").getcolors(2**20)) > 4

    own, other = written["report.md"].read_text().split(f"# {row['benchmark']}: ")
    assert cells(own) == [
        ["dense", "", "", "2", "96.5 ± 0.7", "100.0 ± 0.0", "98.2 ± 0.4"],
        ["leank", "0.5", "0.04", "2", "75.0 ± 7.1", "4.0 ± 0.0", "39.5 ± 3.5"],
        ["leank", "0.5", "0.1", "2", "75.0 ± 7.1", "10.0 ± 0.0", "42.5 ± 3.5"],
        ["leank", "0.8", "0.04", "2", "35.0 ± 7.1", "4.0 ± 0.0", "19.5 ± 3.5"],
        ["leank", "0.8", "0.1", "2", "35.0 ± 7.1", "10.0 ± 0.0", "22.5 ± 3.5"],
    ]
    assert "| leank | 0.8 | 0.1 | 1 | 25.0 | 25.0 |" in " ".join(other.split())
    assert "vt 1024" in other


def test_training_tasks_and_the_second_stage_are_settings(tmp_path):
    for data, steps in product(("paper", "duo"), (0, 5)):
        member(tmp_path, [f"data={data}", f"stage2.steps={steps}"], scores={"leank": {"x": 10.0 + steps}})
    sweep.report(tmp_path)
    text = (tmp_path / "report/report.md").read_text()
    assert "figure4" not in text
    assert [row[1:3] for row in cells(text)] == [
        ["passkey:1", "0"], ["passkey:1", "5"], ["kv:1 multivalue:1", "0"], ["kv:1 multivalue:1", "5"],
    ]  # fmt: skip


def test_two_members_of_the_same_settings_are_not_averaged(tmp_path):
    for place in ("one", "two"):
        member(tmp_path / place, ["seed=1"], scores={"leank": {"x": 1.0}})
    with pytest.raises(SystemExit, match="have the same settings and seed; keep one of them"):
        sweep.main(["report", str(tmp_path)])
