"""A ragged segment as padded tensors, for operations over all rows and heads at once.

Shapes: X = B H KV heads of all rows; R = G Q rows of queries of one; N padded tokens; C padded channels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.channels import KeptChannels
from eval.cache.storage.pages import PAGE, Segment, lines, round_up
from eval.cache.storage.quantised import QuantisedSegment
from eval.cache.storage.upload import upload


def channel_columns(table: KeptChannels) -> Tensor:
    """Kept channels of every head, then D in place of missing ones: [X, C] int64."""
    dim = table.index.shape[-1]
    count = upload(table.count.reshape(-1, 1), table.index.device)
    index = table.index.reshape(-1, dim)[:, : int(table.count.max())].long()
    return torch.where(torch.arange(index.shape[1], device=index.device) < count, index, dim)


class Padded:
    """A segment that holds tokens, as padded tensors.

    columns: N, whole pages
    hidden: [X, N] bool, the columns without a token

    Every padded place is read from a token that is held, so that it is finite and a weight of zero removes it. In K a
    head's first channel stands for channels that the head lacks; queries are zero there. In V another token stands for
    tokens that the head lacks.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, device = segment, segment.k.device
        (_, k_start, _, self._k_line), (_, v_start, _, self._v_line) = segment.flats()
        if segment.values is not None:  # a token begins at any number, not at a whole line
            self._v_line = 1
        holds = segment.length > 0
        starts = (k_start // self._k_line, segment.channels.count, v_start // self._v_line, segment.width)
        of_heads = np.stack([np.where(holds, n, 0).reshape(-1) for n in (segment.length, *starts)])
        length, first, count, v_first, width = upload(of_heads, device)[..., None]  # each [X, 1]
        self.columns = round_up(int(segment.length.max()), PAGE)
        token, page, channel = (
            torch.arange(n, device=device)
            for n in (self.columns, self.columns // PAGE, int(segment.channels.count.max()))
        )
        self.hidden = token >= length
        page, channel = torch.where(page * PAGE < length, page, 0), torch.where(channel < count, channel, 0)
        self._keys = (first[..., None] + page[:, None] * count[..., None] + channel[..., None]).int()  # [X, C, pages]
        some = v_start[holds & (segment.width > 0)] // self._v_line
        self._some = int(some[0]) if len(some) else 0
        tokens = token if segment.values is None else token * width
        values = torch.where(self.hidden, self._some, v_first + tokens)  # [X, N]
        self._values = values.int() if segment.values is None else values  # single numbers may be too many for int32
        self._channels = None if segment.values is None else channel_columns(segment.values)
        self._width = width

    def keys(self, dtype: torch.dtype) -> Tensor:
        """K, channel-major: [X, C, N]."""
        if isinstance(self.segment, QuantisedSegment):
            return self.segment.padded_keys(self.hidden).to(dtype)
        heads, channels, _ = self._keys.shape
        found = lines(self.segment.k, self._k_line).index_select(0, self._keys.flatten()).view(heads, channels, -1)
        return self.segment.keys_of(found).to(dtype)

    def _kept_values(self, dtype: torch.dtype) -> Tensor:
        """V [X, N, kept channels]; where no channel is pruned, [X, N, D]."""
        if isinstance(self.segment, QuantisedSegment):
            return self.segment.padded_values(self.hidden).to(dtype)
        heads, columns = self._values.shape
        if self._channels is None:
            found = lines(self.segment.v, self._v_line).index_select(0, self._values.flatten())
            return found.to(dtype).view(heads, columns, -1)
        rank = torch.arange(self._channels.shape[1], device=self._values.device)
        there = (rank < self._width)[:, None] & ~self.hidden[..., None]
        return self.segment.v[torch.where(there, self._values[..., None] + rank, self._some)].to(dtype)

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
        k = self._whole(self.keys(segment.dtype).mT, channel_columns(segment.channels))
        v = self._whole(self._kept_values(segment.dtype), self._channels)
        return k.unflatten(0, segment.length.shape), v.unflatten(0, segment.length.shape)


def compacted(segment: Segment, stay: Tensor) -> Segment:
    """A copy of the tokens that stay, with no more room than they need.

    stay: [B, H, n] bool, False past a head's own tokens; n is at least the most tokens that a head holds
    """
    count = stay.sum(-1).cpu().numpy()
    new = segment.fresh(segment.channels, count, segment.values)
    if count.any():
        first = torch.argsort((~stay).to(torch.uint8), dim=-1, stable=True)[..., : int(count.max()), None]
        k, v = (x.gather(2, first.expand(-1, -1, -1, segment.head_dim)) for x in Padded(segment).dense())
        new.append(np.arange(len(count)), k, v, count)
    return new
