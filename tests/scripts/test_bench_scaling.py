"""The benchmark of several processes on a CPU with a tiny model, and idle time out of a trace."""

import gzip
import json

import pytest

from scripts.bench import scaling as bench_scaling
from scripts.bench import tracing
from tests.helpers.tiny_run import save_model


def test_one_process_traced_and_two(tmp_path, capsys):
    model, out = save_model(tmp_path / "model", max_position_embeddings=1024), tmp_path / "out"
    line = f"--shape reference --weights {model} --length 600 --steps 3 --warm-up 1"
    for gpus in ("--gpus 1 --trace 2", "--gpus 2 --trainer ddp sequence_parallel"):
        bench_scaling.main([str(out), *line.split(), *gpus.split()])
    found = json.loads((out / "scaling.json").read_text())
    one, two, shared = found["runs"]
    assert [run["trainer"] for run in found["runs"]] == ["auto", "ddp", "sequence_parallel"]
    assert (one["gpus"], one["steps"], two["gpus"], two["steps"]) == (1, 3, 2, 3)
    assert one["pairs_per_s"] == pytest.approx(4 * one["contexts_per_s"])
    assert one["contexts_per_s"] == pytest.approx(1 / one["step_seconds"])
    assert two["contexts_per_s"] == pytest.approx(2 / two["step_seconds"])
    assert shared["contexts_per_s"] == pytest.approx(1 / shared["step_seconds"])  # both processes share a document
    assert two["speed_up"] == pytest.approx(two["contexts_per_s"] / one["contexts_per_s"])
    assert found["trace"]["steps"] == 2
    assert 0 < found["trace"]["idle"] < 1
    assert 0 < found["trace"]["busy_seconds"] < found["trace"]["seconds"]
    assert {p.name for p in out.iterdir()} == {
        "auto_1.log",
        "ddp_2.log",
        "scaling.json",
        "sequence_parallel_2.log",
        "trace.json.gz",
    }
    assert "idle" in capsys.readouterr().out


def test_a_run_that_fails_says_why(tmp_path, capsys):
    with pytest.raises(SystemExit, match="leave no middle"):
        bench_scaling.main([str(tmp_path), "--gpus", "1", "--shape", "reference", "--length", "100"])


@pytest.mark.parametrize("line", ["--gpus 2 --trace", "--gpus 0", "--steps 0", "--shape llama8b"])
def test_bad_arguments(tmp_path, line, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_scaling.main([str(tmp_path), "--shape", "reference", *line.split()])


def test_overlapping_kernels_count_once(tmp_path):
    def event(cat, begin, length):
        return {"ph": "X", "cat": cat, "ts": begin, "dur": length}

    events = [
        event("kernel", 100.0, 50.0), event("kernel", 120.0, 10.0), event("gpu_memcpy", 140.0, 20.0),
        event("gpu_memset", 1160.0, 40.0), event("cuda_runtime", 0.0, 5000.0), event("cpu_op", 0.0, 5000.0),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = tracing.idle(trace, 2e-3)
    assert found["busy_seconds"] == pytest.approx(100e-6)
    assert found["idle"] == pytest.approx(0.95)
    assert found["gap_ms"] == pytest.approx(1.0)
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events[4:5]}, file)
    with pytest.raises(ValueError, match="no kernels"):
        tracing.idle(trace, 2e-3)
