"""The measurements of training on a CPU, small: steps, the program on several processes, masks of two runs."""

import csv
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import save_file

from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.tensor_files import write_checkpoint
from scripts.bench import training
from scripts.bench.training import compare, hours, main, prefill_once
from tests.conftest import tiny_model
from tests.oracles.kl_loss import kl_loss_reference


def test_lengths_and_hours(tmp_path, capsys, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=2048)
    monkeypatch.setattr(training, "load", lambda *given: model)
    line = "--shape reference --length 1280 768 1024 --questions 2 --objective l2 kl --repeats 1 --full-at 768"
    main(["step", str(tmp_path), *line.split()])
    assert capsys.readouterr().out.count("x the bare prefill") == 3 * 3 + 1
    for length in (768, 1024, 1280):
        found = json.loads((tmp_path / f"bench_training_reference_{length}.json").read_text())
        runs = {"prefill", "ours, 2", "ours, 2, kl"} | ({"full sequence"} if length == 768 else set())
        assert found.keys() == {"device", "length"} | runs
        assert all(found[run]["seconds"] > 0 and found[run]["first"] > 0 for run in runs)
    found = json.loads((tmp_path / "hours.json").read_text())
    assert (found["lengths"], found["pairs"], found["measured"]) == ([768, 1280], 60, [768, 1024, 1280])
    assert found["runs"]["ours, 2"]["steps"] == 30


@pytest.mark.parametrize("lengths", [(16384, 65536, 98304), (16384, 32768, 65536, 98304)])
def test_hours_of_a_known_quadratic(lengths):
    def run(length):
        return {"seconds": 0.1 + 3e-5 * length + 4e-10 * length**2}

    results = {n: {"prefill": run(n), "ours, 4": run(n), "full sequence": run(n)} for n in lengths}
    del results[98304]["full sequence"]
    found = hours(results, "llama_70pct")
    mean = np.mean([run(n)["seconds"] for n in range(16384, 98305)])
    assert {name: row["hours"] for name, row in found["runs"].items()} == {
        "prefill": pytest.approx(mean * 2200 / 3600, rel=1e-6), "ours, 4": pytest.approx(mean * 550 / 3600, rel=1e-6),
    }  # fmt: skip
    for some in ((16384, 98304), (16384, 32768, 65536)):  # nothing is extrapolated
        assert hours({n: results[16384] for n in some}, "llama_70pct") is None


def test_runs_take_turns():
    calls = []
    training.measure({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == ["a", "b"] * 3


def test_the_kl_step_is_the_stage_s(monkeypatch):
    """The same loss as the loss functions that stages call, on the same passes; L2 is another number."""
    model = training.load("reference", torch.device("cpu"), torch.float32)
    ids = torch.randint(5, model.config.vocab_size, (1, 400), generator=torch.Generator().manual_seed(1))
    alpha = torch.full(kv_shape(model.config), 0.5, requires_grad=True)
    kl, l2 = (float(prefill_once(model, ids, alpha, 2, 16, 144, o)) for o in ("kl", "l2"))
    monkeypatch.setattr("leank_train.objective.kl.kl_loss", kl_loss_reference)
    assert float(prefill_once(model, ids, alpha, 2, 16, 144, "kl")) == pytest.approx(kl, rel=1e-4)
    assert 0 < kl != pytest.approx(l2, rel=0.01)


def test_the_training_program_is_run_and_timed(tmp_path, monkeypatch):
    """Two documents a process, with three questions each; processes share them in sequence_parallel."""

    def ended(line, log):
        with initialize_config_module("leank.conf.train", version_base="1.3"):
            config = compose("train", line[3:], return_hydra_config=True)
        run, record = Path(config.hydra.run.dir), {"times": [9.0, 0.25, 0.5, 0.75], "peak_bytes": 3 * 10**9}
        assert (config.stage1.steps, config.data.min_length, config.data.max_length) == (4, 600, 700)
        write_checkpoint(run / "checkpoints/stage1/done.ckpt", {"record": record})
        OmegaConf.save({"data": config.data}, run / "config.yaml")
        return int(config.name == "failing")

    monkeypatch.setattr(training, "ended", ended)
    given = "--shape reference --steps 3 --warm-up 1 --length 600 700 --set data.documents=2 data.questions=3"
    line = ["scaling", str(tmp_path), *given.split()]
    main([*line, "--gpus", "1", "4", "--trainer", "ddp", "fsdp", "sequence_parallel"])
    found = json.loads((tmp_path / "scaling.json").read_text())["runs"]
    contexts = {("auto", 1): 2, ("ddp", 4): 8, ("fsdp", 4): 8, ("sequence_parallel", 4): 2}
    assert found == [
        {"trainer": trainer, "gpus": gpus, "steps": 3, "step_seconds": 0.5, "slowest_step_seconds": 0.75,
         "contexts_per_s": 2 * n, "pairs_per_s": 6 * n, "peak_gb": 3.0} for (trainer, gpus), n in contexts.items()
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="failed; see the end of"):
        main([*line, "name=failing"])


def test_a_run_ends_with_its_benchmark(tmp_path):
    """A training that goes on alone would hold the GPUs, and slow what is measured after it."""
    begun = tmp_path / "begun"
    code = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    given = ([sys.executable, "-S", "-c", code], Path(os.devnull))
    benchmark = multiprocessing.get_context("fork").Process(target=training.ended, args=given)
    benchmark.start()
    while not (begun.exists() and begun.read_text()):
        assert benchmark.is_alive()
        time.sleep(0.05)
    benchmark.terminate()
    benchmark.join()
    assert benchmark.exitcode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def trained(folder, scores, losses):
    """A run directory with these scores and losses of stage 1."""
    record = {"steps": [{"distillation": loss} for loss in losses]}
    write_checkpoint(folder / "checkpoints/stage1/done.ckpt", {"record": record})
    ChannelMask(scores > 0.15).save(folder / "mask.safetensors")
    save_file({"alpha": scores.contiguous()}, folder / "alpha.safetensors")
    return folder


def test_masks_of_two_runs(tmp_path):
    scores = torch.tensor([[[0.9, 0.8, 0.2, 0.1]]])
    one = trained(tmp_path / "one", scores, [7.0, 2.0])
    other = trained(tmp_path / "other", scores.flip(-1), [7.0, 2.5])
    main(["masks", str(tmp_path / "out"), str(one), str(one), str(other)])
    with (tmp_path / "out/same_masks.csv").open(newline="") as file:
        same, apart = (
            [float(line[name]) for name in ("equal", "largest", "mean", "loss")] for line in csv.DictReader(file)
        )
    assert same == [1, 0, 0, 0]
    assert apart == pytest.approx([0.5, 0.8, 0.7, 0.25])
    zero, none = trained(tmp_path / "zero", scores, [0.0]), trained(tmp_path / "none", scores, [])
    assert (compare(zero, zero)["loss"], compare(zero, one)["loss"]) == (0, float("inf"))
    with pytest.raises(ValueError, match=r"none has no step of stage 1"):
        compare(zero, none)
