"""LongBench v1 scorers.

Source: THUDM/LongBench 2e00731, metrics.py and eval.py (MIT). `score` judges one reply, `score_all` and `score_buckets`
a task. Chinese tasks need the optional package jieba (``pip install jieba``); no English task does.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from leank.data_gen.amount import amount
from leank.eval.metrics.rouge import lcs_increments, rouge_l
from leank.eval.metrics.text import normalize_chinese, qa_f1, token_f1

CodeBackend = Literal["difflib", "levenshtein"]
# Characters that are read at most; officially all. Code has replies of 64 tokens, some 300 characters; Chinese has 512
# tokens, some 1,000.
MAX_CODE_LINE = 2000
MAX_CHINESE = 8000
FIRST_LINE_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht"})
BUCKETS = ("0-4k", "4-8k", "8k+")


def score(
    task: str,
    prediction: str,
    answers: Sequence[str] | str,
    all_classes: Sequence[str] | None = None,
    code_backend: CodeBackend = "difflib",
) -> float:
    """Score one reply: the task's metric against each reference, the maximum of them, 0-1.

    task: official name, a LongBench-E "_e" ending is ignored. trec, triviaqa, samsum and lsht judge only the first
    line after leading newlines. all_classes: the class names (trec, lsht). code_backend: see `code_similarity`.
    Raises ValueError for an unknown task, or a classification task without classes.
    """
    name = task.removesuffix("_e")
    if name not in METRIC_OF_TASK:
        raise ValueError(f"task={task!r} is not in LongBench; choose one of {', '.join(sorted(METRIC_OF_TASK))}")
    if name in FIRST_LINE_TASKS:
        prediction = prediction.lstrip("\n").split("\n")[0]
    references = [answers] if isinstance(answers, str) else answers
    metric = METRIC_OF_TASK[name]
    if metric is classification:
        if all_classes is None:
            raise ValueError(f"task={task!r} needs all_classes: the row's list of class names")
        scores = [classification(prediction, reference, all_classes) for reference in references]
    elif metric is code_similarity:
        scores = [code_similarity(prediction, reference, code_backend) for reference in references]
    else:
        scores = [metric(prediction, reference) for reference in references]
    return float(max([0.0, *scores]))


def score_all(
    task: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None = None,
    code_backend: CodeBackend = "difflib",
) -> float:
    """Mean `score` of a task's replies, 0-100, two decimals. Raises ValueError for no replies or unequal lengths."""
    scores = _scores(task, predictions, answers, all_classes, code_backend)
    return round(100 * sum(scores) / len(scores), 2)


def score_buckets(
    task: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    lengths: Sequence[int],
    all_classes: Sequence[str] | None = None,
    code_backend: CodeBackend = "difflib",
) -> dict[str, float | None]:
    """LongBench-E: the mean of each bucket of context length, 0-100, two decimals; None where a bucket is empty.

    lengths: the rows' "length" (words, not tokens): below 4000, below 8000, the rest.
    """
    scores = _scores(task, predictions, answers, all_classes, code_backend)
    buckets: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for value, length in zip(scores, lengths, strict=True):
        buckets[BUCKETS[(length >= 4000) + (length >= 8000)]].append(value)
    return {name: round(100 * float(np.mean(values)), 2) if values else None for name, values in buckets.items()}


def classification(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """1 / (class names found in the reply) if the right one is among them, else 0.

    Names that are a proper part of the right one do not count, but officially they are removed from the list while it
    is walked, so the name after a removed one escapes the check. That is kept.
    """
    found = [name for name in all_classes if name in prediction]
    i = 0
    while i < len(found):
        name = found[i]
        if name in reference and name != reference:
            found.remove(name)
        i += 1
    return 1.0 / len(found) if reference in found else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the reply that equal the reference as text ("015" is not "15"), 0-1."""
    numbers = re.findall(r"\d+", prediction)
    return sum(number == str(reference) for number in numbers) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, pattern: str = r"Paragraph (\d+)") -> float:
    """`count` against the paragraph number that the reference names. Raises ValueError if it names none."""
    named = re.search(pattern, reference)
    if named is None:
        raise ValueError(f"reference {reference!r} names no paragraph; expected text like {pattern!r}")
    return count(prediction, named[1])


def code_similarity(prediction: str, reference: str, backend: CodeBackend = "difflib") -> float:
    """Similarity of the reply's first code line and the reference, 0-1 in steps of 0.01.

    The first code line has none of ` # // (so a line with a trailing comment is skipped); without one it is "".
    Of that line and of the reference `MAX_CODE_LINE` characters are compared.
    backend: "difflib" is fuzzywuzzy as LongBench installs it, "levenshtein" is fuzzywuzzy with python-Levenshtein.

    Raises ValueError for another backend.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    line, reference = line[:MAX_CODE_LINE], reference[:MAX_CODE_LINE]
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    if backend == "difflib":
        ratio = difflib.SequenceMatcher(None, line, reference).ratio()
    elif backend == "levenshtein":
        total = len(line) + len(reference)
        lcs = len(reference) - lcs_increments(line, reference)[-1].bit_count()
        ratio = 1.0 - (total - 2 * lcs) / total
    else:
        raise ValueError(f"code_backend={backend!r}: choose 'difflib' (official default) or 'levenshtein'")
    return round(100 * ratio) / 100


def rouge_chinese(prediction: str, reference: str) -> float:
    """`rouge_l` of the jieba words of both texts, of each at most `MAX_CHINESE` characters."""
    return rouge_l(" ".join(_jieba(prediction)), " ".join(_jieba(reference)))


def qa_f1_chinese(prediction: str, reference: str) -> float:
    """F1 over normalised, non-empty jieba words, 0-1; of each text at most `MAX_CHINESE` characters are read."""
    bags = [[w for w in map(normalize_chinese, _jieba(text)) if w] for text in (prediction, reference)]
    return token_f1(*bags)


def retrieval_chinese(prediction: str, reference: str) -> float:
    """`retrieval` where references read "段落12"."""
    return retrieval(prediction, reference, r"段落(\d+)")


def _jieba(text: str) -> list[str]:
    """The words of the first `MAX_CHINESE` characters."""
    try:
        import jieba
    except ImportError as error:
        raise ImportError("LongBench's Chinese tasks are scored on jieba words: pip install jieba") from error
    return list(jieba.cut(text[:MAX_CHINESE], cut_all=False))


def _scores(
    task: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None,
    code_backend: CodeBackend,
) -> list[float]:
    if not predictions or len(predictions) != len(answers):
        found = f"{amount(len(predictions), 'prediction')} for {amount(len(answers), 'row')}"
        raise ValueError(f"{task}: {found}; need one each, at least one")
    return [score(task, p, a, all_classes, code_backend) for p, a in zip(predictions, answers, strict=True)]


METRIC_OF_TASK: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
    **dict.fromkeys(("dureader", "vcsum"), rouge_chinese),
    "multifieldqa_zh": qa_f1_chinese,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    "passage_retrieval_zh": retrieval_chinese,
}
