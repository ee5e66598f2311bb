"""What R-KV needs on a GPU without n x n numbers in memory; the slow form is eval.methods.tokens.rkv in plain PyTorch.

Of all cosines, single ones count only where the latest token that is like another has to be found. Their sums over
tokens are products with one vector: sum_i cos(k_i, k_j) = (k_j / |k_j|) . sum_i k_i / |k_i|.

Keys come in two forms: a tensor [B, H, T, D] by strides (PAGE = 0), or pages (eval.cache.storage.segment). The norm
of a token that is padding, or whose key is zero, is inf: it is like no other, and others are not like it. P is the
power of two that is at least D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leank.eval.cache.attention.kernels.parts import columns
from leank.eval.cache.storage.segment import PAGE, Segment, round_up

UNIT = float(1 << 40)  # of cosines that are added up as whole numbers

# fmt: off


@triton.jit
def _keys(k, t, tokens, count, step, D: tl.constexpr, PAGE: tl.constexpr):
    """Keys [P, len(t)] of the tokens t, of any numbers past the last; step: between tokens where there are no pages."""
    d = tl.arange(0, triton.next_power_of_2(D))
    if PAGE:
        there = (d < count)[:, None] & (t < tl.cdiv(tokens, PAGE) * PAGE)[None, :]  # whole pages are read faster
        line = (t // PAGE) * (count * PAGE) + t % PAGE
        x = tl.load(k + (line[None, :] + d[:, None] * PAGE), mask=there, other=0.0)
    else:
        there = columns(t < tokens, d, D)
        x = tl.trans(tl.load(k + (t.to(tl.int64)[:, None] * step + d[None, :]), mask=there, other=0.0))
    return x


@triton.jit
def _head(k, places, length_ptr, place, k_b, k_h, tokens, H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where a head's keys begin, how many there are, and of how many channels."""
    count = tl.full([], D, tl.int32)
    if PAGE:
        k += tl.multiple_of(tl.load(places + place * 4), PAGE)
        count = tl.load(places + place * 4 + 2).to(tl.int32)
        tokens = tl.load(length_ptr + place).to(tl.int32)
    else:
        k += place // H * k_b + place % H * k_h
    return k, tokens, count


