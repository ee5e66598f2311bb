"""How tokens are written into eval.cache.storage.pages: head by head, or all rows and heads at once.

Both ways write the same. Head by head is one copy for all rows that are alike; where rows differ, every head of every
row is a copy of its own, and the other way is faster.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.pages import PAGE, Regions, lines, spread
from leank.eval.cache.storage.upload import upload

COPIED = 1 << 24  # elements copied at once; the limit bounds the temporary tensors of a long prompt
SCATTERED = 4  # pieces of rows that are not alike from which all are written at once


def write(regions: Regions, length: np.ndarray, rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray) -> None:
    """Write each head's first tokens behind those that it holds; kept channels are picked here.

    length: [B, H], tokens that each head of the batch holds
    rows: [R], the rows of the batch that take tokens
    k, v: [R, H, n, D], dense
    taken: [R, H], how many of the n tokens each head takes; 0 where there is no room
    """
    pieces = alike(regions, length, rows, taken) if taken.any() else []
    if len(pieces) < SCATTERED:
        _write_pieces(regions, length, pieces, rows, k, v, taken)
    else:
        _write_at_once(regions, length, rows, k, v, taken)


def alike(regions: Regions, length: np.ndarray, rows: np.ndarray, taken: np.ndarray) -> list[slice]:
    """`rows` [R] in pieces that one copy can write.

    Neighbouring rows of the same layout that take the same number of tokens [R, H] are one piece, else each row.
    """
    same = [taken, *(a[rows] for a in (regions.capacity, regions.channels.count, regions.width, length))]
    if (np.diff(rows) == 1).all() and all((a == a[:1]).all() for a in same):
        return [slice(0, len(rows))]
    return [slice(i, i + 1) for i in range(len(rows))]


def _write_pieces(
    regions: Regions, length: np.ndarray, pieces: list[slice], rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray
) -> None:
    """Write the tokens that each head takes [R, H], piece by piece and head by head."""
    tables = [None if t is None or t.in_order else t.index.long() for t in (regions.channels, regions.values)]
    for piece in pieces:
        row, number = int(rows[piece.start]), piece.stop - piece.start
        step = max(PAGE, COPIED // (number * regions.head_dim) // PAGE * PAGE)
        for head in np.flatnonzero(taken[piece.start]).tolist():
            pages, values = regions.views(row, number, head)
            held, n = int(length[row, head]), int(taken[piece.start, head])
            index = [None if t is None else t[row : row + number, head, None] for t in tables]
            for first in range(0, n, step):
                last = min(first + step, n)
                new = (x[piece, head, first:last] for x in (k, v))
                widths = (pages.shape[2], values.shape[2])
                picked_k, picked_v = (
                    x if i is None else _gathered(x, i[..., :w].expand(-1, last - first, -1))
                    for x, i, w in zip(new, index, widths, strict=True)
                )
                _put(pages, held + first, picked_k)
                if regions.values is None:
                    values[:, held + first : held + last] = picked_v
                else:
                    _put(values, held + first, picked_v)


def _put(pages: Tensor, at: int, x: Tensor) -> None:
    """Write tokens x [R, n, channels] into pages [R, P, channels, tokens of a page], from token `at` on."""
    n, page = x.shape[1], pages.shape[-1]
    first, ahead = at // page, min(n, -at % page)  # tokens for which the page of `at` still has room
    whole = (n - ahead) // page
    rest = n - ahead - whole * page
    if ahead:
        pages[:, first, :, at % page : at % page + ahead] = x[:, :ahead].transpose(1, 2)
        first += 1
    if whole:
        pages[:, first : first + whole] = x[:, ahead : n - rest].unflatten(1, (whole, page)).transpose(2, 3)
    if rest:
        pages[:, first + whole, :, :rest] = x[:, n - rest :].transpose(1, 2)


def _write_at_once(
    regions: Regions, length: np.ndarray, rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray
) -> None:
    """Do what `_write_pieces` does for all rows and heads at once: no launch more, however many there are.

    A head with fewer channels than another writes its last one several times, always the same number.
    """
    device, page, total = regions.k.device, regions.page, int(taken.sum())
    head = torch.repeat_interleave(upload(taken.reshape(-1), device), output_size=total)
    token = spread(np.zeros_like(taken), taken, device)
    for some in torch.arange(total, device=device).split(max(1, COPIED // (4 * regions.head_dim))):
        of, n = head[some], token[some]

        def each(of_head: np.ndarray, of: Tensor = of) -> Tensor:
            return upload(of_head[rows].reshape(-1), device)[of]

        at = each(length) + n
        new, number, channel = _picked(k, regions.channels, rows, of, n)
        first = each(regions.k_start) + at // page * number * page + at % page
        regions.k[first[:, None] + channel * page] = new
        if regions.values is None:
            lines(regions.v, regions.head_dim)[each(regions.v_start) // regions.head_dim + at] = v.flatten(0, 1)[of, n]
            continue
        new, number, channel = _picked(v, regions.values, rows, of, n)
        first = each(regions.v_start) + at // PAGE * number * PAGE + at % PAGE
        there = number > 0  # a head can keep no channel of V
        regions.v[(first[:, None] + channel * PAGE)[there]] = new[there]


def _picked(
    x: Tensor, table: KeptChannels, rows: np.ndarray, head: Tensor, token: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kept channels of some tokens, one after the other.

    x: [R, H, n, D], dense; table: of all rows; rows: [R]
    head, token: [N], which head of the R H, and which of its tokens

    Returns the numbers [N, most channels], the number of channels of each token [N], and the place of each number among
    them [N, most channels]: those that a head lacks repeat its last.
    """
    count = upload(table.count[rows].reshape(-1), x.device)
    number, most = count[head], int(table.count[rows].max())
    place = torch.minimum(torch.arange(most, device=x.device), (number[:, None] - 1).clamp(min=0))
    new = x.flatten(0, 1)[head, token]
    if table.in_order:
        return new, number, place
    index = table.index[upload(rows, x.device)].flatten(0, 1).long()[head]
    return _gathered(new, index.gather(1, place)), number, place


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x.gather(-1, index), bit for bit.

    On a CPU torch takes 16-bit floats through float32, which changes the bits of a NaN, and records may hold any bits.
    """
    if x.element_size() != 2:
        return x.gather(-1, index)
    return x.view(torch.int16).gather(-1, index).view(x.dtype)
