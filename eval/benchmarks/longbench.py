"""LongBench v1: prompts, truncation, rows and scores.

Source: THUDM/LongBench 2e00731, pred.py, metrics.py, eval.py and config/ (MIT; prompts unchanged in assets/, typo
"asconcisely" included). Data: <task>.jsonl files (or .jsonl.gz) in a folder, else the benchmark's data.zip from the
Hugging Face hub. Chinese tasks need the optional package jieba (``pip install jieba``); no English task does.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NotRequired

from annotated_types import Ge, MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, asset, read
from leank.eval.metrics.text import normalize_chinese, qa_f1, rouge_l, token_f1
from leank.typed import OneOf, Positive

HUB = Hub("zai-org/LongBench", "data.zip")  # THUDM/LongBench until it moved; its loading script is refused

# Chat models do better without their template on few-shot and code tasks (official choice).
NO_CHAT_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
ENGLISH_TASKS = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
# LongBench-E draws 13 of them anew, evenly over context lengths.
E_TASKS = tuple(f"{task}_e" for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique", "qmsum"))
PRESETS: dict[str, tuple[str, ...]] = {
    "english": ENGLISH_TASKS,
    "think": ENGLISH_TASKS,
    "iap": ENGLISH_TASKS,
    "leank": tuple(task for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique")),
    "longbench_e": E_TASKS,
}
PROMPTS: dict[str, str] = asset("longbench_dataset2prompt")  # of each task; with {context}, and most with {input}
MAX_NEW_TOKENS: dict[str, int] = asset("longbench_dataset2maxlen")  # of each task
FIRST_LINE_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht"})


class LongBenchLine(TypedDict):
    """A line of the data set."""

    context: NotBlank
    input: str
    answers: Annotated[list[NotBlank], MinLen(1)]
    all_classes: NotRequired[Annotated[list[NotBlank], MinLen(1)] | None]
    length: NotRequired[Annotated[int, Ge(0)] | None]
    dataset: NotRequired[NotBlank | None]
    _id: NotRequired[str | int | None]


@benchmark("longbench")
@dataclass
class LongBench(FromFiles):
    """LongBench v1; path: .jsonl, .jsonl.gz, data.zip or a folder of them."""

    tasks: Tasks | None = None  # official names; None takes those of `preset`
    preset: Annotated[str, OneOf(*PRESETS)] = "leank"  # tasks of a paper's table
    # tokens above which a prompt is cut; None takes what the model's positions leave
    max_length: Positive | None = None
    name: str = "longbench"

    schema = TypeAdapter(LongBenchLine)
    same = ("_id",)
    cut = True
    counted = ("max_length",)

    def wanted(self) -> Sequence[str]:
        return known_tasks(self.tasks or PRESETS[self.preset], [*PROMPTS, *E_TASKS], "is not in LongBench")

    def lines(self, task: str) -> Iterator[Line]:
        return read(f"LongBench {task}", task, self.path, HUB)

    def build(self, task: str, data: LongBenchLine) -> Row:
        """Build a row with the official prompt, for LongBench-E ("_e") that of the same task."""
        name = task.removesuffix("_e")
        if (of := data.get("dataset")) is not None and of.removesuffix("_e") != name:
            raise ValueError(f'"dataset" is {of!r}, which is not the task {task!r}')
        if "{input}" in PROMPTS[name] and not data["input"].strip():
            raise ValueError('"input" is blank, and it is the question')
        start, end = PROMPTS[name].split("{context}")
        return Row(
            task=task,
            id=str(data.get("_id", "")),
            context=start + data["context"],
            question=end.format(input=data["input"]),
            answers=list(data["answers"]),
            max_new_tokens=MAX_NEW_TOKENS[name],
            metric="longbench",
            # samsum: the official run also stops at the token for a newline, and allows neither end as the first token
            ends=("\n",) if name == "samsum" else (),
            min_new_tokens=1 if name == "samsum" else 0,
            chat=name not in NO_CHAT_TASKS,
            all_classes=data.get("all_classes"),
            length=data.get("length"),
        )

    def right(self, row: Row) -> Sequence[str]:
        """Return the answers; none for code, whose line may end in a comment, and for ROUGE-L, which may overflow."""
        official = METRIC_OF_TASK[row.task.removesuffix("_e")]
        return () if official in (code_similarity, rouge_l, rouge_chinese) else row.answers


@metric("longbench")
def score(row: Row, reply: str) -> float:
    """The official score of the row's task: the best over the answers, 0-1.

    trec, triviaqa, samsum and lsht judge only the first line after leading newlines.
    Raises ValueError for a classification task without classes.
    """
    task = row.task.removesuffix("_e")
    if task in FIRST_LINE_TASKS:
        reply = reply.lstrip("\n").split("\n")[0]
    official = METRIC_OF_TASK[task]
    if official is not classification:
        return float(max(official(reply, answer) for answer in row.answers))
    if row.all_classes is None:
        raise ValueError(f'{row.task} needs "all_classes", the names of the classes')
    return float(max(classification(reply, answer, row.all_classes) for answer in row.answers))


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


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity of the reply's first code line and the reference, 0-1 in steps of 0.01: fuzzywuzzy's, on difflib.

    The first code line has none of ` # // (so a line with a trailing comment is skipped); without one it is "".
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def rouge_chinese(prediction: str, reference: str) -> float:
    """`rouge_l` of the jieba words of both texts."""
    return rouge_l(" ".join(_jieba(prediction)), " ".join(_jieba(reference)))


def qa_f1_chinese(prediction: str, reference: str) -> float:
    """F1 over normalised, non-empty jieba words, 0-1."""
    bags = [[w for w in map(normalize_chinese, _jieba(text)) if w] for text in (prediction, reference)]
    return token_f1(*bags)


def _jieba(text: str) -> list[str]:
    try:
        import jieba
    except ImportError as error:
        raise ImportError("LongBench's Chinese tasks are scored on jieba words: pip install jieba") from error
    return list(jieba.cut(text, cut_all=False))


METRIC_OF_TASK: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
    **dict.fromkeys(("dureader", "vcsum"), rouge_chinese),
    "multifieldqa_zh": qa_f1_chinese,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    "passage_retrieval_zh": partial(retrieval, pattern=r"段落(\d+)"),
}
