"""All K and V that chunks of prompts see, in one Triton launch: their past out of pages, and the chunks themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.serving.kernels.paged import stripe_of, window_from

# fmt: off


@triton.jit
def _lines(pages, page, table, position, real, start, width, BLOCK: tl.constexpr):
    """Pointers [T] to the first column of a stripe, for tokens at these positions of one request."""
    number = tl.load(table + position // BLOCK, mask=real, other=0).to(tl.int64)
    return pages + number * page + BLOCK * start + position % BLOCK * width


@triton.jit(do_not_specialize=["kept_b", "rest_b", "plan_b", "request", "row", "sink_size", "window"])
def gather(
    pages, k, v, full_k, full_v, few_k, few_v, plan, kept_table, rest_table, kept_stripes, rest_stripes, columns, place,
    page, k_t, k_h, v_t, v_h, full_t, few_t, kept_b, rest_b, plan_b, request, row, sink_size, window,
    D: tl.constexpr, TILE: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Program (i, b, h): tile i of what head h of request b of a batch sees, past and chunk.

    k, v: [tokens, H, D] of the step, by strides; the batch begins at `row`.
    full_k, full_v: [.., heads with a middle, D] and few_k, few_v: [.., heads without, D], with strides full_t, few_t.
    plan: int32 [4, plan_b], `Batch.plan`. kept_table, rest_table: block tables of the step; b has row `request` + b.
    columns: int32 [H, D], the column of a channel in the K stripe of the kept group; -1 - c for column c of the rest.
    place: int32 [H], the place of a head among those that see as much as it does.
    """
    b, head = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    page = page.to(tl.int64)
    at = tl.load(plan + b)
    first = tl.load(plan + 3 * plan_b + b)
    start, width, _, v_start = stripe_of(kept_stripes, head)
    rest_start, rest_width, _, rest_v_start = stripe_of(rest_stripes, head)
    sink = tl.minimum(sink_size, first)
    of_window = window_from(first, sink, window, 1)
    few = width == 0
    gap = tl.where(few, of_window - sink, 0)  # a head without a middle sees the window right behind the sink
    count = first + tl.load(plan + b + 1) - at - gap
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < count:
        position = tl.where(i < sink, i, i + gap)
        past = position < first
        new = (i < count) & (position >= first)
        whole = past & ((position < sink) | (position >= of_window))
        kept_row = kept_table + (request + b).to(tl.int64) * kept_b
        rest_row = rest_table + (request + b).to(tl.int64) * rest_b
        column = tl.load(columns + head * D + d)
        kept = column >= 0
        in_kept = _lines(pages, page, kept_row, position, past, start, width, KEPT_BLOCK)
        in_rest = _lines(pages, page, rest_row, position, whole, rest_start, rest_width, REST_BLOCK)
        line = tl.where(kept[None, :], in_kept[:, None] + column[None, :], in_rest[:, None] - 1 - column[None, :])
        stored = (kept[None, :] & past[:, None]) | ((column < 0)[None, :] & whole[:, None])
        key = tl.load(line, mask=stored, other=0.0)
        if few:
            v_line = _lines(pages, page, rest_row, position, whole, rest_v_start, D, REST_BLOCK)
            has_v = whole
            to = (tl.load(plan + 2 * plan_b + b) + i).to(tl.int64) * few_t
            to_k, to_v = few_k + to, few_v + to
        else:
            v_line = _lines(pages, page, kept_row, position, past, v_start, D, KEPT_BLOCK)
            has_v = past
            to = (tl.load(plan + plan_b + b) + i).to(tl.int64) * full_t
            to_k, to_v = full_k + to, full_v + to
        value = tl.load(v_line[:, None] + d[None, :], mask=has_v[:, None], other=0.0)
        source = (row + at + position - first).to(tl.int64)[:, None]
        new_key = tl.load(k + source * k_t + head * k_h + d[None, :], mask=new[:, None], other=0.0)
        new_value = tl.load(v + source * v_t + head * v_h + d[None, :], mask=new[:, None], other=0.0)
        key, value = tl.where(new[:, None], new_key, key), tl.where(new[:, None], new_value, value)
        of_head = tl.load(place + head) * D + d[None, :]
        tl.store(to_k[:, None] + of_head, key.to(full_k.dtype.element_ty), mask=(i < count)[:, None])
        tl.store(to_v[:, None] + of_head, value.to(full_v.dtype.element_ty), mask=(i < count)[:, None])
