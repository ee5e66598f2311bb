"""Needle in a haystack: one sentence hidden at a depth of a long text.

Behaviour of gkamradt/LLMTest_NeedleInAHaystack 7b90d28 (MIT). Officially GPT judges the reply from 1 to 10. Here
`recall` does, as in the line of work that ThinK belongs to. The official essays may not be redistributed, so bring your
own haystack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le, MinLen

from leank.data_gen.haystack import SPLITS, known_by, sentences
from leank.data_gen.task import LONGEST
from leank.eval.benchmarks.base import Benchmark, Cell, Row, benchmark, check_lengths, metric
from leank.typed import OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
QUESTION = "What is the best thing to do in San Francisco?"
EXPECTED = "eat a sandwich and sit in Dolores Park on a sunny day."
_SYSTEM = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct"
_ONLY_DOCUMENT = " Don't give information outside the document or repeat your findings"

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def insert_needle(
    context: str,
    needle: str,
    depth_percent: float,
    context_length: int,
    encode: Encode,
    decode: Decode,
    buffer: int = 200,
) -> str:
    """Put `needle` into `context` at `depth_percent` of its tokens, moved back to just after a ".".

    context_length, buffer: tokens; context and needle together keep to context_length - buffer, by cutting the end of
    the context. depth_percent: 0 (start) to 100 (very end, wherever that falls). Only the token of a lone "." ends a
    sentence, so a "." that the tokenizer joins to its neighbours does not; without one the needle comes first.
    encode, decode: without special tokens. Raises ValueError for a depth outside 0-100 or a needle that does not fit.
    """
    if not 0 <= depth_percent <= 100:
        raise ValueError(f"depth_percent={depth_percent} is outside 0-100")
    tokens, needle_tokens, periods = encode(context), encode(needle), set(encode("."))
    room = context_length - buffer - len(needle_tokens)
    if room < 0:
        raise ValueError(
            f"context_length={context_length} leaves no room for the needle ({len(needle_tokens)} tokens) "
            f"and the buffer ({buffer}); raise context_length or lower buffer"
        )
    tokens = tokens[:room]
    if depth_percent == 100:
        return decode(tokens + needle_tokens)
    at = int(len(tokens) * (depth_percent / 100))
    while at and tokens[at - 1] not in periods:
        at -= 1
    return decode(tokens[:at] + needle_tokens + tokens[at:])


def fitted(haystack: str, length: int, encode: Encode, decode: Decode) -> str:
    """Repeat `haystack` until it has `length` tokens, and cut it there. Raises ValueError for an empty one."""
    if not haystack:
        raise ValueError("the haystack is empty; give a text file")
    size = 8 * length + 8  # characters; a long haystack need not be encoded to its end
    while len(tokens := encode((haystack * (size // len(haystack) + 1))[:size])) <= length:
        size *= 2
    return decode(tokens[:length])


def grid(shortest: int, longest: int, count: int = 35) -> list[int]:
    """`count` evenly spaced whole numbers, ends included: the official lengths and (0, 100) depths."""
    return [int(value) for value in np.round(np.linspace(shortest, longest, count))]


def recall(reply: str, expected: str = EXPECTED) -> float:
    """Share of the distinct lower-case words of `expected` that occur in the reply, 0-1."""
    words = set(expected.lower().split())
    return len(words & set(reply.lower().split())) / len(words)


@benchmark("niah")
@dataclass
class NeedleGrid(Benchmark):
    """The grid, cell by cell (eval.benchmarks.base): each cell is a length, and its samples are the depths."""

    # tokens; None takes `count` lengths from shortest to longest, as officially
    lengths: Annotated[Sequence[Positive], MinLen(1)] | None = None
    # per cent, whole numbers; None takes `count` depths from 0 to 100
    depths: Annotated[Sequence[Annotated[int, Ge(0), Le(100)]], MinLen(1)] | None = None
    shortest: Positive = 1000
    longest: Positive = 16_000
    count: Samples = 35
    # essays, split: the haystack, see data_gen.haystack; None is the text shipped with the package
    essays: str | None = None
    split: Annotated[str, OneOf(*SPLITS)] = "all"
    name: str = "niah"
    seed: Seed = 0
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        check_lengths(self._lengths, limit or LONGEST)

    def tried(self) -> Iterable[tuple[Cell, str]]:
        """The deepest needle at the shortest and at the longest length."""
        cells = sorted(self.cells(), key=lambda cell: cell.length or 0)
        return [(cell, cell.samples[-1]) for cell in (cells[0], cells[-1])]

    @property
    def _lengths(self) -> list[int]:
        return list(self.lengths) if self.lengths is not None else grid(self.shortest, self.longest, self.count)

    @property
    def _depths(self) -> list[int]:
        return list(self.depths) if self.depths is not None else grid(0, 100, self.count)

    def identity(self) -> dict[str, object]:
        return {"essays": known_by(self.essays), "split": self.split}

    def cells(self) -> list[Cell]:
        return [Cell("niah", length, tuple(map(str, self._depths))) for length in self._lengths]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one sample; see `Benchmark.row`. Officially its context and its question are two user turns."""

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids))

        assert cell.length is not None
        length, depth = cell.length, int(sample)
        if length not in self._texts:
            haystack = " ".join(sentences(self.essays, self.split))
            self._texts[length] = fitted(haystack, length, encode, decode)
        context = insert_needle(self._texts[length], NEEDLE, depth, length, encode, decode)
        return Row(
            task="niah",
            id=sample,
            context=context,
            question=f"\n{QUESTION}{_ONLY_DOCUMENT}",
            answers=[EXPECTED],
            max_new_tokens=300,
            metric="niah_recall",
            preamble=({"role": "system", "content": _SYSTEM},),
            length=length,
            meta={"depth_percent": depth},
        )


@metric("niah_recall")
def score(row: Row, reply: str) -> float:
    """`recall` of the row's needle, 0-1."""
    return recall(reply, row.answers[0])
