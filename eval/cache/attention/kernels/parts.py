"""What attention kernels share: a step of an online softmax, gathered queries, sink and window, the merge of results.

Names: a tile has M rows (query token, head of the group) and T tokens; m, z and acc are the running maximum,
denominator and numerator of the softmax, base 2. A partial result is what one program knows of a (row, KV head). P is
the power of two that is at least D, because Triton's tensors have no other sizes; columns from D on are zeros.

A kernel's arguments are tuples with names, `Layer` and the like, which a launch fills once. Numbers that are known when
a kernel is compiled are in one of them, too, passed as a constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Layer(NamedTuple):
    """A compressed layer on the device."""

    base: Any  # first element of the ring's keys, from which offsets to all numbers of the layer count
    codes: Any  # the same address as a pointer to bytes, where the middle is stored in fewer bits; else base
    index: Any  # int32 [B, H, D], with the stride index_b; the numbers of each head's kept channels of K
    # int32 [B, H, D], with the stride ranks_b; the place of each channel of V among the kept, -1 = pruned; read where
    # channels of V are pruned
    ranks: Any
    seen: Any  # seen, start: int64 [B], tokens of each row, and the first token of its window
    start: Any
    tail: Any  # int64 [B, H], tokens of each head's tail
    index_b: int
    ranks_b: int
    sink: int  # sink, slots: slots of the sink, and of the window's ring
    slots: int


class Queries(NamedTuple):
    """The queries of one step."""

    q: Any  # [B, Hq, Q, D], with the strides q_b, q_h and q_t
    position: Any  # int64 [B, Q], the real index of each, -1 = padding
    q_b: int
    q_h: int
    q_t: int
    tokens: int  # Q
    scale: float  # factor of the logits, base 2


class Results(NamedTuple):
    """Where results go."""

    out: Any  # [B, Q, Hq, D]
    # partial, stat: float32 [partial results, ROWS, P] and [partial results, ROWS, 2], numerators, and (m, z)
    partial: Any
    stat: Any
    done: Any  # int32, programs that have finished each (row, KV head); zeros before and after


# fmt: off


@triton.jit
def columns(there, d, D: tl.constexpr):
    """The mask of rows that are there, bool [R], and of columns d [P] below D: [R, P], or [R, 1] if P is D."""
    mask = there[:, None]
    if d.shape[0] > D:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def ranks_of(ranks, d, D: tl.constexpr):
    """The places of channels d [P] of V among those kept, -1 where pruned and from D on."""
    return tl.load(ranks + d, mask=d < D, other=-1) if d.shape[0] > D else tl.load(ranks + d)


@triton.jit
def step(acc, m, z, s, v):
    """One tile: s [M, T] logits, v [T, columns of acc]; z [M, T] is summed over T only at the end."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - safe)
    p = tl.exp2(s - safe[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, z * alpha[:, None] + p


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """With programmatic dependent launch, wait for the previous kernel's end, then let the next one's blocks start.

    What may be read before this call no kernel writes that lets the next one start: the schedule, and the numbers of
    kept channels, for `ring.write` and `decode` write neither.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _kept_channels(index, channel, count, EVEN: tl.constexpr):
    """The numbers [C] of channels that a head keeps."""
    if EVEN:
        return tl.load(index + channel)
    return tl.load(index + channel, mask=channel < count, other=0)


@triton.jit
def _gather(q_row, ok, kept, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] with the numbers `kept`."""
    if EVEN:
        return tl.load(q_row[:, None] + kept[None, :], mask=ok[:, None], other=0.0)
    return tl.load(q_row[:, None] + kept[None, :], mask=ok[:, None] & (channel < count)[None, :], other=0.0)


@triton.jit
def gather(q_row, ok, index, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] that a head keeps."""
    return _gather(q_row, ok, _kept_channels(index, channel, count, EVEN), channel, count, EVEN)


@triton.jit
def sink_and_window(
    acc, m, z, q_row, ok, position, k, v, first, last, seen, start, slots, ring, scale, logits,
    TILE: tl.constexpr, D: tl.constexpr, WEIGHTS: tl.constexpr,
):
    """Slots [first, last) of the sink (slot = token) or the window's ring (slot = token mod slots), all channels.

    logits: [M], where the logit of token 0 would be written; used if WEIGHTS.
    """
    tile, d = tl.arange(0, TILE), tl.arange(0, triton.next_power_of_2(D))
    q = tl.load(q_row[:, None] + d[None, :], mask=columns(ok, d, D), other=0.0)
    offset = tile[:, None] * D + d[None, :]
    newest = seen - 1
    turn = tl.where(ring, newest - newest % slots, 0)  # token of the ring's slot 0, this time round
    ahead = tl.where(ring, newest % slots, last)  # slots after this one are from the time before
    for at in range(first, last, TILE):
        slot = at + tile
        token = turn + slot - tl.where(slot > ahead, slots, 0)
        there = (slot < last) & (token >= start)
        keys = tl.load(k + at * D + offset, mask=columns(there, d, D), other=0.0)
        s = tl.dot(q, tl.trans(keys)) * scale
        s = tl.where(there[None, :] & (token[None, :] <= position[:, None]), s, float("-inf"))
        if WEIGHTS:
            tl.store(logits[:, None] + token[None, :], s, mask=ok[:, None] & there[None, :])
        acc, m, z = step(acc, m, z, s, tl.load(v + at * D + offset, mask=columns(there, d, D), other=0.0))
    return acc, m, z


@triton.jit
def merge(partial, stat, first, partials, ROWS: tl.constexpr, MERGE_LINES: tl.constexpr, P: tl.constexpr):
    """Combine partial results first .. first + partials - 1 by log-sum-exp: [ROWS, P], maximum and denominator [ROWS].

    A thread has four columns of a row in every partial result, and that row's maxima and denominators, so that threads
    exchange nothing. It asks for MERGE_LINES partial results before it waits for one. What sees nothing is zero.
    """
    PLACES: tl.constexpr = ROWS * P // 4
    place = tl.arange(0, PLACES)
    partial += first * (ROWS * P) + (place * 4)[:, None] + tl.arange(0, 4)[None, :]
    stat = (stat + first * (2 * ROWS)).to(tl.pointer_type(tl.int64), bitcast=True) + place // (P // 4)
    acc = tl.zeros([PLACES, 4], tl.float32)
    m = tl.full([PLACES], float("-inf"), tl.float32)
    z = tl.zeros([PLACES], tl.float32)
    for at in range(0, partials, MERGE_LINES):
        new = m
        accs = tl.tuple([])
        pairs = tl.tuple([])
        for i in tl.static_range(MERGE_LINES):
            there = i * PLACES + place < (partials - at) * PLACES
            pairs += (tl.load(stat + i * ROWS, mask=there, other=0xFF800000, cache_modifier=".cg"),)  # -inf and 0
            accs += (tl.load(partial + i * (ROWS * P), mask=there[:, None], other=0.0, cache_modifier=".cg"),)
        for i in tl.static_range(MERGE_LINES):
            new = tl.maximum(new, pairs[i].to(tl.int32).to(tl.float32, bitcast=True))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(m - safe)
        acc, z, m = acc * alpha[:, None], z * alpha, new
        for i in tl.static_range(MERGE_LINES):
            weight = tl.exp2(pairs[i].to(tl.int32).to(tl.float32, bitcast=True) - safe)
            acc += accs[i] * weight[:, None]
            z += (pairs[i] >> 32).to(tl.int32).to(tl.float32, bitcast=True) * weight
        partial += MERGE_LINES * ROWS * P
        stat += MERGE_LINES * ROWS
    result = tl.reshape(acc / tl.where(z == 0.0, 1.0, z)[:, None], [ROWS, P])
    return result, tl.max(tl.reshape(m, [ROWS, P // 4]), 1), tl.max(tl.reshape(z, [ROWS, P // 4]), 1)


@triton.jit
def real_rows(row, position_ptr, queries, chunk, R: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr):
    """Which of the first R tile rows are of queries that are no padding, [R]."""
    r = tl.arange(0, R)
    token = chunk * (M // GROUP) + r // GROUP
    ok = (r // GROUP < M // GROUP) & (token < queries)
    return tl.load(position_ptr + row * queries + token, mask=ok, other=-1) >= 0


@triton.jit
def store_rows(
    out, result, real, row, head, queries, chunk,
    R: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):
    """Write the first R tile rows of result [R, P] to out [B, Q, Hq, D]; queries that are not `real` get zeros."""
    r, d = tl.arange(0, R), tl.arange(0, result.shape[1])
    token = chunk * (M // GROUP) + r // GROUP
    ok = (r // GROUP < M // GROUP) & (token < queries)
    to = ((row * queries + token) * (H * GROUP) + head * GROUP + r % GROUP)[:, None] * D + d[None, :]
    tl.store(out + to, tl.where(real[:, None], result, 0.0).to(out.dtype.element_ty), mask=columns(ok, d, D))
