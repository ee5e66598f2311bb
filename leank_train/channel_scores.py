"""Channel masks that need no training, and the scores behind them: the baselines a learned mask has to beat.

Each rule has one definition here. Validation in a training run (`leank_train.validation.baselines`) and the replay
(`eval.methods`) both hand their own queries and keys to it. At one ratio all of them prune as many channels: `pruned`,
rounded down, in every head.
"""

from typing import Any

import torch
from torch import Tensor

from leank_train.mask import ChannelMask

GROUPS = ("squares", "norms")


def lowest_frequencies(config: Any, ratio: float) -> ChannelMask:
    """Keep the RoPE pairs of the lowest frequencies, as many in every head; an odd number to prune takes a pair more.

    A pair p of D / 2 has the frequency theta^(-2p / D) and rotates the channels p and p + D / 2.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("lowest_frequencies needs a model that rotates all channels (partial_rotary_factor=1)")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keep = torch.arange(dim) % (dim // 2) >= (pruned(dim, ratio) + 1) // 2
    shape = (config.num_hidden_layers, config.num_key_value_heads, dim)
    return ChannelMask(keep.expand(shape), {"method": "lowest_frequencies", "ratio": ratio})


def random_mask(shape: tuple[int, int, int], ratio: float, seed: int) -> ChannelMask:
    """Random channels, as many in every head; shape [L, H, D]."""
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return ChannelMask(best(scores, ratio), {"method": "random", "ratio": ratio, "seed": seed})


class MeanScores:
    """Mean of channel scores over samples, and the static mask of its highest scores.

    With `query_key_scores(..., "norms")` it is LeanK's static norm (section 2.2, appendix A): the mean over samples of
    ||Q_[k] K_[k]^T||_F = ||q_k|| ||K_k||, where Q are the observed queries, K all keys of the context, and the members
    of a group are averaged.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.samples = 0

    def add(self, scores: Tensor) -> None:
        """Count R samples; scores [R, L, H, D]."""
        total = scores.sum(0).double().cpu()
        self.total = total if self.total is None else self.total + total
        self.samples += len(scores)

    @property
    def scores(self) -> Tensor:
        """Mean scores [L, H, D], float64. Raises ValueError before the first sample."""
        if self.total is None:
            raise ValueError("no sample has been scored; add at least one before asking for the mask of mean scores")
        return self.total / self.samples

    def mask(self, ratio: float) -> Tensor:
        """Keep the channels of the highest mean score, as many in every head; bool [L, H, D]."""
        return best(self.scores, ratio)


def query_key_scores(queries: Tensor, key_squares: Tensor, group: str) -> Tensor:
    """ThinK's score ||q_k|| ||K_k|| of every channel k (its section 3.2), or its square, [R, H, D].

    queries [R, Hq, n, D] observed; key_squares [R, H, D] the sum of k^2 over tokens. group, what is averaged over the
    query heads of a KV head: "squares" (as the public code does, and ranks like the norm of all their queries) or
    "norms". A sum in place of the mean would rank alike.
    """
    energy = queries.to(wide(queries)).square().sum(2).unflatten(1, (key_squares.shape[1], -1))  # [R, H, G, D]
    if group == "squares":
        return energy.mean(2) * key_squares
    return energy.sqrt().mean(2) * key_squares.sqrt()


def pruned(channels: int, ratio: float) -> int:
    """How many of a head's channels go: floor(ratio * channels), 44 of 64 and 89 of 128 at 0.7.

    As in ThinK's code and IAP's Algorithm 1. Raises ValueError for a ratio outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio={ratio} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
    return int(ratio * channels)


def best(scores: Tensor, ratio: float) -> Tensor:
    """Bool like scores [..., D]: what stays if the lowest go, `pruned` in each row."""
    return top(scores, scores.shape[-1] - pruned(scores.shape[-1], ratio))


def top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Bool like scores [..., D]: the `count` (or [..., 1]) largest of each row; equal scores go to the lower index."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < count


def wide(x: Tensor) -> torch.dtype:
    """The type to sum x in: its own, float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
