"""A prompt on its way into the cache: its chunks are collected, then its middle goes into a segment."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.eviction import Eviction, moved_up
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.upload import upload


class PromptRoom:
    """K and V of a prompt that comes in chunks, in buffers that are made once."""

    def __init__(self, k: Tensor, v: Tensor, columns: int) -> None:
        """Make room for `columns` tokens of the batch, heads and dtypes of k and v [B, H, n, D]."""
        self.k, self.v = (x.new_empty(*x.shape[:2], columns, x.shape[3]) for x in (k, v))

    def put(self, k: Tensor, v: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, n, D] from column `at` on; returns K and V up to their end."""
        end = at + k.shape[2]
        self.k[:, :, at:end], self.v[:, :, at:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]


def padded_left_only(real: Tensor | None, batch: int) -> np.ndarray:
    """Which rows [B] are real tokens from their first real one to the end, so that `crop` meets no padding.

    real: [B, T] bool, False = padding, None = no padding
    """
    if real is None:
        return np.ones(batch, dtype=bool)
    return (real[:, 1:] >= real[:, :-1]).all(-1).cpu().numpy()


def seal_middle(
    segment: Segment,
    k: Tensor,
    v: Tensor,
    count: np.ndarray,
    columns: slice,
    in_middle: Tensor | None,
    chosen: Tensor | None,
) -> None:
    """Store the middle of a prompt.

    segment: has room for exactly these tokens
    k, v: [B, H, T, D]
    count: [B, H], how many tokens each head keeps
    columns: the middle of a prompt without padding
    in_middle: [B, T] bool, the columns of each row's middle; None = no padding
    chosen: [B, H, T] bool, the tokens of the middle that stay; None = all
    """
    if chosen is not None:
        seal_chosen(segment, k, v, chosen, count)
    elif in_middle is not None and count.any():
        seal_columns(segment, k, v, in_middle)
    elif count.any():
        segment.append(np.arange(len(k)), k[:, :, columns], v[:, :, columns])


def seal_columns(prompt: Segment, k: Tensor, v: Tensor, in_middle: Tensor) -> None:
    """Store the middle of a padded prompt; rows of equal padding are stored together.

    prompt: has room for exactly these tokens
    k, v: [B, H, T, D]
    in_middle: [B, T] bool, the columns of each row's middle
    """
    alike: dict[bytes, list[int]] = {}
    patterns = in_middle.cpu().numpy()
    for row, pattern in enumerate(patterns):
        alike.setdefault(pattern.tobytes(), []).append(row)
    for rows in alike.values():
        found = np.flatnonzero(patterns[rows[0]])
        if len(found) == 0:
            continue
        first, last = int(found[0]), int(found[-1]) + 1
        at = slice(first, last) if last - first == len(found) else upload(found, k.device)
        follow = rows[-1] - rows[0] == len(rows) - 1  # views need no copy
        some = slice(rows[0], rows[-1] + 1) if follow else upload(np.array(rows), k.device)
        prompt.append(np.array(rows), k[:, :, at][some], v[:, :, at][some])


def seal_chosen(prompt: Segment, k: Tensor, v: Tensor, chosen: Tensor, count: np.ndarray) -> None:
    """Store the tokens of the middle that each head keeps.

    prompt: has room for exactly these tokens
    k, v: [B, H, T, D]
    chosen: [B, H, T] bool
    count: [B, H], how many tokens are chosen
    """
    most = int(count.max())
    columns = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)[..., :most, None]
    columns = columns.expand(-1, -1, -1, k.shape[-1])
    prompt.append(np.arange(len(k)), k.gather(2, columns), v.gather(2, columns), count)


def begin_eviction(
    policy: Eviction,
    has_middle: np.ndarray,
    position: Tensor,
    in_middle: Tensor,
    chosen: Tensor | None,
    scores: Tensor | None,
) -> Eviction:
    """The policy's state for a sealed layer.

    has_middle: [B, H], whether a head has one
    position: [B, T], the real index of each column, -1 for padding
    in_middle: [B, T] bool, the columns of the middle
    chosen: [B, H, T] bool, those that stay, None = all
    scores: [B, H, T], the attention that each token has received, None = zeros
    """
    held = upload(has_middle, position.device)[..., None] & (in_middle[:, None] if chosen is None else chosen)
    held = held | ((position >= 0) & ~in_middle)[:, None]
    count = held.sum(-1).cpu().numpy()
    scores = torch.zeros(held.shape, device=held.device) if scores is None else scores.to(held.device)
    return policy.begin(moved_up(scores, held, count), count)
