"""Lethe (arXiv 2511.06029, Eq. 1 to 5, Algorithm 1; no public code): layers drop tokens in rounds while decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Self

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.eviction import Choice, Eviction, largest
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.upload import upload
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Held, Tokens, method
from leank.eval.methods.common.scored import scores_bytes
from leank.typed import Count, OneOf, Positive, Share

READINGS = ("text", "printed")


@method("lethe")
@dataclass(frozen=True)
class Lethe(Tokens):
    """A layer that holds more than L_evict tokens of a row prunes behind a breakpoint of its sorted scores.

      s_t = gamma s_{t-1} + attention of step t, summed over all query heads of the layer        (Eq. 5, RASR)

    s_0 are the sums over the prompt's queries (Eq. 2). The K scores are sorted, v_0 >= v_1 >= ..., and the cut points
    c = K d / D, d = 1 ... D - 1, are tried in turn (Algorithm 1). At the first that is a breakpoint the c best tokens
    stay, and the sink, and the last recent_ratio K; L_evict becomes max(L_evict, c + recent). Without a breakpoint
    nothing leaves and L_evict doubles. All heads keep the same tokens.

    As printed, a breakpoint has v_0 / v_c <= tau (Eq. 4). That ratio only grows with c, so the first breakpoint can
    only be the first cut point: a layer keeps K / D tokens where attention is *flat*, none leave where it is peaked,
    and a larger tau prunes more often. The text says the opposite: a breakpoint is where attention drops sharply, and a
    larger tau keeps more (table 6, appendix). reading="text" has v_0 / v_c >= tau, reading="printed" has what is
    printed.

    Deviations
    - The paper does not give D, gamma, the sink (here the cache's) and the first L_evict.
    - Eq. 2 adds up the rows of a batch. Here every row has its own scores, so its answer does not depend on its
      neighbours.
    - RASR is said to rank by age as well, without a formula. Here the decay and the recent tokens stand for it.
    - No step of the algorithm uses Hoyer sparsity (Eq. 1). Here it can hold a layer back.
    - Neither reading bounds memory: L_evict may double for ever, and recent and best may be all there is. With `limit`,
      a round that would leave more keeps the sink, recent_ratio of the limit, and the best of the rest up to (D - 1) /
      D of it.
    """

    sparse_ratio: Annotated[float, Gt(1)] = 400.0  # tau
    recent_ratio: Share = 0.3  # share of a layer's tokens that stay because they are the last
    segments: Annotated[int, Ge(2)] = 8  # D
    gamma: Annotated[float, Gt(0), Lt(1)] = 0.99  # decay of the scores per step
    evict_at: Positive = 1024  # tokens that a layer holds before its first round, the first L_evict
    reading: Annotated[str, OneOf(*READINGS)] = "text"  # which reading of Algorithm 1 applies
    limit: Count = 0  # L_evict never grows past it; 0 is no limit
    min_sparsity: Annotated[float, Ge(0), Le(1)] = 0.0  # Hoyer sparsity below which a layer waits
    column_sums = True

    def check_sizes(self, sizes: Sizes) -> None:
        if self.evict_at <= sizes.sink + sizes.window:
            raise ValueError(
                f"evict_at={self.evict_at} must be more than sink + window = {sizes.sink + sizes.window}, which never "
                "leave; raise it or lower sink or window"
            )
        if self.limit and self.limit < self.evict_at:
            raise ValueError(f"limit={self.limit} must be 0 (none) or at least evict_at={self.evict_at}")

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        """All of the prompt stays: its first round is like any other, once it is in the cache."""
        return [None] * len(prefill.layers)

    def extra_bytes(self, held: Held) -> float:
        return scores_bytes(held)

    def eviction(self, index: int, config: PreTrainedConfig, sizes: Sizes) -> Rounds:
        return Rounds(self)


class Rounds(Eviction):
    """The rounds of one layer; `evict_at` [B]: tokens of each row that it holds before the next round."""

    evict_at: np.ndarray

    def __init__(self, settings: Lethe) -> None:
        self.settings, self.decay = settings, settings.gamma

    def begin(self, scores: Tensor, held: np.ndarray) -> Self:
        new = super().begin(scores, held)
        new.evict_at = np.full(len(scores), self.settings.evict_at)
        return new

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.evict_at = self.evict_at[rows.cpu().numpy()]

    def quiet(self, held: np.ndarray) -> int:
        return int((self.evict_at + 1 - held.max(1)).min())

    def chosen(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        return self._choose(self._chosen, prompt, tail, sink, window)

    def chosen_on_gpu(self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray) -> Choice | None:
        return self._choose(partial(self._launched, tail.length_dev), prompt, tail, sink, window)

    def _choose(
        self, rounds: Callable[..., tuple[Tensor, np.ndarray]], prompt: Segment, tail: Segment, sink: np.ndarray,
        window: np.ndarray,
    ) -> Choice | None:  # fmt: skip
        """What stays after the rounds that are due, None = all; rounds: what `_chosen` is."""
        middle = prompt.length + tail.length
        most = middle.max(1)
        held = sink + most + window
        due = np.flatnonzero((held > self.evict_at) & (most > 0))
        if not len(due):
            return None
        at = held[due], sink[due], window[due]
        stay, stays = rounds(due, middle, *at)
        left = middle.copy()
        left[due] = np.minimum(middle[due], stays[:, None])
        return None if (left == middle).all() else Choice(stay, left)

    def _chosen(
        self, due: np.ndarray, middle: np.ndarray, held: np.ndarray, sink: np.ndarray, window: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """What stays of all rows' middles [B, H, n], and how many tokens in the rows that are due."""
        device, columns, length = self.scores.device, int(held.max()), held - sink - window
        has_middle, rows = upload(middle[due] > 0, device), upload(due, device)
        scores = (self.scores[rows, :, :columns] * has_middle[..., None]).sum(1)
        chosen = self._round(due, scores, held, sink, window)
        token = torch.arange(int(middle.max()), device=device)
        place = (upload(sink, device)[:, None] + token).clamp(max=columns - 1)
        of_rows = chosen.gather(1, place)
        stay = torch.ones(*middle.shape, len(token), dtype=torch.bool, device=device)
        stay[rows] = of_rows[:, None]
        return stay, (of_rows & (token < upload(length, device)[:, None])).sum(1).cpu().numpy()

    def _launched(
        self, length: Tensor, due: np.ndarray, middle: np.ndarray, held: np.ndarray, sink: np.ndarray,
        window: np.ndarray,
    ) -> tuple[Tensor, np.ndarray]:  # fmt: skip
        """What `_chosen` returns, in one launch; length: int64 [B, H], `middle` on the device."""
        from leank.eval.methods.kernels.lethe import rounds

        settings = self.settings
        recent = (settings.recent_ratio * held).astype(np.int64)
        numbers = np.stack([due, held, sink, recent, *bounds(settings, sink, window)], 1)
        stay, found, stays = rounds(self.scores, length, numbers, int(middle.max()), settings)
        self._take(due, found, held)
        return stay, stays

    def _take(self, rows: np.ndarray, found: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Set L_evict of rows [R] by the breakpoints found, `held` where there is none; returns the recent tokens."""
        recent = (self.settings.recent_ratio * held).astype(np.int64)
        before = self.evict_at[rows]
        wanted = np.where(found == held, 2 * before, np.maximum(before, found + recent))
        self.evict_at[rows] = np.minimum(wanted, self.settings.limit or wanted)
        return recent

    def _round(
        self, rows: np.ndarray, scores: Tensor, held: np.ndarray, sink: np.ndarray, window: np.ndarray
    ) -> Tensor:
        """Algorithm 1 on scores [R, n] of a layer: the tokens that stay, bool [R, n]; of rows, `evict_at` changes."""
        place = torch.arange(scores.shape[1], device=scores.device)
        found = self._breakpoints(scores, held)
        recent = self._take(rows, found, held)
        count, end, first, last = upload(np.stack([found, held, sink, held - recent]), scores.device)[..., None]
        scores = scores.masked_fill(place >= end, -torch.inf)
        stay = largest(scores, count) | (place < first) | (place >= last)
        return self._bounded(stay, scores, held, sink, window) if self.settings.limit else stay

    def _breakpoints(self, scores: Tensor, held: np.ndarray) -> np.ndarray:
        """The first cut point of scores [R, n] that is a breakpoint (Eq. 4), in tokens [R]; `held` if there is none."""
        settings, d = self.settings, np.arange(1, self.settings.segments)
        cuts = held[:, None] * d // settings.segments
        there = torch.arange(scores.shape[1], device=scores.device) < upload(held, scores.device)[:, None]
        ordered = scores.masked_fill(~there, -torch.inf).sort(descending=True).values
        at_cuts = settings.sparse_ratio * ordered.gather(1, upload(cuts, scores.device))
        fits = (ordered[:, :1] >= at_cuts) if settings.reading == "text" else (ordered[:, :1] <= at_cuts)
        if settings.min_sparsity:
            fits &= (hoyer(scores * there, there.sum(1)) >= settings.min_sparsity)[:, None]
        fits_here = fits.cpu().numpy() & (cuts > 0)
        return np.where(fits_here.any(1), np.take_along_axis(cuts, fits_here.argmax(1)[:, None], 1)[:, 0], held)

    def _bounded(self, stay: Tensor, scores: Tensor, held: np.ndarray, sink: np.ndarray, window: np.ndarray) -> Tensor:
        """What stays [R, n], where that is more than the limit: sink, recent tokens, and the best of the others."""
        settings, place = self.settings, torch.arange(stay.shape[1], device=stay.device)
        recent, room = bounds(settings, sink, window)
        count, end, first, last = upload(np.stack([room, held, sink, held - recent]), stay.device)[..., None]
        others = (place >= first) & (place < last)
        best = largest(scores.masked_fill(~others, -torch.inf), count) & others
        over = (stay & (place < end)).sum(1, keepdim=True) > settings.limit
        return torch.where(over & others, best, stay)


def bounds(settings: Lethe, sink: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the limit bounds what stays [R]: the recent tokens, and how many stay between them and the sink."""
    recent = np.maximum(int(settings.recent_ratio * settings.limit), window)
    return recent, np.maximum(0, settings.limit * (settings.segments - 1) // settings.segments - sink - recent)


def hoyer(a: Tensor, count: Tensor | None = None) -> Tensor:
    """Hoyer sparsity of the first `count` of a [..., n] >= 0 (Eq. 1): 0 where all are equal, 1 where one counts."""
    root = (torch.full(a.shape[:-1], a.shape[-1], device=a.device) if count is None else count).sqrt()
    share = (root - a.sum(-1) / a.norm(dim=-1)) / (root - 1)
    return torch.where(root > 1, share, 1.0)
