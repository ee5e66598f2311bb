"""Scores of the middle's pages or tokens, and the bounds of pages; eval.cache.attention.choice_kernel chooses by them.

Every launch reads lengths and addresses on the device, so that a captured CUDA graph can be replayed while the middle
grows. A program takes one KV head of one row (X of them) and a share of its pages or tokens. Names as in
eval.cache.attention.kernel; keys lie token by token.

table: [X, FIELDS] int64, with the columns of places.Column
base, words: first element of the ring's keys, as a pointer to the cache's numbers and to float32
tail_ptr: [X] int64, tokens of each head's tail
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import places
from leank.eval.cache.attention.kernel_middle import gather

FIELDS = tl.constexpr(places.FIELDS)
PROMPT_K, TAIL_K = tl.constexpr(int(places.Column.PROMPT_K)), tl.constexpr(int(places.Column.TAIL_K))
PROMPT, CHANNELS = tl.constexpr(int(places.Column.PROMPT)), tl.constexpr(int(places.Column.CHANNELS))
LABELS, BOUNDS = tl.constexpr(int(places.Column.LABELS)), tl.constexpr(int(places.Column.BOUNDS))
SCORES, STRIDE = tl.constexpr(int(places.Column.SCORES)), tl.constexpr(int(places.Column.STRIDE))
BEST, BEST_STRIDE = tl.constexpr(int(places.Column.BEST)), tl.constexpr(int(places.Column.BEST_STRIDE))

# fmt: off


@triton.jit
def line(token, prompt, prompt_at, tail_at, width, STEP: tl.constexpr):
    """Where a middle token's line of `width` numbers begins: the prompt's tokens first, then the tail's.

    STEP: divides every line's beginning
    """
    at = tl.where(token < prompt, prompt_at + token.to(tl.int64) * width,
                  tail_at + (token - prompt).to(tl.int64) * width)
    return tl.multiple_of(at, STEP)


@triton.jit
def held(entry, tail_ptr, x):
    """Tokens of the prompt's part of a head's middle, and of all of it."""
    prompt = tl.load(entry + PROMPT).to(tl.int32)
    return prompt, prompt + tl.load(tail_ptr + x).to(tl.int32)


@triton.jit
def _share(total, TILE: tl.constexpr):
    """First and last of this program's share of `total`, in whole tiles but for the last."""
    size = tl.cdiv(tl.cdiv(total, tl.num_programs(1)), TILE) * TILE
    first = tl.minimum(tl.program_id(1) * size, total)
    return first, tl.minimum(first + size, total)


@triton.jit(do_not_specialize=["fresh"])
def bound(base, table, tail_ptr, fresh, D: tl.constexpr, PER: tl.constexpr, CHUNK: tl.constexpr):
    """Smallest and largest key of the pages that hold the last `fresh` tokens of a head's middle."""
    x = tl.program_id(0).to(tl.int64)
    entry = table + x * FIELDS
    prompt, tokens = held(entry, tail_ptr, x)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    count = tl.load(entry + CHANNELS).to(tl.int32)
    c = tl.arange(0, D)
    kept = c < count
    first = tl.maximum(tokens - fresh, 0) // PER
    for page in range(first + tl.program_id(1), tl.cdiv(tokens, PER), tl.num_programs(1)):
        low = tl.full([D], float("inf"), tl.float32)
        high = tl.full([D], float("-inf"), tl.float32)
        end = tl.minimum((page + 1) * PER, tokens)
        for at in range(page * PER, end, CHUNK):
            token = at + tl.arange(0, CHUNK)
            there = (token < end)[:, None]
            k = base + line(token, prompt, prompt_k, tail_k, count, 1)[:, None] + c[None, :]
            keys = tl.load(k, mask=there & kept[None, :], other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(there, keys, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there, keys, float("-inf")), 0))
        to = base + tl.load(entry + BOUNDS) + page * (2 * count).to(tl.int64) + c
        tl.store(to, low.to(base.dtype.element_ty), mask=kept)
        tl.store(to + count, high.to(base.dtype.element_ty), mask=kept)


