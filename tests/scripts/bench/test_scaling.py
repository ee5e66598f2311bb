"""The benchmark of several processes on a CPU with a tiny model, and idle time out of a trace."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from scripts.bench import scaling as bench_scaling
from tests.helpers import forked
from tests.helpers.tiny_run import save_model


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """The training program, which a test starts more than once, need not import everything anew."""
    monkeypatch.setattr(bench_scaling, "status", lambda *of: forked.run(of[0], bench_scaling.ROOT, *of[1:]).returncode)


def test_a_run_ends_with_its_benchmark(tmp_path):
    """A training that goes on alone would hold the GPUs, and slow what is measured after it."""
    begun = tmp_path / "begun"
    run = [sys.executable, "-c", f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(60)"]
    call = f"import sys; from scripts.bench.scaling import status; status({run!r}, {{}}, sys.stdout)"
    with subprocess.Popen([sys.executable, "-c", call], cwd=bench_scaling.ROOT) as benchmark:
        while not (begun.exists() and begun.read_text()):
            assert benchmark.poll() is None
            time.sleep(0.05)
        benchmark.terminate()
    assert benchmark.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_one_process_traced_and_two(tmp_path, capsys):
    model, out = save_model(tmp_path / "model", max_position_embeddings=1024), tmp_path / "out"
    line = f"--shape reference --weights {model} --length 600 --steps 3 --warm-up 1"
    for gpus in ("--gpus 1 --trace 2", "--gpus 2 --trainer sequence_parallel"):
        bench_scaling.main([str(out), *line.split(), *gpus.split()])
    found = json.loads((out / "scaling.json").read_text())
    one, two = found["runs"]
    assert [run["trainer"] for run in found["runs"]] == ["auto", "sequence_parallel"]
    assert (one["gpus"], one["steps"], two["gpus"], two["steps"]) == (1, 3, 2, 3)
    assert two["speed_up"] == pytest.approx(two["contexts_per_s"] / one["contexts_per_s"])
    assert found["trace"]["steps"] == 2
    assert 0 < found["trace"]["idle"] < 1
    assert 0 < found["trace"]["busy_seconds"] < found["trace"]["seconds"]
    assert {p.name for p in out.iterdir()} == {"auto_1.log", "sequence_parallel_2.log", "scaling.json", "trace.json.gz"}
    assert "idle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trainer", "gpus", "contexts"), [("auto", 1, 2), ("ddp", 4, 8), ("fsdp", 4, 8), ("sequence_parallel", 4, 2)]
)
def test_contexts_of_a_step(tmp_path, trainer, gpus, contexts):
    """Two documents a process, with three questions each; processes share them in sequence_parallel."""
    (tmp_path / "checkpoints/stage1").mkdir(parents=True)
    record = {"times": [9.0, 0.25, 0.5, 0.75, 9.0], "peak_bytes": 3 * 10**9}
    torch.save({"record": record}, tmp_path / "checkpoints/stage1/done.ckpt")
    (tmp_path / "config.yaml").write_text("data: {documents: 2, questions: 3}")
    assert bench_scaling.speed(tmp_path, trainer, gpus, 1, 3) == {
        "trainer": trainer, "gpus": gpus, "steps": 3, "step_seconds": 0.5, "slowest_step_seconds": 0.75,
        "contexts_per_s": 2 * contexts, "pairs_per_s": 6 * contexts, "peak_gb": 3.0,
    }  # fmt: skip


def test_a_run_that_fails_says_why(tmp_path):
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
    found = bench_scaling.idle(trace, 2e-3)
    assert found["busy_seconds"] == pytest.approx(100e-6)
    assert found["idle"] == pytest.approx(0.95)
    assert found["gap_ms"] == pytest.approx(1.0)
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events[4:5]}, file)
    with pytest.raises(ValueError, match="no kernels"):
        bench_scaling.idle(trace, 2e-3)
