"""RULER's tasks from our generators, sized and worded as officially (see docs/benchmarks.md); 200 samples a task in
LeanK's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data_gen.sample import Sample
from data_gen.task import Request
from data_gen.tasks import TASKS, task
from data_gen.tokens import TokenCounter
from eval.benchmarks.base import Cell
from eval.benchmarks.row import Row

OFFICIAL = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
PART = ("qa_1", "qa_2")  # any reference counts


def draw(
    name: str, length: int, counter: TokenCounter, seed: int, index: int, essays: str | None = None, split: str = "all"
) -> Sample:
    """One sample of a task of data_gen, sized as RULER's: prompt and reply keep to `length` tokens."""
    wanted = Request(name, length, counter, seed, index, exact=False, essays=essays, split=split)
    return task(name).build(wanted).samples()[0]


@dataclass
class Ruler:
    """tasks: RULER's names; lengths: tokens of prompt and reply; samples: of each; seed: of the generators.

    essays, split: the natural text of essay haystacks, see data_gen.haystack.
    """

    tasks: Sequence[str] = OFFICIAL
    lengths: Sequence[int] = (4096, 8192, 16384, 32768, 65536, 131072)
    samples: int = 200
    seed: int = 42
    essays: str | None = None
    split: str = "all"
    name: str = "ruler"
    _counters: dict[int, TokenCounter] = field(default_factory=dict, repr=False)

    def check(self, config: Any, tokenizer: Any, overhead: int) -> None:
        known = [name for name in OFFICIAL if name in TASKS]
        for name in self.tasks:
            if name not in known:
                raise ValueError(f"benchmark.tasks: {name!r} is unknown; choose from {', '.join(known)}")
        if not self.tasks or not self.lengths:
            raise ValueError("benchmark.tasks and benchmark.lengths must not be empty")
        limit = getattr(config, "max_position_embeddings", None)
        for length in self.lengths:
            if not isinstance(length, int) or length < 1:
                raise ValueError(f"benchmark.lengths: {length!r} is no number of tokens")
            if limit is not None and length > limit:
                raise ValueError(
                    f"benchmark.lengths: {length} is more than the model's max_position_embeddings={limit}; "
                    "drop that length or extend the model's RoPE"
                )
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"benchmark.samples={self.samples!r} must be an integer of at least 1")
        for name in self.tasks:  # too short a length and missing essays are found here, not hours later
            self.row(Cell(name, min(self.lengths), ("0",)), "0", tokenizer, overhead)

    def identity(self) -> dict[str, Any]:
        return {"essays": self.essays, "split": self.split}

    def cells(self) -> list[Cell]:
        ids = tuple(str(index) for index in range(self.samples))
        return [Cell(name, length, ids) for length in self.lengths for name in self.tasks]

    def row(self, cell: Cell, sample: str, tokenizer: Any, overhead: int) -> Row:
        counter = self._counters.setdefault(id(tokenizer), TokenCounter(tokenizer))
        assert cell.length is not None
        made = draw(cell.task, cell.length - overhead, counter, self.seed, int(sample), self.essays, self.split)
        return Row(
            task=cell.task,
            id=sample,
            context=made.context,
            question=made.question,
            answers=made.answers,
            max_new_tokens=made.max_new_tokens,
            metric="ruler_part" if cell.task in PART else "ruler_all",
            answer_prefix=made.answer_prefix,
            length=cell.length,
        )
