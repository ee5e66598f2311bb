"""Layouts of bits, at random."""

import torch

from leank.mask import ChannelMask
from leank.precision import KEY_BITS, VALUE_BITS, Precision


def layout(shape, seed, keys=KEY_BITS, values=VALUE_BITS):
    """A layout of these bits at random; the first head is empty."""
    generator = torch.Generator().manual_seed(seed)
    of_keys = torch.tensor(keys, dtype=torch.uint8)[torch.randint(len(keys), shape, generator=generator)]
    of_keys[0, 0] = 0
    of_values = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), shape[:2], generator=generator)]
    return Precision(of_keys, of_values)


def layout_mask(shape, seed, **layouts):
    """A mask with a layout at random."""
    precision = layout(shape, seed, **layouts)
    return ChannelMask(precision.keep, precision=precision)
