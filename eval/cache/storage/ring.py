"""The whole tokens of a sealed layer: the sink, and the window, which is a ring in which token i has slot i mod slots.

Keys and values are written in the same way, so every function here takes one tensor of either.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_prompt(sink: Tensor, ring: Tensor, new: Tensor, start: int) -> None:
    """Put a prompt without padding into sink and ring, by slices.

    sink: [B, H, sink, D], takes the first tokens
    ring: [B, H, slots, D], takes the tokens from `start` on
    new: [B, H, T, D]
    start: first token of the window, the same in every row
    """
    length, slots = new.shape[2], ring.shape[2]
    ends = min(length, sink.shape[2])
    sink[:, :, :ends] = new[:, :, :ends]
    turn = max(start, length // slots * slots)  # the token from which on slots begin at 0 again
    for first, last in ((start, min(turn, length)), (turn, length)):
        if first < last:
            ring[:, :, first % slots : first % slots + last - first] = new[:, :, first:last]


def write_columns(sink: Tensor, ring: Tensor, new: Tensor, position: Tensor, start: Tensor) -> None:
    """Put each row's own tokens into sink and ring; the reference of `write_prompt`.

    sink: [B, H, sink, D], takes tokens [0, sink)
    ring: [B, H, slots, D], takes tokens [start, ...)
    new: [B, H, n, D]
    position: [B, n], the real index of each column, -1 for padding
    start: [B], first token of each row's window
    """
    for part, to, chosen in (
        (ring, position % ring.shape[2], position >= start[:, None]),
        (sink, position, (position >= 0) & (position < sink.shape[2])),
    ):
        row, column = chosen.nonzero(as_tuple=True)
        part[row, :, to[row, column]] = new[row, :, column]


def resized(ring: Tensor, start: Tensor, held: int, slots: int) -> Tensor:
    """The ring with another number of slots, each token at its new slot.

    ring: [B, H, slots before, D]
    start: [B], first token of each row's window
    held: the most tokens that a row's window holds
    """
    old = ring.shape[2]
    index = start[:, None] + torch.arange(min(held, old), device=start.device)
    row = torch.arange(len(index), device=index.device)[:, None]
    moved = ring.new_zeros(*ring.shape[:2], slots, ring.shape[3])
    moved[row, :, index % slots] = ring[row, :, index % old]
    return moved
