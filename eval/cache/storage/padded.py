"""A ragged segment as padded tensors, for operations over all rows and heads at once.

Shapes: X = B H KV heads of all rows; R = G Q rows of queries of one; N padded tokens; C padded channels.
"""

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.codecs import PageSegment
from leank.eval.cache.storage.segment import PAGE, Segment, kept_room, lines, round_up
from leank.eval.cache.storage.upload import upload


class Padded:
    """A segment that holds tokens, as tensors of N `columns`, whole pages; hidden: [X, N], without a token.

    Every padded place is read from a token that is held, so that it is finite and a weight of zero removes it. In K a
    head's first channel stands for channels that the head lacks; queries are zero there. In V another token stands for
    tokens that the head lacks.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, device = segment, segment.k.device
        (_, k_start, _, self._k_line), (_, v_start, _, self._v_line) = segment.flats()
        length, lines_k, lines_v = segment.length, k_start // self._k_line, v_start // self._v_line
        self.columns = round_up(int(length.max()), PAGE)
        token = torch.arange(self.columns, device=device)
        self.hidden = token >= upload(length.reshape(-1, 1), device)
        self._by_token = segment.page == 1
        if self._by_token:
            of_heads = np.stack([np.where(length > 0, n, 0).reshape(-1) for n in (k_start, segment.channels.count)])
            first, count = upload(of_heads, device)[..., None]  # each [X, 1]
            self._keys = first + torch.where(self.hidden, 0, token) * count  # [X, N], each key's first number
            channel = torch.arange(int(segment.channels.count.max()), device=device)
            self._channel = torch.where(channel < count, channel, 0)
        else:
            self._keys = self._pages(lines_k, segment.channels.count)
        self._channels = None if segment.values is None else segment.values.columns().flatten(0, 1)
        if segment.values is None:
            some, first = int(lines_v[length > 0][0]), upload(lines_v.reshape(-1, 1), device)
            self._values = torch.where(self.hidden, some, first + token).int()  # [X, N]
        else:
            self._values = self._pages(lines_v, segment.width)

    def _pages(self, first: np.ndarray, count: np.ndarray) -> Tensor:
        """The lines of K, or of pruned V, [X, C, pages]; first, count: [B, H], first line and channels."""
        device, length = self.segment.k.device, self.segment.length
        there = (length > 0) & (count > 0)
        of_heads = np.stack([np.where(there, n, 0).reshape(-1) for n in (length, first, count)])
        held, line, own = upload(of_heads, device)[..., None]  # each [X, 1]
        page, channel = (torch.arange(n, device=device) for n in (self.columns // PAGE, int(count.max())))
        page, channel = torch.where(page * PAGE < held, page, 0), torch.where(channel < own, channel, 0)
        return (line[..., None] + page[:, None] * own[..., None] + channel[..., None]).int()

    def keys(self, dtype: torch.dtype) -> Tensor:
        """K, channel-major: [X, C, N]."""
        if isinstance(self.segment, PageSegment):
            return self.segment.padded_keys(self.hidden).to(dtype)
        if self._by_token:
            return self._token_keys().mT.to(dtype)
        return self.segment.keys_of(self._of_pages(self.segment.k, self._k_line, self._keys)).to(dtype)

    def _of_pages(self, of: Tensor, line: int, index: Tensor) -> Tensor:
        """The numbers [X, C, N] of a flat tensor's lines `index` [X, C, pages]; zeros where it is empty."""
        shape = (*index.shape[:2], self.columns)
        return lines(of, line).index_select(0, index.flatten()).view(shape) if of.numel() else of.new_zeros(shape)

    def _token_keys(self) -> Tensor:
        """K of a segment whose keys lie token by token, [X, N, C]."""
        segment, most = self.segment, int(self.segment.channels.count.max())
        if (segment.channels.count[segment.capacity > 0] == most).all():  # then keys are lines
            found = lines(segment.k, most).index_select(0, self._keys.flatten() // most)
            return found.view(*self._keys.shape, most)
        return segment.k[self._keys[..., None] + self._channel[:, None]]

    def _kept_values(self, dtype: torch.dtype) -> Tensor:
        """V [X, N, kept channels]; where no channel is pruned, [X, N, D]."""
        if isinstance(self.segment, PageSegment):
            return self.segment.padded_values(self.hidden).to(dtype)
        if self._channels is None:
            found = lines(self.segment.v, self._v_line).index_select(0, self._values.flatten())
            return found.to(dtype).view(*self._values.shape, -1)
        found = self._of_pages(self.segment.v, self._v_line, self._values)
        return found.to(dtype).masked_fill(self.hidden[:, None], 0).mT

    def weighted(self, weight: Tensor) -> Tensor:
        """The product weight V, [X, R, D], of weights [X, R, N]."""
        return self._whole(torch.bmm(weight, self._kept_values(weight.dtype)), self._channels)

    def _whole(self, x: Tensor, channels: Tensor | None) -> Tensor:
        """Values x [X, n, C] of the kept channels [X, C], with zeros in the others: [X, n, D]."""
        if channels is None:
            return x
        whole = x.new_zeros(*x.shape[:2], self.segment.head_dim + 1)  # missing channels go to the last column
        return whole.scatter_(-1, channels[:, None].expand_as(x), x)[..., :-1]

    def dense(self) -> tuple[Tensor, Tensor]:
        """K and V as they were appended, [B, H, N, D]; pruned channels are zero, hidden columns hold any number."""
        segment = self.segment
        k = self._whole(self.keys(segment.dtype).mT, segment.channels.columns().flatten(0, 1))
        v = self._whole(self._kept_values(segment.dtype), self._channels)
        return k.unflatten(0, segment.length.shape), v.unflatten(0, segment.length.shape)


def compacted(segment: Segment, stay: Tensor, flush: int = 0) -> Segment:
    """A copy of the tokens that stay, bool [B, H, n], False past a head's own.

    flush: tokens that come before the next ones leave, for which it keeps its room (`kept_room`); 0 = it keeps none
    """
    count = stay.sum(-1).cpu().numpy()
    room = kept_room(segment.capacity, count, flush) if flush else count
    new = segment.fresh(segment.channels, room, segment.values)
    if count.any():
        first = torch.argsort((~stay).to(torch.uint8), dim=-1, stable=True)[..., : int(count.max()), None]
        k, v = (x.gather(2, first.expand(-1, -1, -1, segment.head_dim)) for x in Padded(segment).dense())
        new.append(np.arange(len(count)), k, v, count)
    return new
