"""Several codes in a byte: those of numbers that lie far apart, whose products are different ones."""

from __future__ import annotations

import torch
from torch import Tensor

Folds = tuple[tuple[int, int], ...]  # (axis, shift): of this axis, the second half lies `shift` bits above the first

LOWER = {4: 0x0F, 2: 0x33}  # the bits of a byte that hold codes where others lie so many bits higher
# By bits, of a page of K, [64, C], of V, [D, 64], and of whole vectors, [64, d].
K_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-1, 2), (-2, 4))}
V_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-2, 4), (-2, 2))}
VECTOR_FOLDS: dict[int, Folds] = {4: ((-1, 4),), 2: ((-1, 4), (-1, 2))}


def fold(codes: Tensor, folds: Folds) -> Tensor:
    """Bytes of codes."""
    for axis, shift in folds:
        first, second = codes.chunk(2, axis)
        codes = first | second << shift
    return codes


def unfold(stored: Tensor, folds: Folds) -> Tensor:
    """The codes of which `fold` made bytes."""
    for axis, shift in reversed(folds):
        stored = torch.cat([stored & LOWER[shift], (stored >> shift) & LOWER[shift]], axis)
    return stored