@triton.jit
def score_pages(
    base, words, q, index, table, tail_ptr, q_b, q_h, index_b,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PER: tl.constexpr,
    STEP: tl.constexpr,
):
    """Quest's bound of every page and query head: sum over channels c of max(q_c min_c, q_c max_c).

    q: [B, Hq, 1, D], by strides
    STEP: divides every channel count
    """
    x = tl.program_id(0).to(tl.int64)
    row, head, entry = x // H, x % H, table + x * FIELDS
    _, tokens = held(entry, tail_ptr, x)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    r, c = tl.arange(0, M), tl.arange(0, D)
    ok, kept = r < GROUP, c < count
    q_row = q + row * q_b + (head * GROUP + r) * q_h
    picked = gather(q_row, ok, index + row * index_b + head * D, c, count, False)
    zero = tl.zeros_like(picked)
    up, down = tl.where(picked > 0, picked, zero), tl.where(picked < 0, picked, zero)
    bounds = base + tl.multiple_of(tl.load(entry + BOUNDS), STEP)
    scores = words + tl.load(entry + SCORES) + r * tl.load(entry + STRIDE)
    first, last = _share(tl.cdiv(tokens, PER), TILE)
    for at in range(first, last, TILE):
        page = at + tl.arange(0, TILE)
        there = page < last
        low = bounds + (page.to(tl.int64) * (2 * count))[:, None] + c[None, :]
        mask = there[:, None] & kept[None, :]
        s = tl.dot(up, tl.trans(tl.load(low + count, mask=mask, other=0.0)))
        s = tl.dot(down, tl.trans(tl.load(low, mask=mask, other=0.0)), s)
        tl.store(scores[:, None] + page[None, :], s, mask=ok[:, None] & there[None, :])


@triton.jit
def _rounded(k, kept, BITS: tl.constexpr):
    """Labels [T, C] rounded to BITS with a scale and a zero point per token, over the channels kept."""
    low = tl.min(tl.where(kept[None, :], k, float("inf")), 1)[:, None]
    high = tl.max(tl.where(kept[None, :], k, float("-inf")), 1)[:, None]
    scale = tl.div_rn(high - low, tl.full([k.shape[0], 1], 2**BITS - 1, tl.float32))
    code = tl.div_rn(k - low, tl.where(scale > 0, scale, 1.0))
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: what float32 adds there is rounded to even
    return tl.where(kept[None, :], code * scale + low, 0.0)


@triton.jit
def score_tokens(
    base, words, q, index, table, tail_ptr, q_b, q_h, index_b,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
    C: tl.constexpr, STEP: tl.constexpr, LABEL_STEP: tl.constexpr, BITS: tl.constexpr,
):
    """Product over the label channels of every token and query head, and the best of each RUN tokens.

    q: [B, Hq, 1, D], by strides
    C: at least the label channels of any head. STEP: as in `score_pages`
    LABEL_STEP: divides the channels that are read as labels, which are more than the labels if these are no multiple of
        it; it divides every channel count, too
    """
    x = tl.program_id(0).to(tl.int64)
    row, head, entry = x // H, x % H, table + x * FIELDS
    prompt, tokens = held(entry, tail_ptr, x)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    labels = tl.load(entry + LABELS).to(tl.int32)
    near = tl.multiple_of(tl.cdiv(labels, LABEL_STEP) * LABEL_STEP, LABEL_STEP)
    r, c = tl.arange(0, M), tl.arange(0, C)
    ok, kept = r < GROUP, c < labels
    q_row = q + row * q_b + (head * GROUP + r) * q_h
    picked = gather(q_row, ok, index + row * index_b + head * D, c, labels, False)
    scores = words + tl.load(entry + SCORES) + r * tl.load(entry + STRIDE)
    best = words + tl.load(entry + BEST) + r * tl.load(entry + BEST_STRIDE)
    first, last = _share(tokens, TILE)
    for at in range(first, last, TILE):
        token = at + tl.arange(0, TILE)
        there = token < last
        k = base + line(token, prompt, prompt_k, tail_k, count, STEP)[:, None] + c[None, :]
        keys = tl.load(k, mask=there[:, None] & (c < near)[None, :], other=0.0)
        if LABEL_STEP == 8:
            keys = tl.where(kept[None, :], keys, 0.0)
        if BITS < 16:
            s = tl.dot(picked.to(tl.float32), tl.trans(_rounded(keys.to(tl.float32), kept, BITS)),
                       input_precision="ieee")
        else:
            s = tl.dot(picked, tl.trans(keys))
        s = tl.where(there[None, :], s, float("-inf"))
        tl.store(scores[:, None] + token[None, :], s, mask=ok[:, None] & there[None, :])
        run = at // RUN + tl.arange(0, TILE // RUN)
        of_run = tl.max(tl.reshape(s, [M, TILE // RUN, RUN]), 2)
        tl.store(best[:, None] + run[None, :], of_run, mask=ok[:, None] & (run * RUN < last)[None, :])
