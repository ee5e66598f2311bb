"""What the replay makes of a batch: what is to be decoded or read, what came of it, and each sample's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leank.eval.benchmarks.row import Row
from leank.eval.rows.result_row import Fidelity


@dataclass
class Answer:
    """One method's answer to one sample.

    tokens, text: the reply.
    seconds: prefill, seal, question and decode of the whole batch.
    steps: decoding steps of the batch.
    batch: samples in the batch.
    bytes: bytes held after the prompt, per part; this sample's share of the batch.
    middle_tokens: tokens between sink and window at the end of the reply; None for dense.
    compressed: whether less than the dense cache is held or read; None for dense.
    dense_only: whether the dense pass's logits alone decide the reply.
    non_finite: step (0: the first token) at which logits were NaN or infinite and the reply ended; None if never.
    fidelity: how near the next-token distributions are to dense's; None where that was not measured.
    score: share of a text's tokens that the method ranks first; None for a reply, which a scorer reads.
    selected_layer: layer that the prefill selected, -1 if it found none; None for a prefill that looks for none.
    """

    tokens: list[int]
    text: str
    seconds: dict[str, float]
    steps: int
    batch: int
    bytes: dict[str, float] = field(default_factory=dict)
    middle_tokens: int | None = None
    compressed: bool | None = None
    dense_only: bool = False
    non_finite: int | None = None
    fidelity: Fidelity | None = None
    score: float | None = None
    selected_layer: int | None = None


@dataclass(frozen=True)
class Replies:
    """What the replies of a batch may be, or the texts that are read in their place.

    rows: of the batch.
    questions: per row, tokens that are still to be read before the reply.
    most, least: per row, bounds of the reply's tokens.
    texts: per row, the tokens of a text; None where replies are decoded.
    """

    rows: Sequence[Row]
    questions: list[list[int]]
    most: list[int]
    least: list[int]
    texts: list[list[int]] | None = None

    @property
    def room(self) -> int:
        """Columns that a cache needs behind the prompts."""
        return max(self.most) + max(map(len, self.questions)) + max(map(len, self.texts or [[]]))


@dataclass(frozen=True)
class Decoded:
    """What followed the prompts of a batch.

    tokens: per row, the reply, or the text that was read.
    steps: decoding steps.
    broken: per row, `Answer.non_finite`.
    fed: per row, tokens behind the prompt that were read.
    question_seconds: spent on reading the questions through the cache.
    seconds: spent on decoding, or on reading the texts.
    """

    tokens: list[list[int]]
    steps: int
    broken: list[int | None]
    fed: list[int]
    question_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_texts(cls, texts: list[list[int]], broken: list[int | None], seconds: float) -> Decoded:
        """Return what reading the texts of a batch comes to; broken: per row, the token at which its logits failed."""
        return cls(texts, 0, broken, [max(0, len(text) - 1) for text in texts], seconds=seconds)
