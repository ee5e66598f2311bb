"""R-KV (arXiv 2505.24133, section 3): tokens stay that are attended to and not repeated; made for long replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize
from transformers import PreTrainedConfig

from leank.channel_scores import wide
from leank.eval.cache.attention.backend import why_not
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Evicting, Kernel
from leank.typed import OneOf, Positive

BLOCK = 1024  # keys compared at once with all others; the limit bounds memory


@method("rkv")
@dataclass(frozen=True)
class RKV(Evicting):
    """Every KV head keeps the tokens of the largest Z = mix I - (1 - mix) R.

      I_j = maxpool_j(mean over the last alpha queries t of softmax(q_t K^T / sqrt(D))_j)          importance
      R_j = softmax_j(mean over tokens i of S_ij),   S_ij = cos(k_i, k_j), S_ii = 0                 redundancy

    Of the tokens j with S_ij above the threshold, the latest one has S_ij = 0, so that the newest of several that are
    alike is not called redundant. While decoding, tokens leave whenever `flush` of them have left the window. The
    paper's sizes are sink=0, window=8 (alpha) and flush=128 (its buffer).

    Deviations
    - While decoding, importance is a decayed sum of attention whose weights fall by 1 - 1 / alpha per step, in place of
      the mean of the last alpha. It starts with the first new token: the prompt's queries count in the prompt's cut
      alone. Redundancy is among the middle's tokens alone, in the channels that they keep; under a mask with mean
      keys, all keys lack these.
    - Attention is averaged over the group's query heads; the authors' code takes the largest logit of the group and
      leaves the observed tokens out of the softmax.
    - Pooling reaches into the observed tokens with pooled=all, so that more of the few tokens before them stay; with
      pooled=earlier it ends before them, as in the authors' code.
    - A prompt longer than the budget is cut by the same rule at its end.
    """

    queries: Positive = 8  # alpha, last queries that are observed; their tokens always stay
    kernel: Kernel = 7  # neighbours over which importance is pooled
    pooled: Annotated[str, OneOf("all", "earlier")] = "all"  # tokens over which importance is pooled
    mix: Annotated[float, Ge(0), Le(1)] = 0.1  # weight of importance; the authors' code has 0.07
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5  # cosine above which two keys are alike; none are at 1

    def protected(self, sizes: Sizes) -> Sizes:
        return Sizes(sizes.sink, max(sizes.window, self.queries), sizes.flush)

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        assert layer.queries is not None
        last = layer.queries[:, :, -self.queries :]
        attention = received(last, layer.keys, real=real, scaling=layer.scaling, softmax=layer.softmax)
        each = attention.unflatten(1, (layer.keys.shape[1], -1)).mean(2) / last.shape[2]
        there = torch.ones_like(each[:, 0], dtype=torch.bool) if real is None else real
        earlier = torch.arange(each.shape[2], device=each.device) < each.shape[2] - self.queries
        redundant = compared(layer.keys, there[:, None].expand(each.shape), self.threshold)
        return self.ranked(each, redundant, earlier)

    def ranked(self, importance: Tensor, redundant: Tensor, earlier: Tensor) -> Tensor:
        """Z [B, H, n] of attention that is not pooled yet and of redundancy.

        earlier: bool, broadcast to [B, H, n], the tokens before the observed ones
        """
        if self.pooled == "earlier":
            importance = importance * earlier
        pooled = max_pool1d(importance, self.kernel, 1, self.kernel // 2)
        return self.mix * pooled - (1 - self.mix) * redundant

    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> Redundant:
        return Redundant(heavy, self)


class Redundant(HeavyHitters):
    """The `heavy` tokens of a head's middle with the largest Z stay."""

    def __init__(self, heavy: int, settings: RKV) -> None:
        super().__init__(heavy)
        self.settings, self.decay = settings, 1 - 1 / settings.queries

    def ranking(self, prompt: Segment, tail: Segment, sink: int) -> Tensor:
        middle = prompt.length + tail.length
        redundant = torch.zeros_like(self.scores)
        for row, head in np.argwhere(middle > self.heavy).tolist():
            keys = torch.cat([part.read(row, head)[0] for part in (prompt, tail)])[None, None]
            there = torch.ones(1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
            of_head = redundancy(keys, there, self.settings.threshold)[0, 0]
            redundant[row, head, sink : sink + keys.shape[2]] = of_head
        share = self.scores / self.scores.sum(-1, keepdim=True).clamp(min=torch.finfo(self.scores.dtype).tiny)
        place = torch.arange(share.shape[2], device=share.device)
        earlier = place < torch.from_numpy(sink + middle).to(share.device)[..., None]
        return self.settings.ranked(share, redundant, earlier)

    def launched(self, prompt: Segment, tail: Segment, sink: int, most: int) -> Tensor:
        from leank.eval.methods.kernels.rkv import ranking

        return ranking(self.scores, tail, sink, most, self.settings)


def compared(keys: Tensor, there: Tensor, threshold: float) -> Tensor:
    """What `redundancy` returns; Triton computes it where it can."""
    if why_not(keys.device, keys.dtype, keys.shape[-1], 1, insist=False, dims=HEAD_DIMS["decode"]):
        return redundancy(keys, there, threshold)
    from leank.eval.methods.kernels import rkv

    return rkv.redundancy(keys, there, threshold)


def redundancy(keys: Tensor, there: Tensor, threshold: float) -> Tensor:
    """R [B, H, n] of keys [B, H, n, D]; there: bool [B, H, n], the tokens that count."""
    each = normalize(keys.to(wide(keys)), dim=-1) * there[..., None]
    count, place = each.shape[2], torch.arange(each.shape[2], device=keys.device)
    total = torch.zeros_like(each[..., 0])
    for start in range(0, count, BLOCK):
        rows = place[start : start + BLOCK]
        alike = each[:, :, rows] @ each.mT  # [B, H, block, n]
        alike = alike.masked_fill(rows[:, None] == place, 0)
        cosine = alike.clamp(max=1)  # that of equal keys is rounded to more
        latest = torch.where(cosine > threshold, place, -1).amax(-1, keepdim=True)
        total += alike.masked_fill(place == latest, 0).sum(2)
    mean = total / there.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, -torch.inf).softmax(-1).masked_fill(~there, 0)
