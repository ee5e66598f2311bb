"""The sizes of sink and window, which columns of a prompt belong to the middle, and rows of equal padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from leank.data_gen.request import LONGEST
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.eval.cache.storage.upload import upload


@dataclass(frozen=True)
class Sizes:
    """How many tokens are kept whole at both ends.

    sink: first tokens of a row, at least 0
    window: last tokens of a row, at least 0
    flush: tokens that leave the window at a time while decoding, at least 1

    Raises ValueError for other numbers, and for more than `LONGEST`.
    """

    sink: int = 128
    window: int = 1024
    flush: int = 32

    def __post_init__(self) -> None:
        for name in ("sink", "window", "flush"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be a whole number of tokens")
            if int(value) > LONGEST:
                raise ValueError(f"{name}={value} is beyond {LONGEST} tokens, which no model reads; lower it")
        if self.sink < 0 or self.window < 0 or self.flush < 1:
            raise ValueError(f"need sink >= 0, window >= 0, flush >= 1, got {self.sink}, {self.window}, {self.flush}")

    @property
    def ring(self) -> int:
        """Slots of the window's ring, in whole pages."""
        return round_up(self.window + self.flush, PAGE)


def real_positions(seen: Tensor, new: int, real: Tensor | None) -> Tensor:
    """The real index of each new column, -1 for padding: [B, new].

    seen: [B], real tokens before these columns
    new: number of columns
    real: [B, new] bool, False = padding, None = no padding
    """
    if real is None:
        return seen[:, None] + torch.arange(new, device=seen.device)
    real = real.to(seen.device)
    return torch.where(real, seen[:, None] + torch.cumsum(real, -1) - 1, -1)


def middle_columns(position: Tensor, sizes: Sizes) -> Tensor:
    """Which columns of a prompt are neither sink nor window, bool [B, T].

    position: [B, T], from `real_positions`
    """
    start = (position.amax(-1, keepdim=True) + 1 - sizes.window).clamp(min=sizes.sink)
    return (position >= sizes.sink) & (position < start)


def equal_rows(real: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
    """Neighbouring rows of real [B, T] that are equal, and their true columns; a slice, which needs no copy, if it can.

    Rows without a true column are left out.
    """
    patterns = real.cpu().numpy()
    edges = np.flatnonzero((patterns[1:] != patterns[:-1]).any(1)) + 1
    for first, last in pairwise([0, *edges.tolist(), len(patterns)]):
        columns = np.flatnonzero(patterns[first])
        if len(columns):
            begin, end = int(columns[0]), int(columns[-1]) + 1
            whole = end - begin == len(columns)
            yield slice(first, last), slice(begin, end) if whole else upload(columns, real.device)
