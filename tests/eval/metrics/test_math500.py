import os
import signal
import time

import pytest

from leank.eval.metrics import math500, math_worker
from leank.eval.metrics.math_equal import MAX_EXPRESSION, readable
from leank.eval.metrics.math_normalize import grader_normalize, mathd_normalize, strip_thousands
from tests.helpers import parity


@pytest.mark.parametrize("row", parity.rows("math500_grader"), ids=parity.label)
def test_grades_are_those_of_the_official_code(row):
    assert math500.grade(row["given"], row["ground_truth"]) == row["correct"]
    if "normalized_given" in row:
        assert grader_normalize(row["given"]) == row["normalized_given"]
        assert grader_normalize(row["ground_truth"]) == row["normalized_truth"]
        assert mathd_normalize(row["given"]) == row["mathd_given"]
        assert mathd_normalize(row["ground_truth"]) == row["mathd_truth"]


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        (None, "1", False),
        ("", "1", False),
        ("", "", True),
        ("2/4", "1/2", False),
        ("0.5", "\\frac12", True),
        ("0.25", "\\frac14", True),
        ("1,234", "1234", True),
        ("1234.0", "1{,}234", True),
        ("2.6", "3", False),
        ("2 1/2", "5/2", True),
        ("3 million", "3000000", False),  # an integer needs the same integer: 3*10^6 is not one
        ("(1, 2)", "(1,2)", True),
        ("(1, 2]", "(1,2)", False),
        ("(2/2, 2)", "(1,2)", False),
        ("(x+x, 2)", "(2x,2)", True),
        ("x=5", "5", True),
        ("abc=5", "5", False),
        ("\\sqrt2", "\\sqrt{2}", True),
        ("sqrt(8)", "2\\sqrt{2}", True),
        ("x+y+z", "z+y+x", False),  # three letters are not evaluated
        ("x^{2}", "x^2", True),
        ("2^10", "1024", False),
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


def test_what_sympy_may_not_see():
    assert readable("1" * MAX_EXPRESSION)
    assert not readable("1" * (MAX_EXPRESSION + 1))
    assert not readable("x.y; z")


def test_expressions_that_run_long_are_refused():
    start = time.monotonic()
    for given in ("x+9**9**9**9", "x+99999999!", "x+((99!)!)!", "x+9^9^9^9", "x+9**(9**9)"):
        assert not math500.grade(given, "x+1.5")
    assert time.monotonic() - start < 5


def test_a_worker_that_hangs_is_ended(monkeypatch):
    worker = math_worker.Worker()
    try:
        assert worker.equal("y+x", "x+y")
        os.kill(worker._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(math_worker, "WALL_SECONDS", 0.2)
        assert not worker.equal("y+x", "x+y")
        monkeypatch.undo()
        assert worker.equal("y+x", "x+y")
    finally:
        worker.stop()


def test_separators_of_thousands_alone_are_stripped():
    assert strip_thousands("1,234,567") == "1234567"
    assert strip_thousands("1,2,345") == "1,2345"
    assert strip_thousands("(1,2)") == "(1,2)"


def test_the_last_whole_box_is_the_answer():
    assert math500.last_boxed("\\boxed{1} then \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert math500.last_boxed("\\boxed{1") is None
    assert math500.last_boxed("1") is None
