"""GSM-Infinite, cell by cell (eval.benchmarks.base): problems from our generator, or checked ones from a file."""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MinLen

from leank.data_gen.gsm.infinite import Problem, nth
from leank.data_gen.gsm.symbolic import SymbolicProblem, symbolic
from leank.data_gen.tokens import counter_of
from leank.eval.benchmarks.base import Cell, benchmark, check_fits
from leank.eval.benchmarks.gsm_infinite_prompts import MAX_NEW_TOKENS, MODES, TEMPLATES, realistic_row, symbolic_row
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.rules import COUNT, NAME, TEXT, Rule, Schema, checked, is_integer, is_texts, one_of, optional
from leank.eval.benchmarks.scoring import metric
from leank.eval.benchmarks.source import read_file
from leank.eval.metrics.gsm_infinite import gold_answer, grade, grade_symbolic
from leank.typed import Checked, Count, OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SUBSETS = {"medium": 2, "hard": 3, "symbolic": 0}  # and their d


LENGTH = Rule(
    "a text without control characters, or a whole number",
    lambda length: NAME.holds(length) and str(length).isprintable(),
)  # it is part of a task's name, which terminals show


@benchmark("gsm_infinite")
@dataclass
class GsmInfinite(Checked):
    """GSM-Infinite; a cell is a subset at a nominal length.

    path: .jsonl or .jsonl.gz of problems, see gsm_infinite_prompts.realistic_row; None generates them.
    subsets: "medium", "hard" or "symbolic", of the generator; a file has its own.
    lengths: nominal tokens, of the generator; 0 is without filler.
    ops: problems of other ops are left out; None takes all of a file.
    samples: the first so many of each subset, length and op; None takes all of a file.
    merge_turns: whether a problem is one user turn, for templates that refuse two in a row.
    max_new_tokens: of a reply.
    seed: of the generator.
    """

    path: str | None = None
    subsets: Annotated[Sequence[Annotated[str, OneOf(*SUBSETS)]], MinLen(1)] = ("medium", "hard")
    lengths: Annotated[Sequence[Count], MinLen(1)] = (8000, 16_000, 32_000)
    ops: Annotated[Sequence[Annotated[int, Ge(2)]], MinLen(1)] | None = (2, 4, 6, 8, 10, 12)
    samples: Samples | None = 256
    merge_turns: bool = False
    max_new_tokens: Positive = MAX_NEW_TOKENS
    name: str = "gsm_infinite"
    seed: Seed = 42
    _made: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _digest: str = field(default="", repr=False)

    def check(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, overhead: int, max_new_tokens: int | None
    ) -> None:
        """Check settings and data before any weights are loaded; see `Benchmark.check`."""
        if self.path is None:
            self._plan()
        else:
            self._read(Path(self.path))
        for cell in self.cells():
            samples = cell.samples[-1:] if self.path is None else cell.samples
            rows = [self.row(cell, sample, tokenizer, overhead) for sample in samples]
            limit = getattr(config, "max_position_embeddings", None)
            check_fits(max(rows, key=lambda row: len(row.prompt)), tokenizer, overhead, limit, max_new_tokens)

    def data(self, task: str) -> None:
        """A file counts in `identity`, the generator has none."""

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        from_where = {"file": self._digest} if self.path is not None else {}
        return {**from_where, "merge_turns": self.merge_turns, "max_new_tokens": self.max_new_tokens}

    def cells(self) -> list[Cell]:
        """Return all cells in the order of the run."""
        return [Cell(task, None, tuple(problems)) for task, problems in self._made.items()]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one sample; see `Benchmark.row`."""
        data = self._made[cell.task][sample]
        if self.path is None:
            data = self._generate(data, tokenizer)
        return replace(self._build(data), id=sample, max_new_tokens=self.max_new_tokens)

    def _build(self, data: Mapping[str, Any]) -> Row:
        if "answer_list" in data:
            return symbolic_row(data)
        return realistic_row(data, self.merge_turns)

    def _generate(self, planned: tuple[str, int, int, int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        subset, length, op, index = planned
        if subset == "symbolic":
            made: Problem | SymbolicProblem = symbolic(op, self.seed, index, length)
        else:
            try:
                made = nth(SUBSETS[subset], length, op, index, self.seed, counter_of(tokenizer))
            except ValueError as error:
                raise ValueError(f"benchmark.ops={op}, benchmark.lengths={length}: {error}") from None
        return {**asdict(made), "length": _nominal(length)}

    def _plan(self) -> None:
        """Which problems there are to be; each is made when it is asked for."""
        if self.ops is None or self.samples is None:
            raise ValueError(
                f"benchmark.ops={self.ops}, benchmark.samples={self.samples}: null means all of a file; without "
                "benchmark.path, give both"
            )
        called: dict[str, int] = {}
        for length in self.lengths:
            if (other := called.setdefault(_nominal(length), length)) != length:
                raise ValueError(
                    f"benchmark.lengths={list(self.lengths)!r}: tables and rows call {other} and {length} both "
                    f"{_nominal(length)}; leave one out, and run it in a folder of its own (hydra.run.dir)"
                )
        for subset in self.subsets:
            for length in self.lengths:
                self._made[f"{subset} {_nominal(length)}"] = {
                    f"{op}-{index}": (subset, length, op, index) for op in self.ops for index in range(self.samples)
                }

    def _read(self, path: Path) -> None:
        """The problems of a file."""
        if not path.is_file():
            raise FileNotFoundError(f"benchmark.path={self.path} does not exist; give a .jsonl of problems, or null")
        counts: dict[tuple[str, int], int] = {}
        for line in checked(read_file(path), _schema):
            row, op = self._build(line.data), line.data["op"]
            subset = {2: "medium", 3: "hard"}.get(row.meta.get("d", 0), "realistic")
            subset = "symbolic" if row.metric == "gsm_symbolic" else subset
            task = f"{subset} {row.meta.get('length', '')}".strip()
            if self.ops is not None and op not in self.ops:
                continue
            counts[task, op] = counts.get((task, op), 0) + 1
            if self.samples is None or counts[task, op] <= self.samples:
                self._made.setdefault(task, {})[str(line.number)] = line.data
        self._digest = hashlib.sha256(path.read_bytes()).hexdigest()[:10]
        if not self._made:
            raise ValueError(f"benchmark.path={self.path} has no problem with op in {self.ops}")


def _nominal(length: int) -> str:
    """A length as tables call it: "zero", "8k" (8000 and 8192, as anyone says), else its tokens: "8500"."""
    if length == 0:
        return "zero"
    return f"{length // 1000}k" if length % 1000 == 0 or length % 1024 == 0 else str(length)


def _schema(data: Mapping[str, object]) -> Schema:
    """Return the schema of a problem; "answer_list" makes it a symbolic one."""
    fields = {"problem": TEXT, "question": TEXT, "op": COUNT, "length": optional(LENGTH), "id": optional(NAME)}
    same = ("id", "problem", "question")
    if "answer_list" in data:
        return Schema({**fields, "answer_list": Rule("a list of names such as V12", _variables)}, same=same)
    fields |= {
        "template": Rule(one_of(TEMPLATES), TEMPLATES.__contains__),
        "mode": Rule(one_of(MODES), MODES.__contains__),
        "answer": optional(Rule("a whole number", is_integer)),
        "solution": optional(TEXT),
        "d": optional(COUNT),
    }
    return Schema(fields, _one_answer, same)


def _one_answer(data: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a realistic problem: it has an answer, a solution that states it, or both alike."""
    answer, solution = data.get("answer"), data.get("solution")
    if solution is None:
        return None if answer is not None else '"answer" and "solution" are missing; one of them must state the answer'
    try:
        stated = gold_answer(solution)
    except ValueError as error:
        return None if answer is not None else f'"solution" states no answer ({" ".join(str(error).split())[:120]})'
    if answer is not None and int(answer) != stated:
        return f'"answer" is {reprlib.repr(answer)}, and "solution" states {stated}'
    return None


def _variables(value: object) -> bool:
    return is_texts(value) and all(re.fullmatch(r"V[0-9]+", name) for name in value)


@metric("gsm_infinite", by_op=True)
def score(row: Row, reply: str) -> float:
    """Whether the reply to a realistic problem states its answer, 0 or 1."""
    return float(grade(reply, row.answers[0]))


@metric("gsm_symbolic")
def score_symbolic(row: Row, reply: str) -> float:
    """Whether the reply names exactly the right variables, 0 or 1."""
    return float(grade_symbolic(reply, row.answers))
