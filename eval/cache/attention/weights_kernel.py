"""Eviction on the GPU: attention weights added to scores after a decoding step, and tokens that leave the middle.

The decode kernel leaves its logits and each query row's log-sum-exp in scratch memory. Reading K again instead would
cost the 256 bytes of a token's key; its logits are 4 bytes per query head, written once and read once.

scratch: int64 [1], the address of the scratch memory: log-sum-exp [B * H, ROWS], logits [B * H, ROWS, columns], float32
room: int64 [2], the address of the scores [B * H, columns], float32, and columns

Both are read on the device, so that a captured step follows when the memory behind them is replaced. Tokens are in the
order of the scores (eval.cache.storage.eviction): sink, middle, window. Logits and log-sum-exp are base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit
def logits_of(scratch, room, seen_ptr, start_ptr, tail_ptr, b, place, places, r, sink, behind, in_window,
              ROWS: tl.constexpr, WEIGHTS: tl.constexpr):
    """Where the decode kernel puts the logits of token 0 of a part, for query rows r [M]; used if WEIGHTS.

    behind, in_window: whether the part is behind the sink, and whether it is the window
    """
    at = scratch + r
    if WEIGHTS:
        at = tl.load(scratch).to(tl.pointer_type(tl.float32)) + places * ROWS + (place * ROWS + r) * tl.load(room + 1)
        if behind:
            at += tl.minimum(tl.load(seen_ptr + b), sink)
        if in_window:
            at += tl.load(tail_ptr + place) - tl.load(start_ptr + b)
    return at


@triton.jit
def store_lse(scratch, at, m, z, ok, WEIGHTS: tl.constexpr):
    """Write the log-sum-exp of query rows, if WEIGHTS; inf where nothing was seen, so that weights are zero."""
    if WEIGHTS:
        total = tl.where(z == 0.0, float("inf"), m + tl.log2(tl.where(z == 0.0, 1.0, z)))
        tl.store(tl.load(scratch).to(tl.pointer_type(tl.float32)) + at, total, mask=ok)


@triton.jit
def _held(seen_ptr, start_ptr, tail_ptr, b, place, sink):
    """Tokens of the sink, the middle and the window of one head."""
    seen, start = tl.load(seen_ptr + b), tl.load(start_ptr + b)
    ends = tl.minimum(seen, sink), tl.maximum(seen - start, 0)
    return ends[0].to(tl.int32), tl.load(tail_ptr + place).to(tl.int32), ends[1].to(tl.int32)


@triton.jit(do_not_specialize=["places"])
def add_weights(
    scratch, room, position_ptr, seen_ptr, start_ptr, tail_ptr, decay, queries, sink, places,
    H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program (place, i): scores = decay * scores + weights summed over query rows, for every n-th block of tokens.

    place: b * H + h; places = B * H
    position_ptr: [B, queries], -1 = padding; a row of padding alone does not decay
    """
    place = tl.program_id(0).to(tl.int64)
    b = place // H
    columns = tl.load(room + 1)
    scores = tl.load(room).to(tl.pointer_type(tl.float32)) + place * columns
    lse = tl.load(scratch).to(tl.pointer_type(tl.float32))
    logits = lse + places * ROWS + place * ROWS * columns
    first, middle, last = _held(seen_ptr, start_ptr, tail_ptr, b, place, sink)
    tokens = first + middle + last
    r = tl.arange(0, ROWS)
    used = r < GROUP * queries
    position = tl.load(position_ptr + b * queries + r // GROUP, mask=used, other=-1)
    decay = tl.where(tl.max(position, 0) >= 0, decay, 1.0)
    used = used & (position >= 0)
    total = tl.load(lse + place * ROWS + r, mask=used, other=float("inf"))
    for at in range(tl.program_id(1) * BLOCK, tokens, tl.num_programs(1) * BLOCK):
        t = at + tl.arange(0, BLOCK)
        there = t < tokens
        at_row = logits + r[:, None] * columns + t[None, :]
        s = tl.load(at_row, mask=used[:, None] & there[None, :], other=float("-inf"))
        weight = tl.sum(tl.exp2(s - total[:, None]), 0)
        tl.store(scores + t, tl.load(scores + t, mask=there, other=0.0) * decay + weight, mask=there)


@triton.jit
def _stay(stay, at, tokens, kept, TILE: tl.constexpr):
    """Of the tokens [at, at + TILE): which stay, and where they go; how many have stayed by then."""
    t = at + tl.arange(0, TILE)
    chosen = (tl.load(stay + t, mask=t < tokens, other=0) != 0) & (t < tokens)
    number = chosen.to(tl.int32)
    return chosen, kept + tl.cumsum(number, 0) - number, kept + tl.sum(number, 0)


@triton.jit
def _compact_keys(k, new_k, stay, tokens, count, whole, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Keys [page, count, PAGE] of the tokens that stay, moved up; returns their number.

    whole: whether tiles of which nothing has moved must be copied, too
    """
    d, kept = tl.arange(0, D)[:, None], tl.full([], 0, tl.int32)
    for at in range(0, tokens, TILE):
        chosen, to, after = _stay(stay, at, tokens, kept, TILE)
        if whole | (after < at + TILE):
            t = at + tl.arange(0, TILE)
            there = chosen[None, :] & (d < count)
            x = tl.load(k + ((t // PAGE) * (count * PAGE) + t % PAGE)[None, :] + d * PAGE, mask=there)
            tl.debug_barrier()  # all of it is read before any of it is overwritten
            tl.store(new_k + ((to // PAGE) * (count * PAGE) + to % PAGE)[None, :] + d * PAGE, x, mask=there)
        kept = after
    return kept


@triton.jit
def _compact_values(v, new_v, stay, tokens, whole, D: tl.constexpr, TILE: tl.constexpr):
    """Values [token, D] of the tokens that stay, moved up; returns their number."""
    d, kept = tl.arange(0, D)[None, :], tl.full([], 0, tl.int32)
    for at in range(0, tokens, TILE):
        chosen, to, after = _stay(stay, at, tokens, kept, TILE)
        if whole | (after < at + TILE):
            t = at + tl.arange(0, TILE)
            x = tl.load(v + (t[:, None] * D + d), mask=chosen[:, None])
            tl.debug_barrier()
            tl.store(new_v + (to[:, None] * D + d), x, mask=chosen[:, None])
        kept = after
    return kept


@triton.jit
def _compact_scores(scores, stay, tokens, window, TILE: tl.constexpr):
    """Scores of the middle's tokens that stay and of the window, moved up, then zeros; returns the former's number."""
    kept = tl.full([], 0, tl.int32)
    for at in range(0, tokens, TILE):
        chosen, to, after = _stay(stay, at, tokens, kept, TILE)
        x = tl.load(scores + at + tl.arange(0, TILE), mask=chosen)
        tl.debug_barrier()
        tl.store(scores + to, x, mask=chosen)
        kept = after
    tl.debug_barrier()
    for at in range(0, window, TILE):
        t = at + tl.arange(0, TILE)
        x = tl.load(scores + tokens + t, mask=t < window)
        tl.debug_barrier()
        tl.store(scores + kept + t, x, mask=t < window)
    tl.debug_barrier()
    for at in range(kept + window, tokens + window, TILE):
        t = at + tl.arange(0, TILE)
        tl.store(scores + t, tl.zeros([TILE], tl.float32), mask=t < tokens + window)
    return kept


@triton.jit(do_not_specialize=["whole"])
def compact(
    k, v, new_k, new_v, places, new_places, stay, room, seen_ptr, start_ptr, length_ptr, done, most, sink, whole,
    H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
):
    """Program (place, part): drop tokens of a head's middle from its keys, its values or its scores.

    The last of the three writes the head's new length.

    k, v, places; new_k, new_v, new_places: the tail (`Segment`) before and after, which may be one and the same
    stay: [B, H, most] bytes, 0 = leaves
    done: [>= B * H] int32, zeros before and after
    whole: 1 if the tail after is another one, else 0
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, tokens, window = _held(seen_ptr, start_ptr, length_ptr, place // H, place, sink)
    stay += place * most
    count = tl.load(places + place * 4 + 2).to(tl.int32)
    kept = tl.full([], 0, tl.int32)
    if part == 0:
        k += tl.multiple_of(tl.load(places + place * 4), PAGE)
        new_k += tl.multiple_of(tl.load(new_places + place * 4), PAGE)
        kept = _compact_keys(k, new_k, stay, tokens, count, whole != 0, D, TILE, PAGE)
    elif part == 1:
        v += tl.multiple_of(tl.load(places + place * 4 + 1), PAGE)
        new_v += tl.multiple_of(tl.load(new_places + place * 4 + 1), PAGE)
        kept = _compact_values(v, new_v, stay, tokens, whole != 0, D, TILE)
    else:
        scores = tl.load(room).to(tl.pointer_type(tl.float32)) + place * tl.load(room + 1) + first
        kept = _compact_scores(scores, stay, tokens, window, TILE)
    tl.debug_barrier()  # every thread has read the length before the last program changes it
    if tl.atomic_add(done + place, 1, sem="acq_rel") == 2:
        tl.store(length_ptr + place, kept.to(tl.int64))
        tl.store(done + place, 0)
