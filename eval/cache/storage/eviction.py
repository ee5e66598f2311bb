"""Eviction while decoding: the attention that each token has received, and which tokens of the middle stay."""

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.padded import compacted
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.upload import upload

SCORE = 4  # bytes of one token's score in one KV head
ENDLESS = 1 << 40  # tokens: more than ever come


class Choice(NamedTuple):
    """Which tokens of a middle stay."""

    stay: Tensor  # bool [B, H, most of middle]; what it says past the end of a head's own middle is not read
    left: np.ndarray  # [B, H] on the host, how many of each head's stay


class Eviction(ABC):
    """The eviction policy of a layer; a subclass says which tokens are `chosen` to stay.

    A score is the attention that a token has received from the query heads of its KV head:
    s_t = decay s_{t-1} + sum over heads and queries of A_t (Lethe, Eq. 5; H2O has decay 1).
    """

    decay = 1.0
    scores: Tensor  # [B, H, n] float32, of the tokens held: sink, middle and window in order, then zeros
    held: np.ndarray  # [B, H] on the host, how many tokens a head holds
    seen: np.ndarray  # [B] on the host, how many tokens have come; set whenever tokens may leave
    center: Tensor | None = None  # what the stored keys lack, as in `Store`

    @property
    def every_step(self) -> bool:
        """Whether single steps matter, by decay or by the tokens held; else only tokens that join the middle do."""
        return True

    @property
    def most(self) -> int:
        """Tokens of a head's middle that stay, at most."""
        return ENDLESS

    def begin(self, scores: Tensor, held: np.ndarray) -> Self:
        """A copy for one compressed layer of `held` [B, H] tokens with scores [B, H, n], then zeros."""
        new = copy.copy(self)
        new.scores, new.held = scores.float(), held
        return new

    def add(self, weights: Tensor, held: np.ndarray, real: Tensor | None = None) -> None:
        """Add the attention weights of one step to the scores of all heads, which now hold `held` [B, H] tokens.

        weights: [B H, >= n], summed over the query heads, in the order of `scores`, new tokens last, then zeros
        real: [B] bool, the rows that have a token in this step, for the scores of others do not decay; None = all
        """
        self.held, most = held, int(held.max())
        weights = weights[:, :most].float().view(*held.shape, most)
        decay = self.decay if real is None else torch.where(real, self.decay, 1.0)[:, None, None]
        self.scores = weights + pad(decay * self.scores, (0, most - self.scores.shape[-1]))

    @abstractmethod
    def chosen(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        """Which tokens of the middle, prompt and tail, stay, None = all; sink, window: [B], tokens held."""

    @abstractmethod
    def chosen_on_gpu(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        """What `chosen` returns, by Triton; all of the middle is in the tail."""

    def forget_moved(self, gone: np.ndarray, first: np.ndarray) -> None:
        """Drop, in place, the scores of `gone` [B, H] tokens from `first` [B, H] on, which no middle took."""
        if gone.any():
            amount, begin = (upload(n, self.scores.device)[..., None] for n in (gone, first))
            token = torch.arange(self.scores.shape[-1], device=self.scores.device)
            source = token + amount * (token >= begin)
            there = source < self.scores.shape[-1]
            self.scores.copy_(self.scores.gather(-1, source * there) * there)
            self.held = self.held - gone

    def quiet(self, held: np.ndarray) -> int:
        """Lower bound on the tokens to come into the window before any of `held` [B, H] leave the middle."""
        return 0

    def reserve(self, columns: int) -> None:
        """Give `scores` exactly `columns` >= held columns, the last of them zeros."""
        if self.scores.shape[-1] != columns:
            self.scores = pad(self.scores, (0, columns - self.scores.shape[-1])).contiguous()

    def prune(
        self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray, flush: int
    ) -> tuple[Segment, Segment] | None:
        """Both parts of the middle without the tokens that leave, None if all stay; sink, window: [B], tokens held.

        flush: as in `compacted`, of the tail
        """
        choice = self.chosen(prompt, tail, sink, window)
        if choice is None:
            return None
        middle, stay = prompt.length + tail.length, choice.stay
        of_prompt, of_both = (upload(n, stay.device)[..., None] for n in (prompt.length, middle))
        token = torch.arange(stay.shape[-1], device=stay.device)
        self._keep(stay | (token >= of_both), int(sink.max()))
        stay = stay & (token < of_both)
        after = (of_prompt + token).clamp(max=len(token) - 1)  # place in the middle of each token of the tail
        of_tail = stay.gather(-1, after) & (of_prompt + token < of_both)
        return compacted(prompt, stay & (token < of_prompt)), compacted(tail, of_tail, flush)

    def _keep(self, stay: Tensor, sink: int) -> None:
        """Drop scores of tokens behind the sink that do not stay, bool [B, H, n], True past the last."""
        keep = torch.ones_like(self.scores, dtype=torch.bool)
        keep[..., sink : sink + stay.shape[-1]] = stay
        self.held = self.held - (~keep).sum(-1).cpu().numpy()
        self.scores = moved_up(self.scores, keep, self.held)

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one."""
        self.scores, self.held = self.scores[rows.to(self.scores.device)], self.held[rows.cpu().numpy()]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        return {"scores": self.scores}


class HeavyHitters(Eviction):
    """The `heavy` tokens of a head's middle with the largest scores stay (H2O, Algorithm 1: a constant budget)."""

    def __init__(self, heavy: int) -> None:
        self.heavy = heavy

    @property
    def most(self) -> int:
        return self.heavy

    @property
    def every_step(self) -> bool:
        """Whether the scores decay; sums of attention are the same however many tokens come at once."""
        return self.decay != 1

    def chosen_on_gpu(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        from leank.eval.cache.storage.kernels.choosing import heaviest

        middle = prompt.length + tail.length
        if (middle <= self.heavy).all():
            return None
        ranked = self.launched(prompt, tail, int(sink.max()), int(middle.max()))
        return Choice(heaviest(ranked, tail.length_dev, self.heavy), np.minimum(middle, self.heavy))

    def chosen(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        middle = prompt.length + tail.length
        if (middle <= self.heavy).all():
            return None
        first, most = int(sink.max()), int(middle.max())
        ranked = self.ranking(prompt, tail, first)[..., first : first + most]
        own = torch.arange(most, device=ranked.device) < upload(middle, ranked.device)[..., None]
        stay = largest(ranked.masked_fill(~own, -torch.inf), self.heavy)
        return Choice(stay, np.minimum(middle, self.heavy))

    def quiet(self, held: np.ndarray) -> int:
        """A budget is exceeded only when tokens leave the window."""
        return ENDLESS

    def ranking(self, prompt: Segment, tail: Segment, sink: int) -> Tensor:
        """What the tokens are ranked by, [B, H, n] like `scores`; sink: tokens before the middle."""
        return self.scores

    def launched(self, prompt: Segment, tail: Segment, sink: int, most: int) -> Tensor:
        """What `most` tokens of a middle are ranked by on a GPU, [B, H, most]; see `ranking`."""
        return self.ranking(prompt, tail, sink)[..., sink : sink + most]


def moved_up(scores: Tensor, keep: Tensor, count: np.ndarray) -> Tensor:
    """The scores [B, H, n] of the tokens to keep, bool [B, H, n], in order, then zeros; count: [B, H], tokens kept."""
    first = torch.argsort((~keep).to(torch.uint8), dim=-1, stable=True)[..., : int(count.max())]
    own = torch.arange(first.shape[-1], device=keep.device) < upload(count, keep.device)[..., None]
    return scores.gather(-1, first) * own


def largest(scores: Tensor, count: int | Tensor) -> Tensor:
    """Bool [..., n]: the `count` (or [..., 1]) largest of scores [..., n], the later of equal ones first."""
    last_first = torch.argsort(scores.flip(-1), dim=-1, descending=True, stable=True)
    chosen = (torch.arange(scores.shape[-1], device=scores.device) < count).expand(scores.shape)
    return torch.zeros_like(chosen).scatter_(-1, scores.shape[-1] - 1 - last_first, chosen)
