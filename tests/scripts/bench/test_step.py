"""The benchmark of a training step on a CPU, small; and the hours it makes of seconds."""

import json

import numpy as np
import pytest
import torch

from leank.shape import kv_shape
from scripts.bench import training_step as bench_training
from scripts.bench.training_step import SAME, cheaper, describe, hours
from tests.conftest import tiny_model
from tests.oracles.kl_loss import kl_loss_reference


def test_lengths_ratios_and_hours(tmp_path, capsys, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=2048)
    monkeypatch.setattr(bench_training, "build", lambda *given: model)
    line = "--length 768 1024 1280 --questions 2 --repeats 1 --full-at 768 --experiment reference_demo"
    bench_training.main([str(tmp_path), *line.split()])
    said = capsys.readouterr().out
    assert said.count("x the bare prefill") == 3
    assert said.count("x cheaper a step") == 1
    for length in (768, 1024, 1280):
        found = json.loads((tmp_path / f"bench_training_reference_{length}.json").read_text())
        runs = {"prefill", "ours, 2"} | ({"full sequence"} if length == 768 else set())
        assert found.keys() == {"device", "length", "kernels"} | runs
        assert found["kernels"]["prefill"] == found["kernels"]["ours"]  # on a CPU
        assert all(found[run]["seconds"] > 0 and found[run]["first"] > 0 for run in runs)
    found = json.loads((tmp_path / "hours.json").read_text())
    assert (found["lengths"], found["pairs"], found["measured"]) == ([768, 1280], 60, [768, 1024, 1280])
    assert found["runs"]["ours, 2"]["steps"] == 30
    assert found["runs"]["prefill"]["hours"] > 0


@pytest.mark.parametrize("lengths", [(16384, 65536, 98304), (16384, 32768, 65536, 98304)])
def test_hours_of_a_known_quadratic(lengths):
    def run(length):
        seconds = 0.1 + 3e-5 * length + 4e-10 * length**2
        return {"seconds": seconds, "first": 2 * seconds}

    results = {n: {"prefill": run(n), "ours, 4": run(n), "full sequence": run(n)} for n in lengths}
    del results[98304]["full sequence"]
    found = hours(results, "llama_70pct")
    assert (found["lengths"], found["pairs"]) == ([16384, 98304], 2200)
    assert list(found["runs"]) == ["prefill", "ours, 4"]
    mean = np.mean([run(n)["seconds"] for n in range(16384, 98305)])
    assert found["runs"]["prefill"]["hours"] == pytest.approx(mean * 2200 / 3600, rel=1e-6)
    assert found["runs"]["ours, 4"]["hours"] == pytest.approx(mean * 550 / 3600, rel=1e-6)
    assert found["runs"]["ours, 4"]["first_hours"] == pytest.approx(2 * mean * 550 / 3600, rel=1e-6)


@pytest.mark.parametrize("lengths", [(16384, 98304), (16384, 32768, 65536)])
def test_nothing_is_extrapolated(lengths):
    assert hours({n: {"prefill": {"seconds": 1.0, "first": 1.0}} for n in lengths}, "llama_70pct") is None


def test_ratios_are_to_the_faster_kernel():
    whole = {"full sequence": 9.0, "full sequence" + SAME: 6.0}
    seconds = {"prefill": 2.0, "prefill" + SAME: 1.0, "ours, 4": 1.5, **whole}
    found = {name: {"seconds": s, "first": s} for name, s in seconds.items()}
    assert "1.500x the bare prefill" in describe("ours, 4", found)
    assert cheaper(found) == ["ours, 4:  4.00x cheaper a step, 16.00x a (context, answer) pair"]


def test_full_sequence_only_at_measured_lengths(tmp_path):
    with pytest.raises(SystemExit):
        bench_training.main([str(tmp_path), "--length", "512", "--full-at", "1024"])


def test_both_objectives_take_turns(tmp_path, capsys):
    line = "--length 768 --questions 2 --objective l2 kl --repeats 2 --steps-alone"
    bench_training.main([str(tmp_path), *line.split()])
    found = json.loads((tmp_path / "bench_training_reference_768.json").read_text())
    assert found.keys() == {"device", "length", "kernels", "ours, 2", "ours, 2, kl"}
    assert f"seconds {found['ours, 2, kl']['seconds'] / found['ours, 2']['seconds']:.4f}x" in capsys.readouterr().out
    calls = []
    bench_training.measure({name: lambda name=name: calls.append(name) for name in "ab"}, 2, False)
    assert calls == ["a", "b"] * 3


def test_the_kl_step_is_the_stage_s(tmp_path):
    """The same loss as the loss functions that stages call, on the same passes; L2 is another number."""
    model = bench_training.build("reference", torch.device("cpu"), torch.float32)
    ids = torch.randint(5, model.config.vocab_size, (1, 600), generator=torch.Generator().manual_seed(1))
    alpha = torch.full(kv_shape(model.config), 0.5, requires_grad=True)
    kl, l2 = (float(bench_training.prefill_once(model, ids, alpha, 2, 16, 144, o)) for o in ("kl", "l2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_training, "kl_loss", kl_loss_reference)
        again = float(bench_training.prefill_once(model, ids, alpha, 2, 16, 144, "kl"))
    assert again == pytest.approx(kl, rel=1e-4)
    assert kl > 0
    assert kl != pytest.approx(l2, rel=0.01)
