"""A round of Lethe in one launch per layer; the slow form is eval.methods.tokens.lethe.Rounds in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from leank.eval.cache.storage.kernels.choosing import among, block, keys_of, least, numbers_of, surplus
from leank.eval.cache.storage.upload import upload

# fmt: off


@triton.jit
def _sum_heads(scores, total, length_ptr, held, columns, H: tl.constexpr, BLOCK: tl.constexpr):
    """Fill total[0 : held] with the scores of a row over all heads with a middle; returns their sum, and of squares."""
    one, two = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(0, held, BLOCK):
        t = at + tl.arange(0, BLOCK)
        s = tl.zeros([BLOCK], tl.float32)
        for h in range(H):
            tokens = tl.where(tl.load(length_ptr + h) > 0, held, 0)
            s += tl.load(scores + h * columns + t, mask=t < tokens, other=0.0)
        tl.store(total + t, s, mask=t < held)
        one += s
        two += s * s
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def _breakpoint(total, held, tau, TEXT: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """The first cut point that is a breakpoint, in tokens; `held` if there is none (Eq. 4, Algorithm 1)."""
    most, found = numbers_of(least(total, held, 1, BLOCK)), held
    for d in range(1, SEGMENTS):
        cut = held * d // SEGMENTS
        if (found == held) & (cut > 0):
            bound = tau * numbers_of(least(total, held, cut + 1, BLOCK))
            fits = most >= bound if TEXT else most <= bound
            found = tl.where(fits, cut, found)
    return found


@triton.jit
def _rounds(
    scores, total, length_ptr, numbers, stay, result, columns, most, tau, limit, min_sparsity,
    H: tl.constexpr, TEXT: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program r: Algorithm 1 over one row that is due.

    scores: [B, H, columns] fp32
    total: [R, columns] fp32, scratch
    length_ptr: [B, H] int64, tokens of each head's middle
    numbers: [R, 6] int64: row, tokens held, sink, recent; where the limit bounds: recent, room between it and the sink
    stay: [B, H, most] bytes, ones before
    result: [R, 2] int64: the breakpoint, or the tokens held if there is none; how many of the middle stay
    """
    r = tl.program_id(0).to(tl.int64)
    b = tl.load(numbers + r * 6)
    held, sink = tl.load(numbers + r * 6 + 1).to(tl.int32), tl.load(numbers + r * 6 + 2).to(tl.int32)
    recent = tl.load(numbers + r * 6 + 3).to(tl.int32)
    total += r * columns
    one, two = _sum_heads(scores + b * H * columns, total, length_ptr + b * H, held, columns, H, BLOCK)
    tl.debug_barrier()  # all of it is written before any of it is read
    root = tl.sqrt(held.to(tl.float32))
    dense = (held > 1) & ((root - one / tl.sqrt(two)) / (root - 1.0) < min_sparsity) & (min_sparsity > 0)
    found = tl.where(dense, held, _breakpoint(total, held, tau, TEXT, SEGMENTS, BLOCK))

    key = least(total, held, found, BLOCK)
    leave, passed = surplus(total, held, found, key, BLOCK), tl.full([], 0, tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for at in range(0, held, BLOCK):
        t = at + tl.arange(0, BLOCK)
        there = t < held
        chosen, passed = among(keys_of(tl.load(total + t, mask=there, other=0.0)), there, key, leave, passed)
        count += ((chosen | (t < sink) | (t >= held - recent)) & there).to(tl.int32)
    over = (limit > 0) & (tl.sum(count, 0) > limit)

    # The others: between the sink and the tokens that are recent where the limit bounds.
    others = tl.maximum(held - tl.load(numbers + r * 6 + 4).to(tl.int32) - sink, 0)
    room = tl.load(numbers + r * 6 + 5).to(tl.int32)
    best = least(total + sink, others, room, BLOCK)
    spare, passed = surplus(total + sink, others, room, best, BLOCK), tl.full([], 0, tl.int32)
    middle, gone, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for h in range(H):
        middle = tl.maximum(middle, tl.load(length_ptr + b * H + h).to(tl.int32))
    for at in range(0, held, BLOCK):
        t = at + tl.arange(0, BLOCK)
        there = t < held
        rank = keys_of(tl.load(total + t, mask=there, other=0.0))
        chosen, passed = among(rank, there, key, leave, passed)
        chosen = chosen | (t < sink) | (t >= held - recent)
        between = (t >= sink) & (t < sink + others)
        bounded, before = among(rank, between, best, spare, before)
        chosen = tl.where(over & between, bounded, chosen)
        inside = (t >= sink) & (t < sink + middle)
        gone += tl.sum((inside & (chosen == 0)).to(tl.int32), 0)
        for h in range(H):
            tl.store(stay + (b * H + h) * most + (t - sink), chosen.to(tl.uint8), mask=inside)
    tl.store(result + r * 2, found.to(tl.int64))
    tl.store(result + r * 2 + 1, (middle - gone).to(tl.int64))


# fmt: on


def rounds(
    scores: Tensor, length: Tensor, numbers: np.ndarray, most: int, settings: Any
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """A round of the rows that are due; the slow form is `tokens.lethe.Rounds._round`.

    length: int64 [B, H] on the device, tokens of each head's middle, at most `most`
    numbers: [R, 6] as in `_rounds`, of the rows that are due
    Returns what stays of all rows' middles, bool [B, H, most], and on the host for the rows that are due the breakpoint
    in tokens (those held if there is none) and how many tokens of the middle stay. This waits for the device.
    """
    (batch, heads, columns), rows, device = scores.shape, len(numbers), scores.device
    stay = torch.ones(batch, heads, most, dtype=torch.bool, device=device)
    total = torch.empty(rows, columns, dtype=torch.float32, device=device)
    result = torch.empty(rows, 2, dtype=torch.int64, device=device)
    _rounds[(rows,)](
        *(scores, total, length, upload(numbers.astype(np.int64), device)),
        *(stay.view(torch.uint8), result, columns, most),
        *(settings.sparse_ratio, settings.limit, float(settings.min_sparsity)),
        H=heads,
        TEXT=settings.reading == "text",
        SEGMENTS=settings.segments,
        BLOCK=block(int(numbers[:, 1].max())),
    )
    found, stays = result.cpu().numpy().T
    return stay, found, stays