@triton.jit
def repeats(
    k, places, length_ptr, norm, repeated, threshold, k_b, k_h, k_t, tokens, most,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (block, place): of BLOCK tokens i, the latest others j with cos(k_i, k_j) > threshold.

    The search goes from the last SPAN tokens to the first, until all of the block have found one.

    places, length_ptr: of the pages; else k_b, k_h, k_t are strides, and every head has as many `tokens`
    norm: [B, H, most] fp32, inf past the last token; `most` is a multiple of TILE
    repeated: [B, H, most] int64, zeros before: to that of j, UNIT cos(k_i, k_j) is added. Whole numbers have the same
        sum in every order.
    """
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, n, count = _head(k, places, length_ptr, place, k_b, k_h, tokens, H, D, PAGE)
    norm += place * most
    if block * BLOCK < n:
        i, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(D))
        rows = tl.trans(_keys(k, i, n, count, k_t, D, PAGE))
        own = tl.load(norm + i)
        counts = own < float("inf")
        latest, first = tl.where(counts, -1, 0), (n - 1) // SPAN * SPAN
        while (first >= 0) & (tl.min(latest, 0) < 0):
            found = tl.full([BLOCK], -1, tl.int32)
            for at in range(first, tl.minimum(first + SPAN, n), TILE):
                j = at + tl.arange(0, TILE)
                s = tl.dot(rows, _keys(k, j, n, count, k_t, D, PAGE), input_precision="ieee")
                least = (threshold * own)[:, None] * tl.load(norm + j)[None, :]
                alike = (s > least) & (i[:, None] != j[None, :])
                found = tl.maximum(found, tl.max(tl.where(alike, j[None, :], -1), 1))
            latest = tl.where(latest < 0, found, latest)
            first -= SPAN
        counts = counts & (latest >= 0)
        latest = tl.maximum(latest, 0)
        if PAGE:
            line = (latest // PAGE) * (count * PAGE) + latest % PAGE
            there = counts[:, None] & (d < count)[None, :]
            x = tl.load(k + (line[:, None] + d[None, :] * PAGE), mask=there, other=0.0)
        else:
            there = columns(counts, d, D)
            x = tl.load(k + (latest.to(tl.int64)[:, None] * k_t + d[None, :]), mask=there, other=0.0)
        cosine = tl.sum(tl.where(counts[:, None], rows.to(tl.float32) * x.to(tl.float32), 0.0), 1)
        cosine = cosine / own / tl.load(norm + latest)
        tl.atomic_add(repeated + place * most + latest, (cosine * UNIT).to(tl.int64), mask=counts)


@triton.jit
def measure(
    k, places, length_ptr, norm, total, repeated, most,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):
    """Program place: norms [B, H, most] of a head's keys in pages, and the sum [B, H, D] of keys over their norms."""
    P: tl.constexpr = triton.next_power_of_2(D)
    place, d = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    k, n, count = _head(k, places, length_ptr, place, 0, 0, 0, H, D, PAGE)
    sums = tl.zeros([P], tl.float32)
    for at in range(0, most, TILE):
        t = at + tl.arange(0, TILE)
        x = tl.where((t < n)[None, :], _keys(k, t, n, count, 0, D, PAGE).to(tl.float32), 0.0)
        length = tl.sqrt(tl.sum(x * x, 0))
        length = tl.where(length > 0.0, length, float("inf"))
        sums += tl.sum(x / length[None, :], 1)
        tl.store(norm + place * most + t, length)
        tl.store(repeated + place * most + t, tl.zeros([TILE], tl.int64))
    if P > D:
        tl.store(total + place * D + d, sums, mask=d < D)
    else:
        tl.store(total + place * D + d, sums)


@triton.jit
def rank(
    k, places, length_ptr, norm, total, repeated, scores, ranked, mix, most, columns, sink,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KERNEL: tl.constexpr,
    EARLIER: tl.constexpr, UNIT: tl.constexpr,
):
    """Program place: Z of a head's middle, into ranked [B, H, most] fp32; EARLIER: pooling ends with the middle.

    norm, total, repeated: of `measure` and `repeats`
    scores: [B, H, columns] fp32, those of the middle behind `sink` others, zeros past the last token held
    """
    P: tl.constexpr = triton.next_power_of_2(D)
    place, d = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    k, n, count = _head(k, places, length_ptr, place, 0, 0, 0, H, D, PAGE)
    norm += place * most
    repeated += place * most
    ranked += place * most
    scores += place * columns
    total += place * D
    sums = tl.load(total + d, mask=d < D, other=0.0) if P > D else tl.load(total + d)

    largest, every = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
    for at in range(0, n, TILE):
        t = at + tl.arange(0, TILE)
        x = tl.where((t < n)[None, :], _keys(k, t, n, count, 0, D, PAGE).to(tl.float32), 0.0)
        length = tl.load(norm + t, mask=t < n, other=float("inf"))
        twice = tl.load(repeated + t, mask=t < n, other=0).to(tl.float32) / UNIT
        own = tl.where(length < float("inf"), 1.0, 0.0)
        mean = (tl.sum(x * sums[:, None], 0) / length - own - twice) / n
        tl.store(ranked + t, mean, mask=t < n)
        largest = tl.maximum(largest, tl.where(t < n, mean, float("-inf")))
    most_alike = tl.max(largest, 0)
    tl.debug_barrier()  # all of `ranked` is written before any of it is read
    for at in range(0, n, TILE):
        t = at + tl.arange(0, TILE)
        every += tl.exp(tl.load(ranked + t, mask=t < n, other=float("-inf")) - most_alike)
    of_all = tl.sum(every, 0)

    received = tl.zeros([TILE], tl.float32)
    for at in range(0, columns, TILE):
        t = at + tl.arange(0, TILE)
        received += tl.load(scores + t, mask=t < columns, other=0.0)
    reach = sink + n if EARLIER else columns
    share = 1.0 / tl.maximum(tl.sum(received, 0), 1.1754943508222875e-38)
    for at in range(0, n, TILE):
        t = at + tl.arange(0, TILE)
        pooled = tl.zeros([TILE], tl.float32)
        for o in range(KERNEL):
            c = sink + t + o - KERNEL // 2
            pooled = tl.maximum(pooled, tl.load(scores + c, mask=(c >= 0) & (c < reach), other=0.0))
        redundant = tl.exp(tl.load(ranked + t, mask=t < n, other=0.0) - most_alike) / of_all
        tl.debug_barrier()
        tl.store(ranked + t, mix * (pooled * share) - (1.0 - mix) * redundant, mask=t < n)


# fmt: on


class Tiles(NamedTuple):
    """How tokens are compared."""

    block: int = 128  # tokens of a program
    tile: int = 64  # tokens that it compares them with at a time
    span: int = 1024  # tokens after which it asks whether it is done
    warps: int = 4  # warps, stages: of a program
    stages: int = 3


def tiles_of(dim: int) -> Tiles:
    """How tokens with keys of so many channels are compared; 128 of more than 128 do not fit a thread's registers."""
    return Tiles(block=128 if dim <= 128 else 64)


def redundancy(keys: Tensor, there: Tensor, threshold: float, tiles: Tiles | None = None) -> Tensor:
    """R [B, H, n] of keys [B, H, n, D]; parameters and result are those of the slow form, `tokens.rkv.redundancy`."""
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    (batch, heads, count, dim), tiles = keys.shape, tiles or tiles_of(keys.shape[-1])
    most = round_up(count, max(tiles.block, tiles.tile))
    norm = torch.full((batch, heads, most), torch.inf, dtype=torch.float32, device=keys.device)
    own = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    norm[..., :count] = own.masked_fill_(~(there & (own > 0)), torch.inf)
    repeated = torch.zeros(batch, heads, most, dtype=torch.int64, device=keys.device)
    _compare((keys, norm, norm), norm, repeated, threshold, (*keys.stride()[:3], count), heads, dim, 0, tiles)
    each = keys.float() / own[..., None]
    total = (each @ each.sum(2)[..., None])[..., 0] - (own < torch.inf).float()
    total -= repeated[..., :count].double().div(UNIT).float()
    mean = total / there.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, -torch.inf).softmax(-1).masked_fill(~there, 0)


