"""Layouts of bits, at random."""

import torch

from leank.mask import ChannelMask
from leank.precision import KEY_BITS, ROOM, VALUE_BITS, Precision


def layout(shape, seed, keys=KEY_BITS, values=VALUE_BITS, packed=False):
    """A layout of these bits at random; the first head is empty."""
    generator = torch.Generator().manual_seed(seed)
    of_keys = torch.tensor(keys, dtype=torch.uint8)[torch.randint(len(keys), shape, generator=generator)]
    of_keys[0, 0] = 0
    of_values = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), shape[:2], generator=generator)]
    return Precision(of_keys, of_values, packed=packed)


def layout_mask(shape, seed, **layouts):
    """A mask with a layout at random."""
    precision = layout(shape, seed, **layouts)
    return ChannelMask(precision.keep, precision=precision)


def random_losses(seed, heads=2, blocks=2):
    """Random losses that fall with the width, of `blocks` blocks of equal channels in each head."""
    generator = torch.Generator().manual_seed(seed)

    def falling(*shape):
        steps = torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
        return steps.flip(-1).cumsum(-1).flip(-1) - steps[..., -1:]

    scale = torch.rand(1, heads, blocks, 1, generator=generator, dtype=torch.float64) ** 4 + 1e-3
    keys = (falling(1, heads, blocks, len(KEY_BITS)) * scale).repeat_interleave(ROOM, 2) / ROOM
    empty = torch.rand(1, heads, generator=generator, dtype=torch.float64) * 3
    return keys, falling(1, heads, len(VALUE_BITS)) / 4, empty


def loss_of(layout, keys, values, empty):
    """The sum that `allocate` makes small."""
    at = torch.tensor([KEY_BITS.index(b) for b in layout.key_bits.flatten().tolist()]).view_as(layout.key_bits)
    v_at = torch.tensor([VALUE_BITS.index(b) for b in layout.value_bits.flatten().tolist()]).view_as(layout.value_bits)
    kept = keys.gather(-1, at[..., None]).squeeze(-1).sum(-1) + values.gather(-1, v_at[..., None]).squeeze(-1)
    return float(torch.where(layout.keep.any(-1), kept, empty).sum())
