"""LongBench and GSM-Infinite from files, cell by cell: what the replay asks of a benchmark (eval.benchmarks.base)."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks import gsm_infinite, longbench
from eval.benchmarks.base import Cell
from eval.benchmarks.row import Row


@dataclass
class LongBench:
    """tasks: official names; None takes those of `preset`. path: .jsonl, .jsonl.gz, data.zip or a folder; None asks the
    hub. samples: the first so many of each task, None = all. max_length: prompt tokens before truncation, None = what
    the model's positions leave."""

    tasks: Sequence[str] | None = None
    preset: str = "leank"
    path: str | None = None
    samples: int | None = None
    max_length: int | None = None
    name: str = "longbench"
    seed: int = 0
    _data: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)

    def check(self, config: Any, tokenizer: Any, overhead: int) -> None:
        known = longbench.max_new_tokens()
        names = list(self.tasks) if self.tasks else list(longbench.tasks(self.preset))
        for task in names:
            if task.removesuffix("_e") not in known:
                raise ValueError(f"benchmark.tasks: {task!r} is not in LongBench; choose from {', '.join(known)}")
        self._limit = getattr(config, "max_position_embeddings", None)
        for task in names:
            lines = list(longbench.read(task, self.path))
            if not lines:
                raise ValueError(f"benchmark.path={self.path}: {task} has no lines")
            self._data[task] = lines[: self.samples]
            self.row(Cell(task, None, ("0",)), "0", tokenizer, overhead)

    def identity(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def cells(self) -> list[Cell]:
        return [Cell(task, None, tuple(map(str, range(len(lines))))) for task, lines in self._data.items()]

    def row(self, cell: Cell, sample: str, tokenizer: Any, overhead: int) -> Row:
        reply = longbench.max_new_tokens()[cell.task.removesuffix("_e")]
        limit = self.max_length
        if limit is None and self._limit is not None:
            limit = self._limit - reply - overhead - 8  # the seam of a truncated prompt may cost a token or two
        return longbench.build_row(cell.task, self._data[cell.task][int(sample)], tokenizer, limit)


@dataclass
class GsmInfinite:
    """path: .jsonl or .jsonl.gz of problems, see gsm_infinite.realistic_row. samples: the first so many of each subset,
    length and op, None = all. ops: only these. merge_turns: one user turn, for templates that refuse two in a row."""

    path: str | None = None
    samples: int | None = None
    ops: Sequence[int] | None = None
    merge_turns: bool = False
    name: str = "gsm_infinite"
    seed: int = 0
    _data: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict, repr=False)
    _digest: str = field(default="", repr=False)

    def check(self, config: Any, tokenizer: Any, overhead: int) -> None:
        if not self.path or not Path(self.path).is_file():
            raise FileNotFoundError(f"benchmark.path={self.path} does not exist; give a .jsonl of problems")
        raw = Path(self.path).read_bytes()
        self._digest = hashlib.sha256(raw).hexdigest()[:10]
        counts: dict[tuple[str, int], int] = {}
        lines = (gzip.decompress(raw) if self.path.endswith(".gz") else raw).decode().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                row, op = gsm_infinite.realistic_row(data, self.merge_turns), int(data["op"])
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"benchmark.path={self.path}, line {number} is no problem: {error!r}") from error
            subset = {2: "medium", 3: "hard"}.get(row.meta.get("d", 0), "realistic")
            task = f"{subset} {row.meta.get('length', '')}".strip()
            if self.ops is not None and op not in self.ops:
                continue
            counts[task, op] = counts.get((task, op), 0) + 1
            if self.samples is None or counts[task, op] <= self.samples:
                self._data.setdefault(task, {})[str(number)] = data
        if not self._data:
            raise ValueError(f"benchmark.path={self.path} has no problem with op in {self.ops}")

    def identity(self) -> dict[str, Any]:
        return {"file": self._digest, "merge_turns": self.merge_turns}

    def cells(self) -> list[Cell]:
        return [Cell(task, None, tuple(problems)) for task, problems in self._data.items()]

    def row(self, cell: Cell, sample: str, tokenizer: Any, overhead: int) -> Row:
        return gsm_infinite.realistic_row(self._data[cell.task][sample], self.merge_turns)
