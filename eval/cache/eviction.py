"""Eviction while decoding: what each held token has been attended so far, and which tokens of the middle stay."""

from __future__ import annotations

import copy
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.cache.pages import Segment


class Eviction:
    """A layer's policy; a subclass says which tokens `stay`.

    scores[row][head] [n] float32: attention that each token held (sink, middle, window, in order) has received from
    the KV head's query heads, s_t = decay s_{t-1} + sum over heads and queries of A_t (Lethe, Eq. 5; H2O: decay 1).
    """

    decay = 1.0

    def begin(self, scores: list[list[Tensor]]) -> Self:
        """A copy for one sealed layer, whose tokens have received `scores` from the prompt."""
        new = copy.copy(self)
        new.scores = scores
        return new

    scores: list[list[Tensor]]

    def see(self, row: int, head: int, weights: Tensor) -> None:
        """Take in one step's attention weights [n] of a head, summed over its query heads; new tokens are last."""
        old = self.scores[row][head]
        self.scores[row][head] = pad(self.decay * old, (0, len(weights) - len(old))) + weights.float()

    def stay(self, row: int, sink: int, middle: np.ndarray, window: int) -> list[Tensor] | None:
        """Of every head of a row, which of its middle [H] tokens stay, bool; None = all. sink, window: tokens held."""
        raise NotImplementedError

    def forget(self, row: int, head: int, first: int, stay: Tensor) -> None:
        """Drop the scores of tokens that have left; stay [n] bool says it of the n tokens held from `first` on."""
        scores = self.scores[row][head]
        before, these, after = scores.split([first, len(stay), len(scores) - first - len(stay)])
        self.scores[row][head] = torch.cat([before, these[stay], after])

    def prune(
        self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray
    ) -> tuple[Segment, Segment] | None:
        """Both parts of the middle without the tokens that leave; None = all stay. sink, window: tokens held, [B]."""
        held = prompt.length + tail.length
        stays = [self.stay(row, *of_row) for row, of_row in enumerate(zip(sink, held, window, strict=True))]
        if all(stay is None for stay in stays):
            return None
        device = prompt.k.device
        of_prompt, of_tail = [], []
        for row, stay in enumerate(stays):
            stay = stay or [torch.ones(n, dtype=torch.bool, device=device) for n in held[row].tolist()]
            for head, chosen in enumerate(stay):
                self.forget(row, head, int(sink[row]), chosen)
            halves = [s.split([n, len(s) - n]) for s, n in zip(stay, prompt.length[row].tolist(), strict=True)]
            of_prompt.append([first for first, _ in halves])
            of_tail.append([second for _, second in halves])
        return prompt.compacted(of_prompt), tail.compacted(of_tail)

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one."""
        self.scores = [list(self.scores[row]) for row in rows.tolist()]

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        self.scores = [[s.to(device) for s in heads] for heads in self.scores]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        return {f"scores{r}.{h}": s for r, heads in enumerate(self.scores) for h, s in enumerate(heads)}


class HeavyHitters(Eviction):
    """The `heavy` tokens of a head's middle with the largest sums stay (H2O, Algorithm 1: a constant budget).

    heavy: tokens, beside sink and window. It is enforced whenever tokens have joined the middle, `flush` at a time.
    """

    def __init__(self, heavy: int):
        self.heavy = heavy

    def stay(self, row: int, sink: int, middle: np.ndarray, window: int) -> list[Tensor] | None:
        if (middle <= self.heavy).all():
            return None
        scores = [s[sink : sink + n] for s, n in zip(self.scores[row], middle.tolist(), strict=True)]
        return [top(s, self.heavy) for s in scores]


def top(scores: Tensor, count: int) -> Tensor:
    """Bool [n]: the `count` largest of scores [n]; of equals the later tokens."""
    last_first = torch.argsort(scores.flip(0), descending=True, stable=True)[:count]
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    chosen[len(scores) - 1 - last_first] = True
    return chosen
