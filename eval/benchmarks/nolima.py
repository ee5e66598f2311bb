"""NoLiMa: a needle in a book that shares hardly a word with its question, so that no literal match finds it.

Source: the behaviour of adobe-research/NoLiMa 7532e4e, whose code, needles and prompt may be used for research alone:
none of them is here. Data: amodaresi/NoLiMa on the hub, needlesets/needle_set.json and haystack/rand_shuffle/*.txt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import numpy as np
from annotated_types import Ge, MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank, digest, read_text
from leank.eval.benchmarks.base import Benchmark, Cell, Row, benchmark, check_lengths, metric
from leank.eval.benchmarks.from_files import Hub, checked, read
from leank.typed import OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = Hub("amodaresi/NoLiMa", "needlesets/needle_set.json")
RULES = ("contains", "EM", "lastline_contains", "lastline_EM")
CHARACTER = "{CHAR}"


class Test(TypedDict):
    """What stands for {1}, {2} and so on, and the answers where they are no character."""

    input_args: list[str]
    gold_answers: NotRequired[Annotated[list[NotBlank], MinLen(1)] | None]


class Needle(TypedDict):
    """An element of the needle set."""

    id: Annotated[str, MinLen(4)]
    needle: NotBlank
    questions: Annotated[Mapping[str, NotBlank], MinLen(1)]
    tests: Annotated[Mapping[str, Test], MinLen(1)]
    system_prompt: NotRequired[str]
    task_template: NotRequired[NotBlank]
    character_set: NotRequired[Annotated[list[NotBlank], MinLen(1)]]


@benchmark("nolima")
@dataclass
class NoLiMa(Benchmark):
    """NoLiMa; a task is a kind of question (onehop, twohop)."""

    books: str | None = None  # the folder of the .txt files
    path: str | None = None  # needle_set.json
    template: str | None = None  # the prompt, with {haystack} and {question}, where the needle set has none
    # tokens of the haystack
    lengths: Annotated[Sequence[Positive], MinLen(1)] = (1000, 4000, 8000, 16_000, 32_000)
    depths: Annotated[int, Ge(2)] = 26  # evenly from its start to its end
    samples: Samples | None = None  # so many of each task and length, drawn by the seed; None takes all
    rule: Annotated[str, OneOf(*RULES)] = "contains"  # how a reply is compared with the answers
    max_new_tokens: Positive = 192
    name: str = "nolima"
    seed: Seed = 42
    _tests: dict[str, tuple[Needle, str, Test]] = field(default_factory=dict, repr=False)  # name -> needle, question
    _texts: list[str] = field(default_factory=list, repr=False)
    _encoded: dict[int, tuple[list[int], np.ndarray]] = field(default_factory=dict, repr=False)
    _digest: str = field(default="", repr=False)

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        if limit is not None:
            check_lengths(self.lengths, limit)
        files = sorted(Path(self.books).glob("*.txt")) if self.books else []
        if not files:
            cure = f"give the folder haystack/rand_shuffle of https://huggingface.co/datasets/{HUB.repo}"
            raise FileNotFoundError(f"benchmark.books={self.books} holds no .txt; {cure}")
        self._texts = [read_text(file) for file in files]
        known = "".join(self._texts)
        for line in checked(read("NoLiMa", "needle_set", self.path, HUB), TypeAdapter(Needle), ("id",)):
            needle, known = line.data, known + repr(line.data)
            template = needle.get("task_template", self.template) or ""
            if not needle["id"][:4].isdecimal():
                raise line.error(f"id={needle['id']!r} does not begin with four digits, which seed its characters")
            if "distractors" in needle:
                raise line.error("it has distractors, which are not placed here")
            if "{haystack}" not in template or "{question}" not in template.partition("{haystack}")[2]:
                raise line.error(
                    f"its prompt {template!r} lacks {{haystack}} or {{question}} behind it; set benchmark.template to "
                    "the default of NoLiMa's evaluation/run_tests.py"
                )
            drawn = CHARACTER in needle["needle"]
            for kind, question in needle["questions"].items():
                for name, test in needle["tests"].items():
                    if not (needle.get("character_set") if drawn else test.get("gold_answers")):
                        raise line.error(f"test {name} has neither characters to draw nor gold_answers")
                    self._tests[f"{needle['id']}_{name}_{kind}"] = (needle, question, test)
        self._digest = digest(known)

    def identity(self) -> dict[str, object]:
        settings: dict[str, object] = {"template": self.template, "depths": self.depths, "samples": self.samples}
        return settings | {"rule": self.rule, "max_new_tokens": self.max_new_tokens, "data": self._digest}

    def cells(self) -> list[Cell]:
        """Return all cells in the order of the run; a sample is TEST.BOOK.DEPTH."""
        cells = []
        for kind in dict.fromkeys(name.rpartition("_")[2] for name in self._tests):
            names = [name for name in self._tests if name.rpartition("_")[2] == kind]
            every = [f"{n}.{b}.{d}" for n in names for b in range(len(self._texts)) for d in range(self.depths)]
            if self.samples is not None and self.samples < len(every):
                every = random.Random(f"{self.seed} {kind}").sample(every, self.samples)
            cells += [Cell(kind, length, tuple(every)) for length in self.lengths]
        return cells

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        name, book, depth = sample.rsplit(".", 2)
        needle, question, test = self._tests[name]
        text, answers = needle["needle"], list(test.get("gold_answers") or ())
        for number, value in enumerate(test["input_args"], 1):
            text, question = (part.replace(f"{{{number}}}", value) for part in (text, question))
        if CHARACTER in text:  # the official draws, one per depth
            draws = np.random.RandomState(self.seed + int(needle["id"][:4]) + int(book))
            answers = [[str(draws.choice(needle["character_set"])) for _ in range(self.depths)][int(depth)]]
            text, question = (part.replace(CHARACTER, answers[0]) for part in (text, question))
        percent = float(np.linspace(0, 100, self.depths)[int(depth)])
        assert cell.length is not None
        haystack = self.placed(int(book), text, cell.length, percent / 100, tokenizer)
        before, _, after = str(needle.get("task_template", self.template)).partition("{haystack}")
        system = needle.get("system_prompt", "")
        return Row(
            task=cell.task,
            id=sample,
            context=before + haystack,
            question=after.replace("{question}", question),
            answers=answers,
            max_new_tokens=self.max_new_tokens,
            metric=f"nolima_{self.rule}",
            preamble=({"role": "system", "content": system},) if system else (),
            length=cell.length,
            meta={"depth_percent": round(percent)},
        )

    def placed(self, book: int, needle: str, length: int, depth: float, tokenizer: Any) -> str:
        """Return `length` tokens of a book with the needle as a line of its own, `depth` of them before it.

        The line begins at the book's first newline from token depth * (length + 1) on, and the haystack moves along.
        Raises ValueError for a book that is too short.
        """
        if book not in self._encoded:
            whole = tokenizer(self._texts[book], add_special_tokens=False, verbose=False)["input_ids"]
            lines = [at for at, token in enumerate(tokenizer.batch_decode([[i] for i in whole])) if "\n" in token]
            self._encoded[book] = whole, np.array([0, *lines])
        ids, ends = self._encoded[book]
        later = ends[ends / (length + 1) >= depth]
        start = int(later[0] - np.round(length * depth)) if len(later) else 0
        if not len(later) or start < 0 or start + length > len(ids):
            raise ValueError(f"benchmark.books: book {book + 1} has {len(ids)} tokens, too few around {length}")
        at = int(later[0]) + 1
        before, after = (str(tokenizer.decode(part)) for part in (ids[start:at], ids[at : start + length]))
        return f"{before[: max(before.rfind(chr(10)), 0)]} {needle}\n{after}"


@metric("nolima_contains")
@metric("nolima_EM")
@metric("nolima_lastline_contains")
@metric("nolima_lastline_EM")
def score(row: Row, reply: str) -> float:
    """Whether the reply, or the last line of the stripped reply, contains an answer or is one, 0 or 1."""
    rule = row.metric.removeprefix("nolima_")
    if rule.startswith("lastline"):
        reply = reply.strip().split("\n")[-1]
    if rule.endswith("contains"):
        return float(any(answer in reply for answer in row.answers))
    return float((reply if rule.startswith("lastline") else reply.strip()) in row.answers)
