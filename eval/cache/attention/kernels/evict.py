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
              ROWS: tl.constexpr):
    """Where the decode kernel puts the logits of token 0 of a part, for query rows r [M].

    behind, in_window: whether the part is behind the sink, and whether it is the window
    """
    at = tl.load(scratch).to(tl.pointer_type(tl.float32)) + places * ROWS + (place * ROWS + r) * tl.load(room + 1)
    if behind:
        at += tl.minimum(tl.load(seen_ptr + b), sink)
    if in_window:
        at += tl.load(tail_ptr + place) - tl.load(start_ptr + b)
    return at


@triton.jit
def store_lse(scratch, at, m, z, ok):
    """Write the log-sum-exp of query rows; inf where nothing was seen, so that weights are zero."""
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
def drop(
    stay, source, room, seen_ptr, start_ptr, length_ptr, most, sink,
    H: tl.constexpr, TILE: tl.constexpr,
):
    """Program place: list the tokens of a head's middle that stay, move their scores up, and write its new length.

    stay: [B, H, most] bytes, 0 = leaves
    source: [B, H, most] int32, filled with the places of the tokens that stay, in order
    """
    place = tl.program_id(0).to(tl.int64)
    first, tokens, window = _held(seen_ptr, start_ptr, length_ptr, place // H, place, sink)
    scores = tl.load(room).to(tl.pointer_type(tl.float32)) + place * tl.load(room + 1) + first
    stay += place * most
    source += place * most
    kept = tl.full([], 0, tl.int32)
    for at in range(0, tokens, TILE):
        t = at + tl.arange(0, TILE)
        number = ((tl.load(stay + t, mask=t < tokens, other=0) != 0) & (t < tokens)).to(tl.int32)
        to = kept + tl.cumsum(number, 0) - number
        x = tl.load(scores + t, mask=number != 0)
        tl.debug_barrier()  # all of it is read before any of it is overwritten
        tl.store(scores + to, x, mask=number != 0)
        tl.store(source + to, t, mask=number != 0)
        kept += tl.sum(number, 0)
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
    tl.store(length_ptr + place, kept.to(tl.int64))


@triton.jit
def _move_keys(k, new_k, source, kept, count, whole, first, SLICE: tl.constexpr, PAGE: tl.constexpr):
    """Move SLICE channels, from `first` on, of the keys of listed tokens."""
    t, each = tl.arange(0, PAGE), tl.arange(0, SLICE * PAGE)
    there = first + each // PAGE < count
    for at in range(0, tl.where(first < count, kept, 0), PAGE):
        moved = tl.max(tl.load(source + at + t, mask=at + t < kept, other=0) - at - t, 0) > 0
        if moved | (whole != 0):
            # in one line, in which neighbouring threads have neighbouring tokens, whatever layout Triton chooses
            found = tl.load(source + at + each % PAGE, mask=at + each % PAGE < kept, other=0)
            line = (found // PAGE) * (count * PAGE) + found % PAGE
            x = tl.load(k + (first * PAGE + each // PAGE * PAGE + line), mask=there)
            tl.debug_barrier()  # all of it is read before any of it is overwritten
            tl.store(new_k + (at * count + first * PAGE + each), x, mask=there)


@triton.jit
def _move_values(v, new_v, source, kept, whole, first, D: tl.constexpr, SLICE: tl.constexpr, PAGE: tl.constexpr):
    """Move SLICE channels, from `first` on, of the values of listed tokens."""
    t, d = tl.arange(0, PAGE), first + tl.arange(0, SLICE)
    for at in range(0, kept, PAGE):
        found = tl.load(source + at + t, mask=at + t < kept, other=0)
        if (tl.max(found - at - t, 0) > 0) | (whole != 0):
            x = tl.load(v + (found[:, None] * D + d[None, :]))
            tl.debug_barrier()
            tl.store(new_v + ((at + t)[:, None] * D + d[None, :]), x)


@triton.jit(do_not_specialize=["whole"])
def compact(
    k, v, new_k, new_v, places, new_places, source, length_ptr, most, whole,
    D: tl.constexpr, SLICE: tl.constexpr, PAGE: tl.constexpr,
):
    """Program (place, part): move the tokens of a head's middle up that `drop` has listed.

    Each part is SLICE channels, of K first, then of V. Tokens only move towards the front, so that a page can be
    written as soon as all of it has been read: those after it come from places behind. Whole pages are written; what
    they hold past the last token is any token.

    k, v, places; new_k, new_v, new_places: the tail (`Segment`) before and after, which may be one and the same
    source: from `drop`
    length_ptr: [B, H], tokens that stay
    whole: 1 if the tail after is another one, so that tokens that do not move are copied, too; else 0
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kept = tl.load(length_ptr + place).to(tl.int32)
    source += place * most
    first = tl.multiple_of((part * SLICE) % D, SLICE)
    if part < D // SLICE:
        k += tl.multiple_of(tl.load(places + place * 4), PAGE)
        new_k += tl.multiple_of(tl.load(new_places + place * 4), PAGE)
        count = tl.load(places + place * 4 + 2).to(tl.int32)
        _move_keys(k, new_k, source, kept, count, whole, first, SLICE, PAGE)
    else:
        v += tl.multiple_of(tl.load(places + place * 4 + 1), PAGE)
        new_v += tl.multiple_of(tl.load(new_places + place * 4 + 1), PAGE)
        _move_values(v, new_v, source, kept, whole, first, D, SLICE, PAGE)
