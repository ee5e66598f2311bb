"""The process that compares MATH-500 answers: what no text can do, and what follows a death."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from leank.eval.metrics import math500, math_equal, math_worker
from tests import ROOT


def _octal(code: str) -> str:
    return "".join(f"\\{ord(c):03o}" for c in code)


@pytest.mark.parametrize("nested", [0, 250, 400])
@pytest.mark.parametrize("side", ["given", "truth"])
@pytest.mark.parametrize("call", ['ln("{}")', "ln('{}')", 're("{}")', 'li("{}")'])
def test_no_answer_runs_code(tmp_path, nested, side, call):
    marker = tmp_path / "ran"
    code = _octal(f"open('{marker}','w')")
    text = call.format(code) + "{" * nested + "}" * nested
    given, truth = (text, "7/3") if side == "given" else ("7/3", text)
    assert not math500.grade(math500.last_boxed(f"\\boxed{{{given}}}"), truth)
    assert not math_equal.equal(given, truth)
    assert not marker.exists()


COSTLY = [
    "9^{9^{9^{9}}}",
    "(99999999999)!",
    "(x+1)^{99999}",
    "{" * 400,
]


@pytest.mark.parametrize("text", COSTLY)
def test_what_is_costly_to_evaluate_is_unequal(text):
    start = time.monotonic()
    assert not math500.grade(text, "x+1/3")
    assert math500.grade("y+x", "x+y")  # the worker that follows, if this one died
    assert time.monotonic() - start < 30  # of a busy machine; 3 CPU seconds


def test_the_worker_has_limits(tmp_path):
    """What the graders cannot be made to do is tried in a process with the same limits."""
    pytest.importorskip("resource")
    attempts = """
import sys
from pathlib import Path
from leank.eval.metrics import math_equal
math_equal._limit_process()
for attempt in (lambda: bytearray(2**30), lambda: Path(sys.argv[1]).write_text("x")):
    try:
        attempt()
        print("done")
    except (MemoryError, OSError) as error:
        print(type(error).__name__)
sys.stdout.flush()
math_equal._limit_cpu()
while True:
    sum(range(100_000))
"""
    command = [sys.executable, "-c", attempts, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["MemoryError", "OSError"], done.stderr
    assert done.returncode == -signal.SIGXCPU


def test_a_dead_worker_is_replaced_and_nothing_is_wrong():
    worker = math_worker.Worker()
    try:
        assert worker.equal("y+x", "x+y")
        first = worker._process
        assert worker.equal("2y+x", "x+2y")
        assert worker._process is first  # one process for all
        first.kill()
        first.wait()
        assert worker.equal("y+x", "x+y")
        assert worker._process is not first
    finally:
        worker.stop()
    assert worker._process is None


def test_a_worker_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start"):
        math_worker.Worker().equal("y+x", "x+y")


def test_a_worker_without_math_verify_is_no_verdict(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"pip install math-verify.*not here"):
        math_worker.Worker().equal("y+x", "x+y")
