"""Middle keys as short records, one per token and KV head: the coded form of eval.cache.storage.segment.

A code turns a key into a record of fewer numbers and back. Records lie where the kept channels of a key would lie; the
values stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.segment import Extent, Segment


class KeyCode(Protocol):
    """How the keys of one layer become records.

    width: numbers in a record, fewer than head_dim
    """

    @property
    def width(self) -> int:
        """Numbers in a record."""

    def encode(self, keys: Tensor, rows: np.ndarray) -> Tensor:
        """Records [R, H, n, width] of keys [R, H, n, D] of some rows [R] of the batch."""

    def decode(self, records: Tensor, rows: np.ndarray) -> Tensor:
        """Keys [R, H, n, D] of records [R, H, n, width]."""

    def select(self, rows: Tensor) -> Self:
        """The code of the batch `rows` [R] of the present one."""

    def to(self, device: torch.device) -> Self:
        """The code on a device."""

    def tensors(self) -> dict[str, Tensor]:
        """What the code holds for these prompts, by name; weights that serve every prompt are not among it."""


@dataclass(frozen=True)
class Coding:
    """The codec of one layer (eval.cache.storage.middle.Codec): keys as records of a code.

    code: the code
    """

    kernels: ClassVar[str | None] = None
    code: KeyCode

    def segment(self, extent: Extent) -> CodedSegment:
        """An empty segment of records.

        Raises ValueError unless K keeps all its channels.
        """
        if (extent.channels.count < extent.head_dim).any() or extent.values is not None:
            raise ValueError("keys that are stored as records keep all channels; leave out the choice of channels")
        return CodedSegment(extent, self.code.to(extent.channels.index.device))

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it."""
        return "the kernel reads keys channel by channel, this method stores them as records"


class CodedSegment(Segment):
    """A Segment whose keys are records; its `channels` are the numbers of a record."""

    def __init__(self, extent: Extent, code: KeyCode) -> None:
        """Make room; extent: of whole keys, or of their records."""
        self.code = code
        super().__init__(replace(extent, channels=first_channels(extent.channels, code.width)))

    def _of_form(self, extent: Extent) -> CodedSegment:
        return CodedSegment(extent, self.code)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens; the parameters are those of `Segment.append`."""
        records = self.code.encode(k, rows).to(self.dtype)
        padded = pad(records, (0, self.head_dim - records.shape[-1]))
        super().append(rows, padded, v, count)

    def keys_of(self, records: Tensor) -> Tensor:
        """Keys [B H, D, N] of the records [B H, width, N] of all heads."""
        batch = self.length.shape[0]
        found = self.code.decode(records.mT.unflatten(0, (batch, -1)), np.arange(batch))
        return found.flatten(0, 1).mT

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """K and V [n, D] of one head."""
        records, values = super().read(row, head)
        of_all = records.new_zeros(1, self.length.shape[1], *records.shape)
        of_all[0, head] = records
        return self.code.decode(of_all, np.array([row]))[0, head], values

    def select(self, rows: Tensor, channels: KeptChannels, values: KeptChannels | None) -> Segment:
        """The segment of the batch `rows` [R], in that order."""
        new = super().select(rows, channels, values)
        assert isinstance(new, CodedSegment)
        new.code = self.code.select(rows)
        return new

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        super().to(device)
        self.code = self.code.to(device)
        self.channels.index = self.channels.index.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        return {**super().tensors(), **self.code.tensors()}


def first_channels(channels: KeptChannels, count: int) -> KeptChannels:
    """A table of the first `count` channels, for as many rows and heads."""
    place = torch.arange(channels.index.shape[-1], device=channels.index.device, dtype=torch.int32)
    index = torch.where(place < count, place, 0).expand_as(channels.index)
    return KeptChannels(np.full_like(channels.count, count), index)
