"""What a benchmark offers to the replay: cells (task, length) of samples, each built as a row when it is needed.

A benchmark's file registers its settings class and the scorers that its rows name:

    @metric("exact")
    def exact(row, reply):
        return float(reply == row.answers[0])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from leank.registry import import_all
from leank.typed import Checked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """A prompt with its answers.

    The model reads ``messages()`` through its chat template, or ``prompt`` as it is where `chat` is False; then
    `answer_prefix`, which stands after the assistant header. `context` ends where the question begins, so that a
    method may compress before or after the question.

    answers: what `metric` compares with (strings; for GSM-Infinite the integer; for InfiniteBench its label).
    stop: the reply ends at the first of these strings. ends: the last token of each of these texts ends the reply as
    end-of-text does. min_new_tokens: neither end-of-text nor `ends` is allowed earlier.
    preamble: messages before the user's turn. all_classes: class names of a classification task. length: the data
    set's own length, in its own unit. read: the question is a text that is read through the cache, and no reply
    follows. meta: whatever else the tables group by (op, template, depth, ...).
    target: the true answer as a conversation goes on with it. later: its later turns, which share the context.
    """

    task: str
    id: str
    context: str
    question: str
    answers: Sequence[Any]
    max_new_tokens: int
    metric: str
    answer_prefix: str = ""
    stop: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    min_new_tokens: int = 0
    chat: bool = True
    preamble: tuple[Message, ...] = ()
    all_classes: Sequence[str] | None = None
    length: int | None = None
    read: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    later: tuple[Row, ...] = ()

    @property
    def prompt(self) -> str:
        """The user's turn: context and question."""
        return self.context + self.question

    def messages(self) -> list[Message]:
        """The conversation up to the reply, without `answer_prefix`."""
        return [*self.preamble, {"role": "user", "content": self.prompt}]


