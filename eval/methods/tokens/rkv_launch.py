"""Launches of what R-KV computes on a GPU (eval.methods.tokens.rkv_kernel)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leank.eval.cache.storage.pages import PAGE, round_up
from leank.eval.cache.storage.segment import Segment
from leank.eval.methods.tokens import rkv_kernel

UNIT = float(1 << 40)  # of cosines that are added up as whole numbers


class Tiles(NamedTuple):
    """How tokens are compared.

    block: tokens of a program
    tile: tokens that it compares them with at a time
    span: tokens after which it asks whether it is done
    warps, stages: of a program
    """

    block: int = 128
    tile: int = 64
    span: int = 1024
    warps: int = 4
    stages: int = 3


DEFAULT = Tiles()


def redundancy(keys: Tensor, there: Tensor, threshold: float, tiles: Tiles = DEFAULT) -> Tensor:
    """R [B, H, n] of keys [B, H, n, D]; parameters and result are those of the slow form, `rkv.redundancy`."""
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    (batch, heads, count, dim), most = keys.shape, round_up(keys.shape[2], max(tiles.block, tiles.tile))
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
    """Add to `repeated` what `rkv_kernel.repeats` finds.

    keys: numbers, places and lengths
    dense: strides and tokens of keys without pages
    """
    most = norm.shape[-1]
    threshold = threshold if threshold < 1 else 2.0  # a cosine of equal keys is rounded to more than 1
    rkv_kernel.repeats[(most // tiles.block, norm.shape[0] * heads)](
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


def ranking(
    scores: Tensor,
    tail: Segment,
    sink: int,
    tokens: int,
    mix: float,
    kernel: int,
    threshold: float,
    tiles: Tiles = DEFAULT,
) -> Tensor:
    """Z [B, H, tokens] of the middle's tokens, all of them in the tail; the slow form is `rkv.Redundant.ranking`.

    scores: [B, H, columns] float32, contiguous, zeros past the tokens held
    sink: tokens before the middle
    tokens: the most that a head's middle holds
    mix, kernel, threshold: settings of `RKV`

    What it says past a head's own tokens is undefined.
    """
    (batch, heads, columns), dim, device = scores.shape, tail.head_dim, scores.device
    most = round_up(tokens, max(tiles.block, tiles.tile, PAGE))
    norm, ranked = (torch.empty(batch, heads, most, dtype=torch.float32, device=device) for _ in range(2))
    total = torch.empty(batch, heads, dim, dtype=torch.float32, device=device)
    repeated = torch.empty(batch, heads, most, dtype=torch.int64, device=device)
    keys, of_pages = (tail.k, tail.places(), tail.length_dev), {"H": heads, "D": dim, "PAGE": PAGE, "TILE": PAGE}
    rkv_kernel.measure[(batch * heads,)](*keys, norm, total, repeated, most, **of_pages)
    _compare(keys, norm, repeated, threshold, (0, 0, 0, 0), heads, dim, PAGE, tiles)
    rkv_kernel.rank[(batch * heads,)](
        *(*keys, norm, total, repeated, scores, ranked, mix, most, columns, sink),
        **of_pages,
        KERNEL=kernel,
        UNIT=UNIT,
    )
    return ranked[..., :tokens]
