"""Several questions about one document, which is compressed before any of them is known.

The shared-context modes of SCBench ("SCBench: A KV Cache-Centric Analysis of Long-Context Methods", arXiv 2412.10319)
on documents of data_gen. A method that chooses tokens by a question's attention has to choose here without one.

- conversation: one cache; every question, and then its true answer, is appended before the next question.
- reuse: every question goes to a copy of the cache that holds the document alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le, MinLen

from leank.data_gen import haystack
from leank.data_gen.haystack import SPLITS
from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS, task
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tokens import counter_of
from leank.eval.benchmarks.base import Benchmark, Cell, Row, benchmark, check_lengths, known_tasks
from leank.typed import OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODES = ("conversation", "reuse")


@benchmark("multi_turn")
@dataclass
class MultiTurn(Benchmark):
    """Conversations about needles; a task of a table is a task of data_gen in one of the modes, such as kv_reuse."""

    # of data_gen's needle tasks, whose documents have as many questions as are asked
    tasks: Annotated[Sequence[str], MinLen(1)] = ("niah_multikey_1", "multikey", "kv", "niah_multiquery")
    # tokens of the document with its longest question and answer; the other turns come on top
    lengths: Annotated[Sequence[Positive], MinLen(1)] = (4096,)
    samples: Samples = 50  # documents of each task and length
    turns: Annotated[int, Ge(2), Le(10_000)] = 5  # questions about each
    modes: Annotated[Sequence[Annotated[str, OneOf(*MODES)]], MinLen(1)] = MODES  # see the module
    seed: Seed = 42  # of the generators
    essays: str | None = None  # essays, split: the natural text of essay haystacks, see data_gen.haystack
    split: Annotated[str, OneOf(*SPLITS)] = "all"
    name: str = "multi_turn"

    compress = "before_question"  # the document is compressed without a question

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        known = [name for name, one in TASKS.items() if isinstance(one, Niah)]
        known_tasks(self.tasks, known, "has no documents with several questions")
        check_lengths(self.lengths, limit)

    def identity(self) -> dict[str, object]:
        return {"essays": haystack.known_by(self.essays), "split": self.split, "turns": self.turns}

    def cells(self) -> list[Cell]:
        ids = tuple(str(index) for index in range(self.samples))
        return [
            Cell(f"{name}_{mode}", length, ids, self.turns, mode == "conversation")
            for length in self.lengths
            for mode in self.modes
            for name in self.tasks
        ]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one conversation, as the row of its first turn; see `Benchmark.row`."""
        assert cell.length is not None
        name, _, mode = cell.task.rpartition("_")
        wanted = Request(
            name, cell.length, counter_of(tokenizer), self.seed, int(sample), self.turns,
            essays=self.essays, split=self.split, reserve=overhead,
        )  # fmt: skip
        made = task(name).build(wanted)
        later: tuple[Row, ...] = ()
        for turn, asked in reversed(list(enumerate(made.questions, 1))):
            row = Row(
                task=cell.task,
                id=f"{sample}.{turn}",
                context=made.context,
                question=asked.question,
                answers=asked.answers,
                max_new_tokens=made.max_new_tokens,
                metric="ruler_all",
                answer_prefix=asked.answer_prefix,
                length=cell.length,
                meta={"turn": turn, "mode": mode},
                target=asked.target,
                later=later if turn == 1 else (),
            )
            later = (row, *later)
        return later[0]