def kept(data: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return those of the named fields that a line has, for `Row.meta`; null is as if it were missing."""
    return {name: data[name] for name in names if data.get(name) is not None}


Scorer = Callable[[Row, str], float]
METRICS: dict[str, Scorer] = {}
STATED: dict[str, Callable[[str], object]] = {}
_BY_OP: set[str] = set()


def metric(name: str, by_op: bool = False, states: Callable[[str], object] | None = None) -> Callable[[Scorer], Scorer]:
    """Register a scorer: of a row and a reply up to the first stop string, 0-1; name: for a row's `metric`.

    by_op: whether the report also groups its rows by `meta["op"]`, with the area under that curve.
    states: the answer that a reply states, None without any, where replies with equal answers have equal scores:
      sampled replies of one sample vote by it.
    """

    def register(scorer: Scorer) -> Scorer:
        METRICS[name] = scorer
        if by_op:
            _BY_OP.add(name)
        if states is not None:
            STATED[name] = states
        return scorer

    return register


def metrics_by_op() -> list[str]:
    """Return the names of the metrics whose rows the report groups by op."""
    import_all("leank.eval.benchmarks")
    return sorted(_BY_OP)


def cut_at_stop(reply: str, stop: Sequence[str]) -> str:
    """The reply up to the first stop string."""
    ends = [at for at in (reply.find(text) for text in stop if text) if at != -1]
    return reply[: min(ends)] if ends else reply


def score_row(row: Row, reply: str) -> float:
    """Score one reply by the row's metric, 0-1. Raises ValueError for a metric that no scorer has."""
    if row.metric not in METRICS:
        import_all("leank.eval.benchmarks")
    if row.metric not in METRICS:
        raise ValueError(f"metric={row.metric!r} of task {row.task!r} has no scorer; register one with @metric")
    return METRICS[row.metric](row, cut_at_stop(reply, row.stop))


def stated(row: Row, reply: str) -> str | None:
    """Return the answer that a reply states, as a text, None without any; the row's metric is one of `STATED`."""
    found = STATED[row.metric](cut_at_stop(reply, row.stop))
    return None if found is None else str(found)


KNOWN: dict[str, type] = {}
B = TypeVar("B", bound=type)


def benchmark(name: str) -> Callable[[B], B]:
    """Register a settings class as the benchmark called `name`, which `benchmark.name` then selects."""

    def register(kind: B) -> B:
        KNOWN[name] = kind
        return kind

    return register


def benchmarks() -> dict[str, type]:
    """Return the class of every benchmark by name, from all files of this folder."""
    import_all("leank.eval.benchmarks")
    return dict(sorted(KNOWN.items()))


@dataclass(frozen=True)
class Cell:
    """The samples of one task at one length (None where a benchmark has no lengths), by id, in order.

    turns: questions of each sample; with several, a sample is a conversation, and `Row.later` has its later turns.
    one_cache: whether a conversation's turns follow each other on one cache; else each has a copy of the context's.
    """

    task: str
    length: int | None
    samples: tuple[str, ...]
    turns: int = 1
    one_cache: bool = False

    def ids(self, sample: str) -> list[str]:
        """The ids of a sample's rows: its own, or one for each turn."""
        return [sample] if self.turns == 1 else [f"{sample}.{turn}" for turn in range(1, self.turns + 1)]

    @property
    def place(self) -> str:
        """Task and length in words, for messages."""
        return self.task if self.length is None else f"{self.task}, {self.length} tokens"


class Benchmark(Checked, ABC):
    """The base of all benchmarks, whose settings are the fields of a dataclass; `name` and `seed` are among them."""

    name: str
    seed: int
    compress: ClassVar[str | None] = None  # what the run must be set to; None leaves it free

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """All cells, in the order in which they are run."""

    @abstractmethod
    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """One sample; overhead: tokens that the chat template will add."""

    def identity(self) -> dict[str, object]:
        """What every sample depends on beside its task, length, id and data, as JSON. To be asked after `check`."""
        return {}

    def data(self, task: str) -> str | None:
        """What the files of a task's samples are known by, None without files; to be asked after `check`."""
        return None

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        """Check settings, and read data; limit: the model's positions, None without one. See `check`."""

    def tried(self) -> Iterable[tuple[Cell, str]]:
        """The samples that `check` builds: by default the first of every task at its shortest length."""
        shortest = {cell.task: cell for cell in sorted(self.cells(), key=lambda cell: -(cell.length or 0))}
        return [(cell, cell.samples[0]) for cell in shortest.values()]

    def check(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, overhead: int, max_new_tokens: int | None
    ) -> None:
        """Prepare, and build some samples, before any weights are loaded; max_new_tokens: None = the rows' own.

        Raises ValueError or FileNotFoundError, naming the setting or the file.
        """
        limit = getattr(config, "max_position_embeddings", None)
        self.prepare(tokenizer, limit, max_new_tokens)
        for cell, sample in self.tried():
            row = self.row(cell, sample, tokenizer, overhead)
            if row.read:  # a text, to which no reply is added
                continue
            before = "".join(message["content"] + "\n\n" for message in row.preamble)
            prompt = len(tokenizer(before + row.prompt + row.answer_prefix)["input_ids"]) + overhead
            tokens = max_new_tokens or row.max_new_tokens
            if limit is not None and prompt + tokens > limit:
                raise ValueError(
                    f"{row.task} has a sample of {prompt} tokens and replies of {tokens}, together more than the "
                    f"model's max_position_embeddings={limit}; lower max_new_tokens, use shorter samples or extend the "
                    "model's RoPE"
                )


def known_tasks(tasks: Iterable[str], known: Collection[str], where: str) -> Sequence[str]:
    """Return the tasks. Raises ValueError for one that is not known."""
    for task in (found := list(tasks)):
        if task not in known:
            raise ValueError(f"benchmark.tasks: {task!r} {where}; choose from {', '.join(known)}")
    return found


def check_lengths(lengths: Sequence[int], limit: int | None) -> None:
    """Raise ValueError if a length of a benchmark is more than the model's positions; limit: None without one."""
    if limit is not None and max(lengths) > limit:
        raise ValueError(
            f"benchmark.lengths: {max(lengths)} is more than the model's max_position_embeddings={limit}; "
            "drop that length or extend the model's RoPE"
        )
