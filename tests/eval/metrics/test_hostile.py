"""Every grader on long texts made to hurt: what each kind of text costs in CPU time.

MATH's grader has a process of its own with limits (test_math.py).
"""

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator

import pytest

from leank.eval.benchmarks import gsm_infinite, mmlu, niah
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.infinitebench import OFFICIAL

LENGTH = 200_000
# slow by the benchmarks' own packages; their replies have few tokens, and so few words
CHINESE = ("longbench dureader", "longbench multifieldqa_zh")
SLOW = ("longbench gov_report", "longbench lcc", "infinitebench longbook_sum_eng", *CHINESE)
SHORT = 1200
SECONDS = 1.0

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
        for task in OFFICIAL["max_new_tokens"]
    },
}


@pytest.mark.parametrize("name", GRADERS)
def test_every_kind_of_long_text_is_cheap(name):
    if name in CHINESE and not importlib.util.find_spec("jieba"):
        pytest.skip("jieba is not installed")
    grader = GRADERS[name]
    grader("x+2")  # loads libraries and dictionaries
    slow = []
    for kind, text in texts():
        start = time.process_time()
        grader(text[:SHORT] if name in SLOW else text)
        if (seconds := time.process_time() - start) >= SECONDS:
            slow.append((kind, seconds))
    assert slow == []
