"""Grades of MATH answers and the process that compares them; every grader on long texts made to hurt, in CPU time."""

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from leank.eval.benchmarks import gsm_infinite, math500, mmlu, niah
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.infinitebench import OFFICIAL
from leank.eval.metrics import math_equal
from tests import ROOT
from tests.helpers import parity
from tests.helpers.thinned import thinned

DIFFERENT = {("4/2", "2"), ("3,4", "4,3")}  # right here, wrong for prm800k: see docs/compare/benchmarks.md


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
    "text",
    thinned(["9^{9^{9^{9}}}", "(99999999999)!", "(x+1)^{99999}", "{" * 400, "x+9**9**9**9", "x+((99!)!)!"], (0, 5)),
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
math_equal.CPU_SECONDS = 1
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
        ask, given = math_equal._ask, []

        def impatient(process, line, seconds):
            given.append(seconds)
            return ask(process, line, 0.3 if len(given) == 1 else seconds)

        monkeypatch.setattr(math_equal, "_ask", impatient)
        assert worker.equal("y+x", "x+y")
        assert given == [math_equal.WALL_SECONDS, math_equal.START_SECONDS, math_equal.WALL_SECONDS]
    finally:
        worker.stop()
    assert worker._process is None


def test_a_worker_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start"):
        math_equal.Worker().equal("y+x", "x+y")


LENGTH = 30_000  # a quadratic regular expression takes seconds on it, a linear one milliseconds
# quadratic in Python by the benchmarks' own packages: 2 seconds for 1,200 words against 1,700; their replies are short
CHINESE = ("longbench dureader", "longbench multifieldqa_zh")
SLOW = ("longbench gov_report", "longbench lcc", "infinitebench longbook_sum_eng", *CHINESE)
SHORT = 400
SECONDS = 1.0  # of the process; a twentieth is usual

UNITS = {
    'digits': '9', 'word': 'a', 'words': 'the cat ', 'blanks': ' ', 'tabs': '\t', 'newlines': '\n', 'control': '\x08',
    'dots': '.', 'sentences': 'the a. ', 'lines': 'the a\n', 'minus': '-', 'minus blank': '- ', 'commas': ',',
    'thousands': '1,000,', 'digit blank': '1 ', 'decimals': '1.1', 'exclamation': '!', 'carets': '^', 'stars': '*',
    'slashes': '/', 'equals': '=', 'underscores': '_', 'backslashes': '\\', 'dollars': '$', 'percent': '%',
    'tildes': '~', 'ampersands': '&', 'single quotes': "'", 'double quotes': '"', 'open braces': '{',
    'closed braces': '}', 'brace pairs': '{}', 'open brackets': '[', 'open parentheses': '(', 'calls': 'f(',
    'backquotes': '`', 'boxed': '\\boxed{', 'boxed digits': '\\boxed{9', 'fractions': '\\frac{',
    'bare fractions': '\\frac', 'fractions of fractions': '\\frac{1}{', 'roots': '\\sqrt{', 'bare roots': '\\sqrt',
    'text': '\\text{ ', 'begin': '\\begin{x}', 'matrix': '\\begin{matrix}', 'left': '\\left(', 'degrees': 'degree ',
    'circles': '^ \\circ', 'powers': '^{', 'accents': 'é', 'Chinese': '漢', 'wide digits': '９', 'combining': 'é',
    'emoji': '😀', 'surrogates': '\ud800', 'answers': 'answer ', 'Answers': 'Answer: ', 'is': 'is ', 'letters': 'A ',
    'variables': 'V1 ', 'paragraphs': 'Paragraph 1 ', 'thinks': '</think>',
}  # fmt: skip


def texts() -> Iterator[tuple[str, str]]:
    """Each kind of text, by name."""
    for name, unit in UNITS.items():
        yield name, (unit * (LENGTH // len(unit) + 1))[:LENGTH]
    half = LENGTH // 2
    yield "nested braces", "{" * half + "}" * half
    yield "nested parentheses", "(" * half + ")" * half
    yield "distinct sentences", " ".join(f"the {i}." for i in range(LENGTH // 9))[:LENGTH]
    yield "distinct lines", "\n".join(f"the {i}" for i in range(LENGTH // 9))[:LENGTH]
    yield "distinct words", " ".join(map(str, range(LENGTH // 6)))[:LENGTH]
    for opening in ("answer", "Answer: ", "answer is ", "is ", "\\text{Answer: } ", "V"):
        for name in ("blanks", "digits", "newlines", "stars"):
            yield f"{opening!r} and {name}", (opening + UNITS[name] * LENGTH)[:LENGTH]


SUMMARY = "\n".join(f"the cat {i} sat on a mat, and 9 of the answers is A or {i % 7}." for i in range(12))
CODE = "    return self.aaaa(the_cat[9], 'x', \"y\") + ((((9999 - 1.1) / 2)))" + "a9" * 60  # below difflib's autojunk


def _gold(text: str) -> None:
    with contextlib.suppress(ValueError):
        gsm_infinite.gold_answer(None, text)


def scorer(metric: str, task: str, *answers: object) -> Callable[[str], float]:
    row = Row(task, "0", "c", "q", answers, 8, metric, all_classes=["cat", "the cat", "a"])
    return functools.partial(score_row, row)


LONGBENCH_ANSWERS = {
    **dict.fromkeys(("hotpotqa", "gov_report", "trec", "passage_count", "dureader", "multifieldqa_zh"), SUMMARY),
    **{"lcc": CODE, "passage_retrieval_en": "Paragraph 1", "passage_retrieval_zh": "段落1"},
}
INFINITEBENCH_LABELS: dict[str, list[object]] = {
    "code_debug": ["f", "B"],
    "longbook_choice_eng": ["Paul", "B"],
    "longbook_sum_eng": [SUMMARY],
    "code_run": [5],
    "math_find": [9],
    "math_calc": [9, 99],
}
GRADERS: dict[str, Callable[[str], object]] = {
    "ruler": scorer("ruler_all", "vt", "1234567", "cat", "a" * 1000 + "x"),
    "gsm_infinite": scorer("gsm_infinite", "gsm_infinite", 31),
    "gsm_infinite symbolic": scorer("gsm_symbolic", "gsm_infinite_symbolic", "V1"),
    "gsm_infinite gold": _gold,
    "mmlu letter": mmlu.extract_letter,
    "niah recall": niah.recall,
    **{f"longbench {task}": scorer("longbench", task, answer) for task, answer in LONGBENCH_ANSWERS.items()},
    **{
        f"infinitebench {task}": scorer("infinitebench", task, *INFINITEBENCH_LABELS.get(task, ["the cat"]))
        for task in OFFICIAL["max_new_tokens"]
    },
}


@pytest.mark.parametrize("name", GRADERS)
def test_every_kind_of_long_text_is_cheap(name):
    if name in CHINESE and not importlib.util.find_spec("jieba"):
        pytest.skip("jieba is not installed")
    grader = GRADERS[name]
    grader("x+2")  # loads libraries and dictionaries

    def seconds(text):
        start = time.process_time()
        grader(text[:SHORT] if name in SLOW else text)
        return time.process_time() - start

    # the better of two, since others share the cores
    slow = [kind for kind, text in texts() if seconds(text) >= SECONDS and seconds(text) >= SECONDS]
    assert slow == []
