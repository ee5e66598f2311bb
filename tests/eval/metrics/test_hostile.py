"""Every grader on long texts made to hurt: what each kind of text costs.

`python -m tests.eval.metrics.test_hostile [GRADER ...]` prints a line per grader and kind: CPU seconds and MB.
"""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leank.eval.benchmarks import gsm_infinite, mmlu, niah
from leank.eval.benchmarks.infinitebench import assets
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.scoring import score_row
from tests import ROOT

LENGTH = 200_000
SECONDS, MEGABYTES = 1.0, 200.0

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


SUMMARY = "\n".join(f"the cat {i} sat on a mat, and 9 of the answers is A or {i % 7}." for i in range(60))
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
        for task in assets()["max_new_tokens"]
    },
}
CHINESE = ("longbench dureader", "longbench multifieldqa_zh")


def measure(name: str) -> Iterator[tuple[str, float, float]]:
    """(kind, CPU seconds, MB above what was held before the first kind) of a grader's texts."""
    grader, pids = GRADERS[name], [os.getpid()]
    grader("x+2")  # loads libraries and dictionaries
    before = sum(_peak(pid, fresh=True) for pid in pids)
    for kind, text in texts():
        start = sum(map(_cpu, pids))
        grader(text)
        yield kind, sum(map(_cpu, pids)) - start, sum(map(_peak, pids)) - before
        for pid in pids:
            _peak(pid, fresh=True)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int, fresh: bool = False) -> float:
    """Peak of the resident set in MB, since the last `fresh` call."""
    if fresh:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@functools.cache
def table(benchmark: str) -> list[tuple[str, str, float, float]]:
    """(grader, kind, seconds, MB) of a benchmark's graders, measured in a process of its own."""
    names = [name for name in available() if name.split()[0] == benchmark]
    command = [sys.executable, "-m", "tests.eval.metrics.test_hostile", *names]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def available() -> list[str]:
    """The graders whose packages are installed."""
    return [name for name in GRADERS if name not in CHINESE or importlib.util.find_spec("jieba")]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
@pytest.mark.parametrize("name", GRADERS)
def test_every_kind_of_long_text_is_cheap(name):
    rows = [row for row in table(name.split()[0]) if row[0] == name]
    assert len(rows) == len(list(texts()))
    assert [row for row in rows if row[2] >= SECONDS or row[3] >= MEGABYTES] == []


if __name__ == "__main__":
    for chosen in sys.argv[1:] or available():
        for kind, seconds, megabytes in measure(chosen):
            print(json.dumps([chosen, kind, round(seconds, 2), round(megabytes, 1)]), flush=True)
