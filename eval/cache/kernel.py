"""Decode attention over a sealed layer in one Triton launch: the fast path beside `reference.attend`.

Every program walks its span of the work table (eval.cache.work), keeping an online softmax per (row, KV head); query channels are
gathered here, so the model's weights stay as they are. The last program to finish a (row, head) merges the partial results by
log-sum-exp, so there is no second launch. Lengths are read from device tensors: between two moves out of the window a captured CUDA
graph stays valid.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _step(acc, m, l, s, v):
    """One tile of the online softmax (base 2): s [M, T] logits, v [T, D]."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - safe)
    p = tl.exp2(s - safe[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _gather(q_row, ok, index, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] that a head keeps."""
    if EVEN:
        return tl.load(q_row[:, None] + tl.load(index + channel)[None, :], mask=ok[:, None], other=0.0)
    chosen = channel < count
    picked = tl.load(index + channel, mask=chosen, other=0)
    return tl.load(q_row[:, None] + picked[None, :], mask=ok[:, None] & chosen[None, :], other=0.0)


@triton.jit
def _keys(k, channel, count, token, EVEN: tl.constexpr, PAGE: tl.constexpr):
    """K tile [C, T] of a page-wise stored head."""
    at = channel[:, None] * PAGE + ((token // PAGE) * (count * PAGE) + token % PAGE)[None, :]
    if EVEN:
        return tl.load(k + at)
    return tl.load(k + at, mask=(channel < count)[:, None], other=0.0)


@triton.jit
def _middle(
    acc, m, l, q_row, ok, index, k, v, first, last, count, scale,
    C0: tl.constexpr, C1: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Tokens [first, last) of a middle part with up to C0 + C1 channels; whole tiles without masks, then the rest."""
    token, d = tl.arange(0, TILE), tl.arange(0, D)
    c0 = tl.arange(0, C0)
    q0 = _gather(q_row, ok, index, c0, count, EVEN)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        q1 = _gather(q_row, ok, index, c1, count, EVEN)
    v_at = token[:, None] * D + d[None, :]
    whole = first + (last - first) // TILE * TILE
    for at in range(first, whole, TILE):
        page = k + tl.multiple_of((at // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, EVEN, PAGE), s)
        acc, m, l = _step(acc, m, l, s * scale, tl.load(v + tl.multiple_of(at * D, PAGE) + v_at))
    if whole < last:
        there = token < last - whole
        paged = tl.where(token // PAGE * PAGE < last - whole, token, 0)  # a tile may reach past the last page
        page = k + tl.multiple_of((whole // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, paged, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, paged, EVEN, PAGE), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        rest = tl.load(v + tl.multiple_of(whole * D, PAGE) + v_at, mask=there[:, None], other=0.0)
        acc, m, l = _step(acc, m, l, s, rest)
    return acc, m, l


@triton.jit
def _ends(
    acc, m, l, q_row, ok, position, k, v, first, last, seen, start, slots, ring, scale,
    TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Slots [first, last) of the sink (slot = token) or the window's ring (slot = token mod slots), all channels."""
    tile, d = tl.arange(0, TILE), tl.arange(0, D)
    q = tl.load(q_row[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    offset = tile[:, None] * D + d[None, :]
    for at in range(first, last, TILE):
        slot = at + tile
        newest = seen - 1
        token = tl.where(ring, newest - (newest + slots - slot) % slots, slot)
        there = (slot < last) & (token >= start)
        keys = tl.load(k + at * D + offset, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(keys)) * scale
        s = tl.where(there[None, :] & (token[None, :] <= position[:, None]), s, float("-inf"))
        acc, m, l = _step(acc, m, l, s, tl.load(v + at * D + offset, mask=there[:, None], other=0.0))
    return acc, m, l


@triton.jit
def _merge(part, stat, first, parts, ROWS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr):
    """Combine partial results first .. first + parts - 1 by log-sum-exp: [ROWS, D], zero where nothing was seen."""
    r, p, d = tl.arange(0, ROWS), tl.arange(0, PARTS), tl.arange(0, D)
    total = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for at in range(0, parts, PARTS):
        line = ((first + at + p) * ROWS)[None, :] + r[:, None]  # [ROWS, PARTS]
        there = (at + p < parts)[None, :] & (r[:, None] >= 0)
        m_part = tl.load(stat + 2 * line, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_part = tl.load(stat + 2 * line + 1, mask=there, other=0.0, cache_modifier=".cg")
        at_part = line[:, :, None] * D + d[None, None, :]
        acc_part = tl.load(part + at_part, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_part, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m - safe), tl.exp2(m_part - safe[:, None])
        total = total * alpha[:, None] + tl.sum(acc_part * weight[:, :, None], 1)
        l = l * alpha + tl.sum(l_part * weight, 1)
        m = m_new
    return total / tl.where(l == 0.0, 1.0, l)[:, None]


@triton.jit
def decode(
    base, q, out, index, table, seen_ptr, start_ptr, tail_ptr, position_ptr, part, stat, done,
    scale, q_b, q_h, q_t, index_b, queries, partials, places, slots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (p, c): span p of the work table for the query tokens of chunk c.

    base: first element of the ring's keys; table [lines, FIELDS]; q [B, Hq, Q, D] by strides; out [B, Q, Hq, D]; part
    [chunks, partials, ROWS, D] and stat [chunks, partials, ROWS, 2] fp32 partial results; done [chunks, B, H] int32 zeros, zeros again
    afterwards. A tile row is (query token, head of the group).
    """
    chunk = tl.program_id(1)
    PER: tl.constexpr = M // GROUP  # query tokens of a chunk
    r = tl.arange(0, M)
    t = chunk * PER + r // GROUP
    ok = (r // GROUP < PER) & (t < queries)
    d = tl.arange(0, D)
    part += chunk.to(tl.int64) * partials * ROWS * D
    stat += chunk.to(tl.int64) * partials * ROWS * 2
    done += chunk * places
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    line = tl.program_id(0).to(tl.int64)
    if tl.load(table + line * FIELDS) < 0:
        line = line * 0 - 1
    while line >= 0:
        entry = table + line * FIELDS
        kind, row, head = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first, last = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
        k = base + tl.multiple_of(tl.load(entry + 5), PAGE)
        v = base + tl.multiple_of(tl.load(entry + 6), PAGE)
        count = tl.load(entry + 7).to(tl.int32)
        fresh, parts, number, first_number = tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10), tl.load(entry + 11)
        line = tl.load(entry + 12)
        first = tl.multiple_of(first, PAGE)

        q_row = q + row * q_b + (head * GROUP + r % GROUP) * q_h + t * q_t
        position = tl.load(position_ptr + row * queries + t, mask=ok, other=-1).to(tl.int32)
        m = tl.where(fresh != 0, float("-inf"), m)
        l = tl.where(fresh != 0, 0.0, l)
        acc = tl.where(fresh != 0, 0.0, acc)
        if kind <= 1:
            seen = tl.load(seen_ptr + row).to(tl.int32)
            start = tl.load(start_ptr + row).to(tl.int32)
            ring = kind == 1
            limit = tl.minimum(last, seen)
            acc, m, l = _ends(
                acc, m, l, q_row, ok, position, k, v, first, limit, seen, tl.where(ring, start, 0), slots, ring, scale,
                TILE, D,
            )  # fmt: skip
        else:
            kept = index + row * index_b + head * D
            if kind == 3:
                last = tl.minimum(last, tl.load(tail_ptr + row * HEADS + head).to(tl.int32))
            if count <= 32:
                acc, m, l = _middle(
                    acc, m, l, q_row, ok, kept, k, v, first, last, count, scale, 32, 0, EVEN, TILE, D, PAGE
                )
            elif count <= 64:
                acc, m, l = _middle(
                    acc, m, l, q_row, ok, kept, k, v, first, last, count, scale, 64, 0, EVEN, TILE, D, PAGE
                )
            elif D > 64:
                if count <= 96:
                    acc, m, l = _middle(
                        acc, m, l, q_row, ok, kept, k, v, first, last, count, scale, 64, 32, EVEN, TILE, D, PAGE
                    )
                else:
                    acc, m, l = _middle(
                        acc, m, l, q_row, ok, kept, k, v, first, last, count, scale, 128, 0, EVEN, TILE, D, PAGE
                    )

        if parts > 0:
            to = out + ((row * queries + t) * (HEADS * GROUP) + head * GROUP + r % GROUP)[:, None] * D + d[None, :]
            if parts == 1:
                result = tl.where((position < 0)[:, None], 0.0, acc / tl.where(l == 0.0, 1.0, l)[:, None])
                tl.store(to, result.to(out.dtype.element_ty), mask=ok[:, None])
            else:
                at = number * ROWS + r
                tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
                tl.store(stat + 2 * at, m, mask=ok)
                tl.store(stat + 2 * at + 1, l, mask=ok)
                tl.debug_barrier()
                ticket = done + row * HEADS + head
                if tl.atomic_add(ticket, 1, sem="acq_rel") == parts - 1:
                    merged = _merge(part, stat, first_number, parts, ROWS, PARTS, D)
                    mr = tl.arange(0, ROWS)
                    mt = chunk * PER + mr // GROUP
                    m_ok = (mr // GROUP < PER) & (mt < queries)
                    real = tl.load(position_ptr + row * queries + mt, mask=m_ok, other=-1) >= 0
                    to = out + ((row * queries + mt) * (HEADS * GROUP) + head * GROUP + mr % GROUP)[:, None] * D + d[None, :]
                    tl.store(to, tl.where(real[:, None], merged, 0.0).to(out.dtype.element_ty), mask=m_ok[:, None])
                    tl.store(ticket, 0)
