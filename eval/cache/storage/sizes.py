"""The sizes of sink and window, which columns of a prompt belong to the middle, and rows of equal padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from leank.data_gen.task import LONGEST
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.eval.cache.storage.upload import upload
from leank.typed import BadConfig, Checked

Tokens = Annotated[int, Ge(0), Le(LONGEST)]
Count = TypeVar("Count", np.ndarray, Tensor)


@dataclass(frozen=True)
class Sizes(Checked):
    """How many tokens are kept whole at both ends.

    sink: first tokens of a row
    window: last tokens of a row
    flush: tokens that leave the window at a time while decoding, at least 1
    grid: where the middle may end: "prompt", right before the window of the prompt and each `flush` tokens behind that;
        "absolute", at multiples of `flush` alone, counted from the first token, so that what a token is in does not
        depend on where the prompt ends. The window then has up to flush - 1 tokens more behind the prompt

    Raises ValueError for other numbers, and for an absolute grid on which the sink does not end.
    """

    sink: Tokens = 128
    window: Tokens = 1024
    flush: Annotated[Tokens, Ge(1)] = 32
    grid: Literal["prompt", "absolute"] = "prompt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid == "absolute" and self.sink % self.flush:
            raise BadConfig(
                f"sink={self.sink} must be a multiple of flush={self.flush} with grid='absolute'; take "
                f"{round_up(self.sink, self.flush)}"
            )

    @property
    def ring(self) -> int:
        """Slots of the window's ring, in whole pages."""
        return round_up(self.window + self.flush, PAGE)

    def slots(self, held: int, middle: bool) -> int:
        """Slots of a ring that holds `held` tokens: no spare page before there is a middle, then at least `ring`."""
        needed = round_up(max(1, held), PAGE)
        return max(self.ring, needed) if middle else needed

    def moved(self, prompt: np.ndarray, new: np.ndarray) -> np.ndarray:
        """How many tokens have left the window, for the middle, when `new` have come behind a prompt of `prompt`."""
        return (prompt + new - self.window_start(prompt) - self.window).clip(min=0) // self.flush * self.flush

    def window_start(self, seen: Count) -> Count:
        """The first token of the window behind a prompt of `seen` tokens, an array or a tensor."""
        start = seen - self.window
        if self.grid == "absolute":
            start = start // self.flush * self.flush
        return start.clip(min=self.sink)


def real_positions(seen: Tensor, new: int, real: Tensor | None) -> Tensor:
    """The real index of `new` columns behind seen [B] real tokens, [B, new]; -1 where real [B, new] is False."""
    if real is None:
        return seen[:, None] + torch.arange(new, device=seen.device)
    real = real.to(seen.device)
    return torch.where(real, seen[:, None] + torch.cumsum(real, -1) - 1, -1)


def middle_columns(position: Tensor, sizes: Sizes) -> Tensor:
    """Which columns of a prompt are neither sink nor window, bool [B, T]; position: [B, T], from `real_positions`."""
    start = sizes.window_start(position.amax(-1, keepdim=True) + 1)
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
