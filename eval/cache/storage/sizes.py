"""The sizes of sink and window, which columns of a prompt belong to the middle, and rows of equal padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from leank.data_gen.task import LONGEST
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.eval.cache.storage.upload import upload
from leank.typed import Checked

Tokens = Annotated[int, Ge(0), Le(LONGEST)]


@dataclass(frozen=True)
class Sizes(Checked):
    """How many tokens are kept whole at both ends.

    sink: first tokens of a row
    window: last tokens of a row
    flush: tokens that leave the window at a time while decoding, at least 1

    Raises ValueError for other numbers.
    """

    sink: Tokens = 128
    window: Tokens = 1024
    flush: Annotated[Tokens, Ge(1)] = 32

    @property
    def ring(self) -> int:
        """Slots of the window's ring, in whole pages."""
        return round_up(self.window + self.flush, PAGE)


def real_positions(seen: Tensor, new: int, real: Tensor | None) -> Tensor:
    """The real index of `new` columns behind seen [B] real tokens, [B, new]; -1 where real [B, new] is False."""
    if real is None:
        return seen[:, None] + torch.arange(new, device=seen.device)
    real = real.to(seen.device)
    return torch.where(real, seen[:, None] + torch.cumsum(real, -1) - 1, -1)


def middle_columns(position: Tensor, sizes: Sizes) -> Tensor:
    """Which columns of a prompt are neither sink nor window, bool [B, T]; position: [B, T], from `real_positions`."""
    start = (position.amax(-1, keepdim=True) + 1 - sizes.window).clamp(min=sizes.sink)
    return (position >= sizes.sink) & (position < start)


def equal_rows(real: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
    """Neighbouring rows of real [B, T] that are equal and not empty, and their true columns, a slice if can be."""
    patterns = real.cpu().numpy()
    edges = np.flatnonzero((patterns[1:] != patterns[:-1]).any(1)) + 1
    for first, last in pairwise([0, *edges.tolist(), len(patterns)]):
        columns = np.flatnonzero(patterns[first])
        if len(columns):
            begin, end = int(columns[0]), int(columns[-1]) + 1
            whole = end - begin == len(columns)
            yield slice(first, last), slice(begin, end) if whole else upload(columns, real.device)
