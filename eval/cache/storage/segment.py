"""Where middle tokens lie: each row and KV head has room for its own number of tokens and of K channels.

All K lie in one flat tensor and all V in another. Each head has a region in both, and the regions lie back to back, row
by row, then head by head. Here head 0 keeps 2 channels and has room for 128 tokens, head 1 keeps none and has no region
in either tensor, and head 2 keeps 3 channels and has room for 64 tokens:

    k    | row 0, head 0                                      | row 0, head 2              | row 1, head 0 ...
         | page 0                  | page 1                   | page 0                     |
         | c0 x 64    | c1 x 64    | c0 x 64     | c1 x 64    | c0 x 64 | c1 x 64 | c2 x 64 |
         ^ k_start[0, 0]                                      ^ k_start[0, 2]

    v    | row 0, head 0                                      | row 0, head 2              | row 1, head 0 ...
         | token 0, D numbers | token 1 | ...  | token 127    | token 0 | ... | token 63   |
         ^ v_start[0, 0]                                      ^ v_start[0, 2]

A region of K is channel-major in pages of 64 tokens, [page, channel, 64], so that reads are aligned and contiguous for
any number of channels. A region of V is token-major, [token, D]; where V is pruned, it is stored as K is. Where steps
read single tokens, K is token-major too (`TokenSegment`).

Tokens are written head by head, or all rows and heads at once; both ways write the same. Head by head is one copy for
all rows that are alike. Where rows differ, every head of every row is a copy of its own, and the other way is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.upload import update, upload
from leank.precision import PAGE as PAGE

COPIED = 1 << 24  # elements copied at once; the limit bounds the temporary tensors of a long prompt
GROWTH = 128  # tokens: the smallest step in which a middle grows
SCATTERED = 4  # pieces of rows that are not alike from which all are written at once

Count = TypeVar("Count", int, np.ndarray)


def round_up(n: Count, multiple: int) -> Count:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def grown_room(tokens: np.ndarray) -> np.ndarray:
    """Tokens for which a middle that grows has room when it holds so many, int64 of any shape.

    That is in whole steps of `GROWTH`, or of the power of two in (tokens / 32, tokens / 16] if that is more. It depends
    on the tokens alone, whenever they came, so that a plan can tell it (`eval.methods.memory.planned_bytes`).
    """
    step = np.maximum(GROWTH, 1 << np.maximum(0, np.frexp(tokens // 16)[1] - 1))
    return round_up(np.asarray(tokens), step)


def kept_room(capacity: np.ndarray, left: np.ndarray, flush: int) -> np.ndarray:
    """The room [B, H] of a middle of which `left` tokens stay, when `flush` more come before the next ones leave.

    It is `capacity`, unless that is more than twice what they need.
    """
    roomy = (capacity > 2 * (left + flush + GROWTH)).any()
    return grown_room(left) if roomy else capacity


def _exclusive(sizes: np.ndarray) -> np.ndarray:
    """Offset of each region when regions of `sizes` [B, H] are stored back to back (exclusive prefix sum)."""
    flat = sizes.reshape(-1)
    return (np.cumsum(flat) - flat).reshape(sizes.shape)


def spread(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Tensor:
    """The ranges start, start + 1, ..., start + size - 1 of all regions, concatenated: int64 on `device`."""
    start, size = (upload(a.reshape(-1), device) for a in (starts, sizes))
    total = int(sizes.sum())
    first = torch.cumsum(size, 0) - size
    return torch.repeat_interleave(start - first, size, output_size=total) + torch.arange(total, device=device)


def lines(flat: Tensor, width: int) -> Tensor:
    """A flat tensor, possibly empty, as lines of `width` elements."""
    return flat.view(flat.numel() // width, width)


def words(flat: Tensor, width: int) -> Tensor:
    """The same lines in words of eight bytes, if these fill them: a GPU copies a word in the time of a byte."""
    fill = width * flat.element_size() % 8 == 0
    return lines(flat.view(torch.int64), width * flat.element_size() // 8) if fill else lines(flat, width)


@dataclass(frozen=True, eq=False)
class Extent:
    """What a segment has to hold, whatever its form."""

    channels: KeptChannels  # kept channels of K
    capacity: np.ndarray  # [B, H] on the host, tokens that each row and head must have room for
    head_dim: int  # D
    dtype: torch.dtype  # the model's, of keys and values as they come
    values: KeptChannels | None = None  # kept channels of V, None = all


class Segment:
    """Middle tokens of all rows and heads, in the regions that an extent asks for.

    capacity: [B, H], tokens for which there is room, rounded up to pages; 0 in heads that keep no channels of K
    length, length_dev: [B, H], tokens held, on the host and on the device
    page: tokens of a page of K
    k, v: the flat tensors; k_start, v_start: [B, H], first element of each region
    width: [B, H], kept channels of V
    """

    page = PAGE

    def __init__(self, extent: Extent) -> None:
        self.channels, self.values = extent.channels, extent.values
        self.head_dim, self.dtype = extent.head_dim, extent.dtype
        device = self.channels.index.device
        self.capacity = np.where(self.channels.count > 0, round_up(extent.capacity, PAGE), 0).astype(np.int64)
        self.width = np.full_like(self.capacity, self.head_dim) if self.values is None else self.values.count
        (k_size, _), (v_size, _) = self._sizes()
        self.k_start, self.v_start = _exclusive(k_size), _exclusive(v_size)
        stored = self._form()
        # zeros, because a saved cache holds spare room too: nothing of other programs or prompts may be in it
        self.k, self.v = (torch.zeros(int(n.sum()), dtype=stored, device=device) for n in (k_size, v_size))
        self._places: Tensor | None = None
        self.length = np.zeros_like(self.capacity)
        self.length_dev = torch.zeros(self.capacity.shape, dtype=torch.int64, device=device)

    def _form(self) -> torch.dtype:
        """The dtype of k and v."""
        return self.dtype

    def _sizes(self) -> tuple[tuple[np.ndarray, int], ...]:
        """For K and for V: (elements of each region [B, H], elements of a line, which divides every region)."""
        v_line = self.head_dim if self.values is None else PAGE
        return (self.capacity * self.channels.count, PAGE), (self.capacity * self.width, v_line)

    def views(self, row: int, number: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of one head's regions in `number` rows of the same layout from `row` on.

        Returns K [number, pages, channels, tokens of a page] and V [number, capacity, D], where it is pruned as K.
        """
        cap, count, width = (int(a[row, head]) for a in (self.capacity, self.channels.count, self.width))
        k_row, v_row = (int(a[row + 1, head] - a[row, head]) if number > 1 else 0 for a in (self.k_start, self.v_start))
        k_start, v_start = int(self.k_start[row, head]), int(self.v_start[row, head])

        def pages(flat: Tensor, step: int, channels: int, start: int, page: int) -> Tensor:
            shape = (number, cap // page, channels, page)
            return flat.as_strided(shape, (step, channels * page, page, 1), start)

        if self.values is None:
            values = self.v.as_strided((number, cap, width), (v_row, width, 1), v_start)
        else:
            values = pages(self.v, v_row, width, v_start, PAGE)
        return pages(self.k, k_row, count, k_start, self.page), values

    def flats(self) -> tuple[tuple[Tensor, np.ndarray, np.ndarray, int], ...]:
        """For K and for V: (flat tensor, first element of each region, size of each, elements of a line)."""
        k, v = self._sizes()
        return (self.k, self.k_start, *k), (self.v, self.v_start, *v)

    def places(self) -> Tensor:
        """[B, H, 4] int64 on the device: first element of K and of V, then kept channels of both, 0 without room."""
        if self._places is None:
            count, width = (np.where(self.capacity > 0, n, 0) for n in (self.channels.count, self.width))
            self._places = upload(np.stack([self.k_start, self.v_start, count, width], -1), self.k.device)
        return self._places

    def fresh(self, channels: KeptChannels, capacity: np.ndarray, values: KeptChannels | None) -> Segment:
        """An empty segment of the same form; the parameters are those of `Extent`."""
        return self._of_form(Extent(channels, capacity, self.head_dim, self.dtype, values))

    def _of_form(self, extent: Extent) -> Segment:
        """An empty segment of this form."""
        return type(self)(extent)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add the first `count` [R, H] tokens, None = all, of k, v [R, H, n, D] to rows [R] where there is room."""
        taken = np.where(self.capacity[rows] > 0, k.shape[2] if count is None else count, 0)
        pieces = self._alike(rows, taken) if taken.any() else []
        if len(pieces) < SCATTERED:
            self._write_pieces(pieces, rows, k, v, taken)
        else:
            self._write_at_once(rows, k, v, taken)
        self.length[rows] += taken
        update(self.length_dev, self.length)

    def _alike(self, rows: np.ndarray, taken: np.ndarray) -> list[slice]:
        """`rows` [R] in pieces for one copy: neighbours of one layout that take as many tokens, or each row."""
        same = [taken, *(a[rows] for a in (self.capacity, self.channels.count, self.width, self.length))]
        if (np.diff(rows) == 1).all() and all((a == a[:1]).all() for a in same):
            return [slice(0, len(rows))]
        return [slice(i, i + 1) for i in range(len(rows))]

    def _write_pieces(self, pieces: list[slice], rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray) -> None:
        """Write each head's first `taken` [R, H] tokens behind those that it holds, piece by piece and head by head."""
        for piece in pieces:
            row, number = int(rows[piece.start]), piece.stop - piece.start
            step = max(PAGE, COPIED // (number * self.head_dim) // PAGE * PAGE)
            for head in np.flatnonzero(taken[piece.start]).tolist():
                held, n = int(self.length[row, head]), int(taken[piece.start, head])
                for first in range(0, n, step):
                    new = (x[piece, head, first : min(first + step, n)] for x in (k, v))
                    self._write(row, number, head, held + first, *new)

    def _write(self, row: int, number: int, head: int, at: int, k: Tensor, v: Tensor) -> None:
        """Write tokens k, v [number, n, D] of one head in like rows from `row` on, from its token `at` on."""
        pages, values = self.views(row, number, head)
        _put(pages, at, kept_of(k, self.channels, row, head))
        if self.values is None:
            values[:, at : at + v.shape[1]] = v
        else:
            _put(values, at, kept_of(v, self.values, row, head))

    def _write_at_once(self, rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray) -> None:
        """Do what `_write_pieces` does, all at once; a head with fewer channels writes its last one several times."""
        device, page, total = self.k.device, self.page, int(taken.sum())
        head = torch.repeat_interleave(upload(taken.reshape(-1), device), output_size=total)
        token = spread(np.zeros_like(taken), taken, device)
        for some in torch.arange(total, device=device).split(max(1, COPIED // (4 * self.head_dim))):
            of, n = head[some], token[some]

            def each(of_head: np.ndarray, of: Tensor = of) -> Tensor:
                return upload(of_head[rows].reshape(-1), device)[of]

            at = each(self.length) + n
            new, number, channel = _picked(k, self.channels, rows, of, n)
            first = each(self.k_start) + at // page * number * page + at % page
            self.k[first[:, None] + channel * page] = new
            if self.values is None:
                lines(self.v, self.head_dim)[each(self.v_start) // self.head_dim + at] = v.flatten(0, 1)[of, n]
                continue
            new, number, channel = _picked(v, self.values, rows, of, n)
            first = each(self.v_start) + at // PAGE * number * PAGE + at % PAGE
            there = number > 0  # a head can keep no channel of V
            self.v[(first[:, None] + channel * PAGE)[there]] = new[there]

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's regions: K [pages, channels, tokens of a page], V [capacity, D], where it is pruned as K."""
        k, v = self.views(row, 1, head)
        return k[0], v[0]

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """K [n, channels] and V [n, D] of one head; pruned channels of V are zero."""
        n, (k, v) = int(self.length[row, head]), self._regions(row, head)
        keys = k.transpose(1, 2).flatten(0, 1)[:n]
        if self.values is None:
            return keys, v[:n]
        whole = v.new_zeros(n, self.head_dim)
        whole[:, self.values.index[row, head, : v.shape[1]].long()] = v.transpose(1, 2).flatten(0, 1)[:n]
        return keys, whole

    def keys_of(self, stored: Tensor) -> Tensor:
        """The keys [B H, channels, N] of all heads from what is stored of them, of the same shape here."""
        return stored

    def held(self) -> tuple[int, int]:
        """Bytes of K and of V of the tokens held; spare room is not counted."""
        return numbers_held(self.length, self.channels.count, self.width, self.dtype)

    @torch.no_grad()
    def grown(self, capacity: np.ndarray) -> Segment:
        """A copy with room for `capacity` [B, H] tokens, in no head fewer than now."""
        new = self.fresh(self.channels, capacity, self.values)
        for (old, start, size, _), (flat, _, room, _) in zip(self.flats(), new.flats(), strict=True):
            if self.length.any() and size.any():  # else there is nothing to copy
                line = int(np.gcd.reduce([size, room], axis=None))
                source = upload(_stretched(*(a.reshape(-1) // line for a in (start, size, room))), flat.device)
                torch.index_select(words(old, line), 0, source, out=words(flat, line))
        new.length, new.length_dev = self.length, self.length_dev
        return new

    def select(self, rows: Tensor, channels: KeptChannels, values: KeptChannels | None) -> Segment:
        """The segment of the batch `rows` [R], in that order, whose tables are `channels` and `values`."""
        at = rows.cpu().numpy()
        new = self.fresh(channels, self.capacity[at], values)
        for (old, start, _, line), (flat, _, size, _) in zip(self.flats(), new.flats(), strict=True):
            source = spread(start[at] // line, size // line, flat.device)
            torch.index_select(words(old, line), 0, source, out=words(flat, line))
        new.length, new.length_dev = self.length[at], self.length_dev[rows.to(self.k.device)]
        return new

    def saved(self) -> dict[str, Tensor]:
        """The tokens and the room of every head, and what is stored, by name."""
        counts = {name: torch.from_numpy(getattr(self, name)) for name in ("length", "capacity")}
        return {**counts, "k": self.k, "v": self.v}

    def restore(self, length: np.ndarray, k: Tensor, v: Tensor) -> None:
        """Fill an empty segment of the same extent with what was saved. Raises ValueError for another size."""
        if (self.k.shape, self.v.shape, self.k.dtype) != (k.shape, v.shape, k.dtype) or k.dtype != v.dtype:
            raise ValueError("its middle has another size than its tables say")
        if ((length < 0) | (length > self.capacity)).any():
            raise ValueError("a table of tokens names more than there is room for")
        self.k, self.v = k.to(self.k.device), v.to(self.k.device)
        self.length, self.length_dev = length, torch.from_numpy(length.copy()).to(self.k.device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name (the channel tables are the store's)."""
        places = {} if self._places is None else {"places": self._places}
        return {"k": self.k, "v": self.v, "length": self.length_dev, **places}


def whole_numbers(table: Tensor) -> np.ndarray:
    """A table of counts on the host. Raises ValueError for one that is not of whole numbers."""
    if table.dtype != torch.int64:
        raise ValueError(f"a table of counts is of {table.dtype}")
    return table.numpy().copy()


def numbers_held(
    tokens: np.ndarray, channels: np.ndarray | int, width: np.ndarray | int, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes of K and of V of so many tokens [..., H] with so many channels of K and of V, in the model's dtype."""
    return int((tokens * channels).sum()) * dtype.itemsize, int((tokens * width).sum()) * dtype.itemsize


class TokenSegment(Segment):
    """A Segment whose pages of K hold one token, so that a key is one piece of memory and not one a channel."""

    page = 1


def _stretched(start: np.ndarray, size: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Which lines fill larger regions of `room` lines in one copy; start, size: of those that are there."""
    own = np.arange(room.sum()) - np.repeat(np.cumsum(room) - room, room)
    source = np.repeat(start, room) + np.minimum(own, np.repeat(np.maximum(size, 1) - 1, room))
    return np.minimum(source, size.sum() - 1)


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


def kept_of(x: Tensor, table: KeptChannels, row: int, head: int) -> Tensor:
    """The kept channels of tokens x [R, n, D] of one head in the rows from `row` on."""
    if table.in_order:
        return x
    index = table.index[row : row + len(x), head, None, : int(table.count[row, head])].long()
    return _gathered(x, index.expand(-1, x.shape[1], -1))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x.gather(-1, index), bit for bit: a CPU takes 16-bit floats through float32, which changes a record's NaN."""
    if x.element_size() != 2:
        return x.gather(-1, index)
    return x.view(torch.int16).gather(-1, index).view(x.dtype)
