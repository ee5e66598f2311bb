"""Grades of MATH answers, and the process that compares them: what no text can do, and what follows a death."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from leank.eval.benchmarks import math500
from leank.eval.metrics import math_equal
from tests import ROOT
from tests.helpers import parity

DIFFERENT = {("4/2", "2"), ("3,4", "4,3")}  # right here, wrong for prm800k: see docs/benchmarks.md


@pytest.mark.parametrize("row", parity.rows("math500_grader"), ids=parity.label)
def test_grades_are_those_of_prm800k_but_for_named_ones(row):
    differs = (row["given"], row["ground_truth"]) in DIFFERENT
    assert math500.grade(row["given"], row["ground_truth"] or "") == (row["correct"] != differs)


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        (None, "1", False),
        ("", "1", False),
        ("", "", True),
        ("2/4", "1/2", True),
        ("0.5", "\\frac12", True),
        ("0.25", "\\frac14", True),
        ("1,234", "1234", True),
        ("1234.0", "1{,}234", True),
        ("2.6", "3", False),
        ("2 1/2", "5/2", False),  # read as 2 times 1/2
        ("3 million", "3000000", False),
        ("(1, 2)", "(1,2)", True),
        ("(1, 2]", "(1,2)", False),
        ("(2/2, 2)", "(1,2)", True),
        ("(x+x, 2)", "(2x,2)", True),
        ("x=5", "5", True),
        ("abc=5", "5", True),
        ("\\sqrt2", "\\sqrt{2}", True),
        ("sqrt(8)", "2\\sqrt{2}", True),
        ("x+y+z", "z+y+x", True),
        ("x^{2}", "x^2", True),
        ("2^10", "1024", True),
    ],
)
def test_grades_of_equal_and_of_unequal_answers(given, truth, right):
    assert math500.grade(given, truth) is right


@pytest.mark.parametrize(
    "text", ["\\frac", "\\frac1", "\\sqrt", "1\\text{ a}\\text{ b}", "\\begin{x", "{", "1e999", "nan"]
)
def test_malformed_text_is_graded_not_raised(text):
    assert math500.grade(text, text)
    assert not math500.grade(text, "17")


def test_the_last_whole_box_is_the_answer():
    assert math500.last_boxed("\\boxed{1} then \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert math500.last_boxed("\\boxed{1") is None
    assert math500.last_boxed("1") is None


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
    assert not math_equal.compare(given, truth)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text", ["9^{9^{9^{9}}}", "(99999999999)!", "(x+1)^{99999}", "{" * 400, "x+9**9**9**9", "x+((99!)!)!"]
)
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
math_equal.limit_process()
for attempt in (lambda: bytearray(2**30), lambda: Path(sys.argv[1]).write_text("x")):
    try:
        attempt()
        print("done")
    except (MemoryError, OSError) as error:
        print(type(error).__name__)
sys.stdout.flush()
math_equal.limit_cpu()
while True:
    sum(range(100_000))
"""
    command = [sys.executable, "-c", attempts, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["MemoryError", "OSError"], done.stderr
    assert done.returncode == -signal.SIGXCPU


def test_a_worker_that_dies_or_hangs_is_replaced(monkeypatch):
    worker = math_equal.Worker()
    try:
        assert worker.equal("y+x", "x+y")
        first = worker._process
        assert worker.equal("2y+x", "x+2y")
        assert worker._process is first  # one process for all
        first.kill()
        first.wait()
        assert worker.equal("y+x", "x+y")
        assert worker._process is not first
        os.kill(worker._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(math_equal, "WALL_SECONDS", 3)
        assert worker.equal("y+x", "x+y")
    finally:
        worker.stop()
    assert worker._process is None


def test_a_worker_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start"):
        math_equal.Worker().equal("y+x", "x+y")