def _compare(
    keys: tuple[Tensor, Tensor, Tensor],
    norm: Tensor,
    repeated: Tensor,
    threshold: float,
    dense: tuple[int, ...],
    heads: int,
    dim: int,
    page: int,
    tiles: Tiles,
) -> None:
    """Add to `repeated` what `repeats` finds; keys: numbers, places and lengths; dense: for keys without pages."""
    most = norm.shape[-1]
    threshold = threshold if threshold < 1 else 2.0  # a cosine of equal keys is rounded to more than 1
    repeats[(most // tiles.block, norm.shape[0] * heads)](
        *(*keys, norm, repeated, threshold, *dense, most),
        H=heads,
        D=dim,
        PAGE=page,
        BLOCK=tiles.block,
        TILE=tiles.tile,
        SPAN=tiles.span,
        UNIT=UNIT,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def ranking(scores: Tensor, tail: Segment, sink: int, tokens: int, settings: Any, tiles: Tiles | None = None) -> Tensor:
    """Z [B, H, tokens] of a middle in the tail, undefined past its own; slow form: `tokens.rkv.Redundant.ranking`.

    scores: [B, H, columns] float32, contiguous, zeros past the tokens held; sink: tokens before the middle
    tokens: the most that a head's middle holds
    """
    (batch, heads, columns), dim, device = scores.shape, tail.head_dim, scores.device
    tiles = tiles or tiles_of(dim)
    most = round_up(tokens, max(tiles.block, tiles.tile, PAGE))
    norm, ranked = (torch.empty(batch, heads, most, dtype=torch.float32, device=device) for _ in range(2))
    total = torch.empty(batch, heads, dim, dtype=torch.float32, device=device)
    repeated = torch.empty(batch, heads, most, dtype=torch.int64, device=device)
    keys, of_pages = (tail.k, tail.places(), tail.length_dev), {"H": heads, "D": dim, "PAGE": PAGE, "TILE": PAGE}
    measure[(batch * heads,)](*keys, norm, total, repeated, most, **of_pages)
    _compare(keys, norm, repeated, settings.threshold, (0, 0, 0, 0), heads, dim, PAGE, tiles)
    rank[(batch * heads,)](
        *(*keys, norm, total, repeated, scores, ranked, settings.mix, most, columns, sink),
        **of_pages,
        KERNEL=settings.kernel,
        EARLIER=settings.pooled == "earlier",
        UNIT=UNIT,
    )
    return ranked[..., :tokens]
