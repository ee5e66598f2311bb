"""What a benchmark offers to the replay: cells (task, length) of samples, each built only when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eval.benchmarks.row import Row


@dataclass(frozen=True)
class Cell:
    """The samples of one task at one length (None where a benchmark has no lengths), by id, in order."""

    task: str
    length: int | None
    samples: tuple[str, ...]


class Benchmark(Protocol):
    """A benchmark, configured. `name` and `seed` are part of every row's key."""

    name: str
    seed: int

    def check(self, config: Any, tokenizer: Any, overhead: int) -> None:
        """Raise ValueError or FileNotFoundError before any weights are loaded; config is the model's."""

    def identity(self) -> dict[str, Any]:
        """What a sample depends on beside its task, length and id, as JSON."""

    def cells(self) -> Sequence[Cell]:
        """All cells, in the order in which they are run."""

    def row(self, cell: Cell, sample: str, tokenizer: Any, overhead: int) -> Row:
        """One sample; overhead: tokens that the chat template will add."""
