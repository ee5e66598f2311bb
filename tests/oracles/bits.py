"""K and V of tokens that enter the middle together, as a page of few bits returns them: level by level."""

import torch
from torch import Tensor

from leank.precision import GROUP, WHOLE, value_group


def in_bits(k: Tensor, v: Tensor, key_bits: Tensor, value_bits: int, packed: bool = False) -> tuple[Tensor, Tensor]:
    """K and V [n, D] in the bits of a layout, 16 = unchanged; a pruned channel has 0 bits.

    K is quantised per channel: 64 tokens of it share a scale. V is quantised per token: up to 64 channels share one.
    key_bits: [D]
    packed: whether scales are
    """
    fake, k = fake_packed if packed else fake_quantise, k.clone()
    for channel, bits in enumerate(key_bits.tolist()):
        if 0 < bits < WHOLE and len(k):
            k[:, channel] = torch.cat([fake(group, bits) for group in k[:, channel].split(GROUP)])
    if value_bits < WHOLE:
        v = torch.cat([fake(group, int(value_bits)) for group in v.split(value_group(v.shape[1]), 1)], 1)
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


# Every packed scale, rising: four bits of fraction, and five of exponent but for the least and the largest.
SCALES = torch.tensor([(1 + i / 16) * 2.0**e for e in range(-14, 16) for i in range(16)], dtype=torch.float64)


def fake_packed(x: Tensor, bits: int) -> Tensor:
    """The same on levels whose scale is one of `SCALES`, and whose least level is a small multiple of a part of it."""
    top, unit, edge = 2**bits - 1, *{2: (1 / 4, 1 / 8), 3: (1 / 4, 1 / 8), 4: (1 / 2, 1 / 4), 8: (8, -8)}[bits]
    found = []
    for cell in x.reshape(-1, x.shape[-1]):
        low, high = cell.double().aminmax()
        need = max((high - low) / (top + edge), -low / (63 * unit), high / (63 * unit + top))
        scale = SCALES[min(int((need > SCALES).sum()), len(SCALES) - 1)]
        steps = low / (unit * scale)
        zero = (steps.floor() if bits == 8 else steps.round()).clamp(-63, 63)
        level = scale * (torch.arange(2**bits) + zero * unit)
        distance = (cell.double()[:, None] - level).abs()
        nearest = distance == distance.amin(-1, keepdim=True)
        found.append(level[torch.where(nearest, torch.arange(2**bits) % 2, 2).argmin(-1)])
    return torch.stack(found).view_as(x).to(x.dtype) if found else x
