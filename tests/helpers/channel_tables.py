"""Random tables of kept channels, for tests of the segments of a cache."""

import torch

from leank.eval.cache.storage.channels import KeptChannels


def random_tables(seed, batch, heads, dim):
    """A KeptChannels table with empty heads among it, and its mask [B, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(batch, heads, dim, generator=generator) < torch.rand(batch, heads, 1, generator=generator) * 1.3
    keep &= torch.rand(batch, heads, 1, generator=generator) > 0.25
    return KeptChannels.of(keep, torch.empty(batch, heads, 0, dim)), keep
