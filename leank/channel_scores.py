"""Channel masks that need no training, and the scores behind them: the baselines that a learned mask has to beat.

Each rule has one definition here, which `eval.methods` hands its queries and keys. At one ratio all rules prune equally
many channels of every head: `pruned`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leank.mask import ChannelMask, refuse_not_finite
from leank.rotary import rotary_pairs
from leank.shape import kv_shape

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

GROUPS = ("squares", "norms")


def lowest_frequencies(config: PreTrainedConfig, ratio: float) -> ChannelMask:
    """Keep the RoPE pairs of the lowest frequencies, equally many in every head; ratio: to prune, in [0, 1).

    Pair p of D / 2 has the frequency theta^(-2p / D); `rotary_pairs` says which two channels it rotates. If the number
    of channels to prune is odd, one channel more is pruned.
    Raises ValueError for a model that rotates only part of a head, or a ratio out of range.
    """
    pairs, shape = rotary_pairs(config), kv_shape(config)
    if (pairs < 0).any():
        raise ValueError("lowest_frequencies needs a model that rotates all channels (partial_rotary_factor=1)")
    keep = pairs >= (pruned(shape.head_dim, ratio) + 1) // 2  # [L, D]
    return ChannelMask(keep[:, None].expand(shape), {"method": "lowest_frequencies", "ratio": ratio})


def random_mask(shape: tuple[int, int, int], ratio: float, seed: int) -> ChannelMask:
    """Keep random channels, equally many in every head; shape [L, H, D], a ratio in [0, 1) to prune."""
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return ChannelMask(best(scores, ratio), {"method": "random", "ratio": ratio, "seed": seed})


class MeanScores:
    """The mean of channel scores over samples, and the static mask of the highest means.

    With `query_key_scores(..., "norms")` it is LeanK's static norm (section 2.2, appendix A): the mean over samples of
    ||Q_[k] K_[k]^T||_F = ||q_k|| ||K_k||. Q are the observed queries, K all keys of the context. The query heads of a
    KV head are averaged.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.samples = 0

    def add(self, scores: Tensor) -> None:
        """Add the scores [R, L, H, D] of R samples."""
        total = scores.sum(0).double().cpu()
        self.total = total if self.total is None else self.total + total
        self.samples += len(scores)

    @property
    def scores(self) -> Tensor:
        """Mean scores [L, H, D], float64. Raises ValueError before the first sample, and if they are not finite."""
        if self.total is None:
            raise ValueError("no sample has been scored; add at least one before asking for the mask of mean scores")
        mean = self.total / self.samples
        refuse_not_finite(mean, "set model.dtype=bfloat16 or float32", "the mean of calibration samples")
        return mean

    def mask(self, ratio: float) -> Tensor:
        """Keep the channels of the highest mean scores, equally many in every head; bool [L, H, D]."""
        return best(self.scores, ratio)


def query_key_scores(queries: Tensor, key_squares: Tensor, group: str) -> Tensor:
    """Return ThinK's score ||q_k|| ||K_k|| of every channel k (its section 3.2), or its square, [R, H, D].

    queries: [R, Hq, n, D], the observed queries.
    key_squares: [R, H, D], the sum of k^2 over tokens.
    group: what is averaged over the query heads of a KV head. "squares" returns the square of the score, ranks like the
        norm of all their queries, and is what the public code does. "norms" returns the score itself.
    """
    energy = queries.to(wide(queries)).square().sum(2).unflatten(1, (key_squares.shape[1], -1))  # [R, H, G, D]
    if group == "squares":
        return energy.mean(2) * key_squares
    return energy.sqrt().mean(2) * key_squares.sqrt()


def pruned(channels: int, ratio: float) -> int:
    """Return how many channels of a head are pruned: floor(ratio * channels), as in ThinK's code; 89 of 128 at 0.7.

    Raises ValueError for a ratio outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio={ratio} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
    return int(ratio * channels)


def best(scores: Tensor, ratio: float) -> Tensor:
    """Mark what is kept if the lowest scores of each row are `pruned`; bool like scores [..., D]."""
    return top(scores, scores.shape[-1] - pruned(scores.shape[-1], ratio))


def top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` (one number or [..., 1]) largest of each row [..., D]; of equal ones the lower index."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < count


def wide(x: Tensor) -> torch.dtype:
    """Return the type to sum x in: its own, or float32 if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)
