"""RULER's tasks from the generators of data_gen, sized, worded and scored as officially (docs/compare/benchmarks.md).

Source: NVIDIA/RULER c3f5e3b, scripts/eval (Apache-2.0). LeanK's tables have 200 samples per task.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import MinLen

from leank.data_gen import haystack
from leank.data_gen.amount import amount
from leank.data_gen.haystack import SPLITS
from leank.data_gen.task import Request, Sample
from leank.data_gen.tasks import CHAINS, qa, task
from leank.data_gen.tokens import counter_of
from leank.errors import naming
from leank.eval.benchmarks.base import Benchmark, Cell, Row, benchmark, check_lengths, known_tasks, metric
from leank.typed import OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OFFICIAL = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
EXTRA = tuple(CHAINS)  # tasks that RULER does not have, and that are sized and scored as its own
QA = {"qa_1": "squad", "qa_2": "hotpotqa"}  # and the setting that names their data; any reference counts


def draw(
    name: str, length: int, tokenizer: PreTrainedTokenizerBase, seed: int, index: int, essays: str | None = None,
    split: str = "all", data: str | None = None,
) -> Sample:  # fmt: skip
    """One sample of a task of data_gen, sized as RULER's: prompt and reply keep to `length` tokens."""
    counter = counter_of(tokenizer)
    wanted = Request(name, length, counter, seed, index, exact=False, essays=essays, split=split, data=data)
    return task(name).build(wanted).samples()[0]


@benchmark("ruler")
@dataclass
class Ruler(Benchmark):
    """RULER, cell by cell (eval.benchmarks.base): a cell is a task at a length."""

    tasks: Annotated[Sequence[str], MinLen(1)] = OFFICIAL  # RULER's names, or those of `EXTRA`
    # tokens of prompt and reply
    lengths: Annotated[Sequence[Positive], MinLen(1)] = (4096, 8192, 16384, 32768, 65536, 131072)
    samples: Samples = 200  # of each task and length
    seed: Seed = 42  # of the generators
    essays: str | None = None  # essays, split: the natural text of essay haystacks, see data_gen.haystack
    split: Annotated[str, OneOf(*SPLITS)] = "all"
    squad: str | None = None  # squad, hotpotqa: the data of qa_1 and qa_2, see data_gen.tasks.qa
    hotpotqa: str | None = None
    name: str = "ruler"

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        known_tasks(self.tasks, [*OFFICIAL, *EXTRA], "is unknown")
        check_lengths(self.lengths, limit)
        for name in QA.keys() & {*self.tasks}:
            where = f"benchmark.{QA[name]}={self._data(name)} ({name})"
            with naming(where):
                questions, _ = qa.read(QA[name], self._data(name))
            if len(questions) < self.samples:
                found = amount(len(questions), "question")
                raise ValueError(f"{where} has {found}, benchmark.samples={self.samples}; lower samples")

    def identity(self) -> dict[str, object]:
        return {"essays": haystack.known_by(self.essays), "split": self.split}

    def data(self, task: str) -> str | None:
        return qa.known_by(QA[task], self._data(task)) if task in QA else None

    def cells(self) -> list[Cell]:
        ids = tuple(str(index) for index in range(self.samples))
        return [Cell(name, length, ids) for length in self.lengths for name in self.tasks]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        assert cell.length is not None
        length = cell.length - overhead
        data = self._data(cell.task)
        made = draw(cell.task, length, tokenizer, self.seed, int(sample), self.essays, self.split, data)
        return Row(
            task=cell.task,
            id=sample,
            context=made.context,
            question=made.question,
            answers=made.answers,
            max_new_tokens=made.max_new_tokens,
            metric="ruler_part" if cell.task in QA else "ruler_all",
            answer_prefix=made.answer_prefix,
            length=cell.length,
        )

    def _data(self, name: str) -> str | None:
        return getattr(self, QA[name]) if name in QA else None


@metric("ruler_all")
def score_all(row: Row, reply: str) -> float:
    """The share of the references that the reply holds, 0-1 (NIAH, vt, cwe, fwe)."""
    found = _found(row, reply)
    return round(sum(found) / len(found) * 100, 2) / 100  # per cent with two decimals, as officially


@metric("ruler_part")
def score_part(row: Row, reply: str) -> float:
    """Whether the reply holds any of the references, 0 or 1 (QA)."""
    return float(any(_found(row, reply)))


def _found(row: Row, reply: str) -> list[bool]:
    """Whether each reference occurs in the reply, by substring and lower(), not casefold(): "no" is in "know"."""
    text = postprocess(reply).lower()
    return [reference.lower() in text for reference in row.answers]


def postprocess(text: str) -> str:
    """Strip the reply and turn every control character (tabs too) into a newline."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()
