"""Lethe: layers drop tokens in rounds while decoding.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving". There is no public
code; this follows its Eq. 1 to 5 and Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from transformers import PreTrainedConfig

from eval.cache.storage.eviction import SCORE, Eviction, largest
from eval.cache.storage.store import Sizes
from eval.cache.storage.upload import upload
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.axes import Tokens
from eval.methods.held import Held
from leank_train.common.typed import Count, OneOf, Positive, Share

READINGS = ("text", "printed")


@dataclass(frozen=True)
class Lethe(Tokens):
    """A layer that holds more than L_evict tokens of a row prunes behind a breakpoint of its sorted scores.

      s_t = gamma s_{t-1} + attention of step t, summed over all query heads of the layer        (Eq. 5, RASR)

    s_0 are the sums over the prompt's queries (Eq. 2). The K scores are sorted, v_0 >= v_1 >= ..., and the cut points
    c = K d / D, d = 1 ... D - 1, are tried in turn (Algorithm 1). At the first that is a breakpoint the c best tokens
    stay, and the sink, and the last recent_ratio K; L_evict becomes max(L_evict, c + recent). Without a breakpoint
    nothing leaves and L_evict doubles. All heads keep the same tokens.

    As printed, a breakpoint has v_0 / v_c <= tau (Eq. 4). That ratio only grows with c, so no cut point but the first
    can ever be one: a layer keeps K / D tokens where attention is *flat*, none leave where it is peaked, and a larger
      tau
    prunes more often. The text says the opposite: a breakpoint is where attention drops sharply, and a larger tau keeps
    more (table 6, appendix). reading="text" has v_0 / v_c >= tau, reading="printed" has what is printed.

    Deviations
    - The paper does not give D, gamma, the sink (here the cache's) and the first L_evict.
    - Eq. 2 adds up the rows of a batch. Here every row has its own scores, so its answer does not depend on its
      neighbours.
    - RASR is said to rank by age as well, without a formula. Here the decay and the recent tokens stand for it.
    - No step of the algorithm uses Hoyer sparsity (Eq. 1). Here it can hold a layer back.
    - Neither reading bounds memory: L_evict may double for ever, and recent and best may be all there is. With `limit`,
      a round that would leave more keeps the sink, recent_ratio of the limit, and the best of the rest up to (D - 1) /
      D of it.

    Settings
    sparse_ratio: float > 1, default 400: tau.
    recent_ratio: float in [0, 1), default 0.3: share of a layer's tokens that stay because they are the last.
    segments: int >= 2, default 8: D.
    gamma: float in (0, 1), default 0.99: decay of the scores per step.
    evict_at: int, tokens, default 1024: what a layer holds before its first round, the first L_evict.
    reading: "text" or "printed", default "text": which reading of Algorithm 1 applies.
    limit: int, tokens, default 0: L_evict never grows past it; 0 is no limit.
    min_sparsity: float in [0, 1], default 0: Hoyer sparsity below which a layer waits.
    """

    sparse_ratio: Annotated[float, Gt(1)] = 400.0
    recent_ratio: Share = 0.3
    segments: Annotated[int, Ge(2)] = 8
    gamma: Annotated[float, Gt(0), Lt(1)] = 0.99
    evict_at: Positive = 1024
    reading: Annotated[str, OneOf(*READINGS)] = "text"
    limit: Count = 0
    min_sparsity: Annotated[float, Ge(0), Le(1)] = 0.0

    @property
    def column_sums(self) -> bool:
        return True

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
        return SCORE * float((held.ends + held.middle).sum())

    def eviction(self, layer: PromptLayer, config: PreTrainedConfig, sizes: Sizes) -> Rounds:
        return Rounds(self)


class Rounds(Eviction):
    """The rounds of one layer.

    settings: Lethe: the settings.

    `evict_at` [B] is how many tokens of each row the layer holds before the next round.
    """

    evict_at: np.ndarray

    def __init__(self, settings: Lethe) -> None:
        self.settings, self.decay = settings, settings.gamma

    def begin(self, scores: list[list[Tensor]]) -> Self:
        new = super().begin(scores)
        new.evict_at = np.full(len(scores), self.settings.evict_at)
        return new

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.evict_at = self.evict_at[rows.cpu().numpy()]

    def quiet(self, held: np.ndarray) -> int:
        return int((self.evict_at + 1 - held.max(1)).min())

    def stay(self, sink: np.ndarray, middle: np.ndarray, window: np.ndarray) -> Tensor | None:
        most = middle.max(1)
        due = np.flatnonzero((sink + most + window > self.evict_at) & (most > 0))
        if not len(due):
            return None
        stay = torch.ones(*middle.shape, int(most.max()), dtype=torch.bool, device=self.scores.device)
        for row in due.tolist():
            stay[row, :, : int(most[row])] = self._stay_in(row, int(sink[row]), middle[row], int(window[row]))
        return stay

    def _stay_in(self, row: int, sink: int, middle: np.ndarray, window: int) -> Tensor:
        """Which tokens of a row's middle stay, the same in all heads: [longest middle of the heads]."""
        held = sink + int(middle.max()) + window
        has_middle = upload(np.flatnonzero(middle), self.scores.device)
        scores = self.scores[row, has_middle, :held].sum(0)
        stay = self._round(row, scores, sink)
        limit = self.settings.limit
        if limit and int(stay.sum()) > limit:
            recent = max(int(self.settings.recent_ratio * limit), window)
            room = limit * (self.settings.segments - 1) // self.settings.segments - sink - recent
            stay[sink : held - recent] = largest(scores[sink : held - recent], max(0, room))
        return stay[sink : held - window]

    def _round(self, row: int, scores: Tensor, sink: int) -> Tensor:
        """Algorithm 1 on scores [K]: the tokens that stay, bool [K]."""
        settings, held = self.settings, len(scores)
        recent = int(settings.recent_ratio * held)
        found = breakpoint_of(scores, settings) if hoyer(scores) >= settings.min_sparsity else None
        wanted = 2 * int(self.evict_at[row]) if found is None else max(int(self.evict_at[row]), found + recent)
        self.evict_at[row] = min(wanted, settings.limit or wanted)
        stay = largest(scores, held if found is None else found)
        stay[:sink] = stay[held - recent :] = True
        return stay


def breakpoint_of(scores: Tensor, settings: Lethe) -> int | None:
    """The first cut point of scores [K] that is a breakpoint, in tokens (Eq. 4, Algorithm 1), or None."""
    ordered = scores.sort(descending=True).values
    cuts = [len(scores) * d // settings.segments for d in range(1, settings.segments)]
    at_cuts = settings.sparse_ratio * ordered[cuts]
    found = (ordered[0] >= at_cuts) if settings.reading == "text" else (ordered[0] <= at_cuts)
    return next((cut for cut, fits in zip(cuts, found.tolist(), strict=True) if fits and cut > 0), None)


def hoyer(a: Tensor) -> float:
    """Hoyer sparsity of a [n] >= 0 (Eq. 1): 0 where all are equal, 1 where only one is not zero."""
    if len(a) < 2:
        return 1.0
    root = len(a) ** 0.5
    return float((root - a.sum() / a.norm()) / (root - 1))
