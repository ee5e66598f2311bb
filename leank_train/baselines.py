"""Channel masks that need no training: the baselines a learned mask has to beat.

Static ones are a ChannelMask; ThinK's is made anew for each sample, [R, L, H, D]. What they observe comes from
`branch(..., obs_queries=32)`: the last queries of the context, after RoPE.
"""

from typing import Any

import torch
from torch import Tensor

from leank_train.mask import ChannelMask
from leank_train.prefix import Branch, Prefix


def lowest_frequencies(config: Any, ratio: float) -> ChannelMask:
    """Keep the RoPE pairs of the lowest frequencies, as many in every head.

    A pair p of D / 2 has the frequency theta^(-2p / D) and rotates the channels p and p + D / 2.
    """
    _check_ratio(ratio)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("lowest_frequencies needs a model that rotates all channels (partial_rotary_factor=1)")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair = torch.arange(dim) % (dim // 2)
    keep = pair >= dim // 2 - _kept(dim // 2, ratio)
    shape = (config.num_hidden_layers, config.num_key_value_heads, dim)
    return ChannelMask(keep.expand(shape), {"method": "lowest_frequencies", "ratio": ratio})


def random_mask(shape: tuple[int, int, int], ratio: float, seed: int) -> ChannelMask:
    """Random channels, as many in every head; shape [L, H, D]."""
    _check_ratio(ratio)
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return ChannelMask(_top(scores, _kept(shape[2], ratio)), {"method": "random", "ratio": ratio, "seed": seed})


class StaticNorm:
    """Static norm-based mask (section 2.2, appendix A): mean over samples of ||Q_[k] K_[k]^T||_F = ||q_k|| ||K_k||.

    Q are the observed queries, K all keys of the context; the members of a group are averaged.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.samples = 0

    def add(self, prefix: Prefix, question: Branch) -> None:
        """Count R samples; `question` needs queries (see branch's obs_queries)."""
        layers = []
        for layer, queries in enumerate(_queries(question)):
            norms = queries.to(_wide(queries)).norm(dim=2)  # [R, Hq, D]
            squares, _ = _key_squares(prefix, question, layer)  # [R, H, D]
            layers.append((norms.unflatten(1, (squares.shape[1], -1)).mean(2) * squares.sqrt()).sum(0))
        total = torch.stack(layers).double().cpu()
        self.total = total if self.total is None else self.total + total
        self.samples += len(question.lengths)

    @property
    def scores(self) -> Tensor:
        """Mean norms [L, H, D]. Raises ValueError before the first sample."""
        if self.total is None:
            raise ValueError("static_norm has seen no sample; add at least one before asking for its mask")
        return self.total / self.samples

    def mask(self, ratio: float) -> ChannelMask:
        """Keep the channels of the largest norm, as many in every head."""
        _check_ratio(ratio)
        keep = _top(self.scores, _kept(self.scores.shape[2], ratio))
        return ChannelMask(keep, {"method": "static_norm", "ratio": ratio, "samples": self.samples})


def think_mask(prefix: Prefix, question: Branch, ratio: float) -> Tensor:
    """ThinK: of each sample, drop in every head the int(ratio * D) channels of the lowest score; bool [R, L, H, D].

    score = mean of q^2 over the observed queries * mean of k^2 over the keys of the context, averaged over the group.
    """
    _check_ratio(ratio)
    layers = []
    for layer, queries in enumerate(_queries(question)):
        squares, count = _key_squares(prefix, question, layer)  # [R, H, D], [R]
        energy = queries.to(_wide(queries)).square().mean(2).unflatten(1, (squares.shape[1], -1)).mean(2)  # [R, H, D]
        dim = squares.shape[2]
        layers.append(_top(energy * squares / count[:, None, None], dim - int(ratio * dim)))
    return torch.stack(layers, 1)


def _queries(question: Branch) -> list[Tensor]:
    if question.queries is None:
        raise ValueError("the branch has kept no queries; call branch with obs_queries=32")
    return question.queries


def _key_squares(prefix: Prefix, question: Branch, layer: int) -> tuple[Tensor, Tensor]:
    """Sum of k^2 over the context of each branch [R, H, D] and its number of keys [R]; padding left out."""
    sums = []
    for keys, positions in ((prefix.keys[layer], prefix.k_positions), (question.keys[layer], question.k_positions)):
        real = (positions >= 0)[:, None, :, None]
        sums.append((keys.to(_wide(keys)).square() * real).sum(2))
    branches = len(question.lengths) // len(prefix.lengths)
    return sums[0].repeat_interleave(branches, 0) + sums[1], question.starts + question.lengths


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _kept(channels: int, ratio: float) -> int:
    return int(channels * (1 - ratio) + 0.5)


def _top(scores: Tensor, count: int) -> Tensor:
    """Bool like scores [..., D]: the `count` largest of each row; equal scores go to the lower index."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < count


def _check_ratio(ratio: float) -> None:
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio={ratio} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
