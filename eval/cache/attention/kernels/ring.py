"""Tokens into the window's ring, and out of it into the middle: the fast forms of Store.write and Store.move.

Both count tokens on the device, so that a captured CUDA graph can be replayed. A middle in few
bits has a `move` of its own, eval.cache.attention.kernels.banded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention.kernels.parts import columns, ranks_of

# fmt: off


@triton.jit
def write(
    k, v, ring_k, ring_v, seen_ptr, position, k_b, k_h, k_t, v_b, v_h, v_t, new, slots, center,
    H: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, CENTER: tl.constexpr, PDL: tl.constexpr,
):
    """Program b: put row b's `new` tokens, k and v [B, H, new, D] by strides, into the ring; count them in seen.

    center: [H, D] float32, what keys lose, read if CENTER
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, PADDED)[:, None], tl.arange(0, triton.next_power_of_2(D))[None, :]
    there = h < H
    if d.shape[1] > D:
        there = there & (d < D)
    seen = tl.load(seen_ptr + b)
    tl.debug_barrier()  # every thread has read it before one of them changes it
    for t in range(new):
        to = ((b * H + h) * slots + (seen + t) % slots) * D + d
        key = tl.load(k + b * k_b + h * k_h + t * k_t + d, mask=there)
        if CENTER:
            key = (key.to(tl.float32) - tl.load(center + h * D + d, mask=there)).to(ring_k.dtype.element_ty)
        tl.store(ring_k + to, key, mask=there)
        tl.store(ring_v + to, tl.load(v + b * v_b + h * v_h + t * v_t + d, mask=there), mask=there)
        tl.store(position + b * new + t, seen + t)
    tl.store(seen_ptr + b, seen + new)


@triton.jit
def move(
    ring_k, ring_v, k, v, index, ranks, places, seen_ptr, start_ptr, length_ptr, done,
    index_b, ranks_b, slots, window, flush,
    H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr,
):
    """Program (b, h): put the tokens due of row b's window, a multiple of `flush`, behind those that head h holds.

    The last program of a row moves the row's start.
    places: [B, H, 4], where the head's K and V begin in k and v, and the channels of both, 0 of K = takes no tokens
    ranks: [B, H, D], by a stride; the place of each channel of V among the kept, read unless VALUES is 0
    done: [>= B] int32, zeros before and after
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(start_ptr + b)
    due = tl.maximum(tl.load(seen_ptr + b) - start - window, 0) // flush * flush
    if due > 0:
        head = b * H + h
        place = places + head * 4
        k += tl.multiple_of(tl.load(place), PAGE)
        v += tl.multiple_of(tl.load(place + 1), PAGE)
        count = tl.load(place + 2).to(tl.int32)
        P: tl.constexpr = triton.next_power_of_2(D)
        d = tl.arange(0, P)
        if count > 0:
            length = tl.load(length_ptr + head)
            # keys in one line, first token by token, then channel by channel: neighbouring threads read and write
            # neighbouring numbers, whatever layout Triton chooses
            each = tl.arange(0, P * TILE)
            channel = tl.load(index + b * index_b + h * D + each % P, mask=each % P < count, other=0)
            ring_k += head * slots * D
            ring_v += head * slots * D
            oldest, amount, held = (start % slots).to(tl.int32), due.to(tl.int32), length.to(tl.int32)
            for at in range(0, amount, TILE):
                t = at + tl.arange(0, TILE)
                ok = t < amount
                source = (oldest + t) % slots * D
                of_each = (oldest + at + each // P) % slots * D
                keys = tl.load(ring_k + (of_each + channel), mask=(at + each // P < amount) & (each % P < count))
                values = tl.load(ring_v + (source[:, None] + d[None, :]), mask=columns(ok, d, D))
                to, here = held + t, held + at + each % TILE
                line = here // PAGE * (count * PAGE) + here % PAGE
                turned = tl.reshape(tl.trans(tl.reshape(keys, [TILE, P])), [P * TILE])
                there = (each // TILE < count) & (at + each % TILE < amount)
                tl.store(k + (line + each // TILE * PAGE), turned, mask=there)
                if VALUES == 0:
                    tl.store(v + (to[:, None] * D + d[None, :]), values, mask=columns(ok, d, D))
                else:
                    rank = ranks_of(ranks + b * ranks_b + h * D, d, D)
                    at_v = to // PAGE * (tl.load(place + 3).to(tl.int32) * PAGE) + to % PAGE
                    chosen = (rank >= 0)[:, None] & ok[None, :]
                    tl.store(v + (at_v[None, :] + rank[:, None] * PAGE), tl.trans(values), mask=chosen)
            tl.debug_barrier()  # every thread has read the length before one of them changes it
            tl.store(length_ptr + head, length + due)
        tl.debug_barrier()  # and the start
        if tl.atomic_add(done + b, 1, sem="acq_rel") == H - 1:
            tl.store(start_ptr + b, start + due)
            tl.store(done + b, 0)
