"""Hadamard matrices: a rotation that spreads what one channel holds over all."""

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def hadamard(dim: int, block: int | None = None) -> Tensor:
    """An orthogonal block-diagonal matrix [dim, dim], float64, whose blocks are Sylvester's Hadamard matrices.

    block: largest size of a block, default None: dim. Blocks have the largest power of two that divides dim, at most
        this.
    """
    size = dim & -dim
    while block is not None and size > block:
        size //= 2
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)]) / 2**0.5
    return torch.block_diag(*[found] * (dim // size))
