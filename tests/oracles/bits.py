"""K and V of tokens that enter the middle together, as a page of few bits returns them: level by level."""

import torch
from torch import Tensor

from leank.precision import GROUP, WHOLE, value_group


def in_bits(k: Tensor, v: Tensor, key_bits: Tensor, value_bits: int) -> tuple[Tensor, Tensor]:
    """K and V [n, D] in the bits of a layout, 16 = unchanged; a pruned channel has 0 bits.

    K is quantised per channel: 64 tokens of it share a scale. V is quantised per token: up to 64 channels share one.
    key_bits: [D]
    """
    k = k.clone()
    for channel, bits in enumerate(key_bits.tolist()):
        if 0 < bits < WHOLE and len(k):
            k[:, channel] = torch.cat([fake_quantise(group, bits) for group in k[:, channel].split(GROUP)])
    if value_bits < WHOLE:
        v = torch.cat([fake_quantise(group, int(value_bits)) for group in v.split(value_group(v.shape[1]), 1)], 1)
    return k, v


def fake_quantise(x: Tensor, bits: int) -> Tensor:
    """Replace every number of x [..., n], groups that share a scale, by the nearest of 2^bits levels.

    The levels go from the group's least to its largest number; of two that are as near, the even one is taken.
    """
    low, high, wide = x.amin(-1), x.amax(-1), torch.promote_types(x.dtype, torch.float32)
    scale = ((high.to(wide) - low.to(wide)) / (2**bits - 1)).to(x.dtype)
    number = torch.arange(2**bits)
    level = low.double()[..., None] + scale.double()[..., None] * number  # [..., levels]
    distance = (x.double()[..., None] - level[..., None, :]).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    nearest = torch.where(nearest, number % 2, 2).argmin(-1)
    return (nearest * scale.to(wide)[..., None] + low.to(wide)[..., None]).to(x.dtype)
