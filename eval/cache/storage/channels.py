"""The *channels* axis of a compressed cache: which channels of a middle key stay (LeanK, section 3.3)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.upload import upload
from leank_train.mask import ChannelMask

MaskLike: TypeAlias = ChannelMask | Tensor | str | os.PathLike[str]


@dataclass
class KeptChannels:
    """Kept channels per row and KV head, ragged.

    count: [B, H] on the host, how many channels a head keeps
    index: [B, H, D] int32 on the cache's device, the kept channels in ascending order, then zeros
    first: [B, H] on the host, how many of them are labels, which stand before the others; None = there are none
    """

    count: np.ndarray
    index: Tensor
    first: np.ndarray | None = None

    @classmethod
    def of(cls, keep: Tensor | None, k: Tensor, labels: Tensor | None = None) -> KeptChannels:
        """The table of a mask for keys or values.

        keep: [H, D] or [B, H, D], True = kept, None = every channel
        k: [B, H, T, D], the keys or values
        labels: bool [H, D], the channels that stand first where they are kept, None = no channel does

        Raises ValueError if the mask was made for another batch, number of heads or head_dim.
        """
        batch, heads, _, dim = k.shape
        keep = torch.ones(heads, dim, dtype=torch.bool) if keep is None else keep.bool()
        if keep.shape[-2:] != (heads, dim) or keep.ndim > 3 or (keep.ndim == 3 and len(keep) != batch):
            rows = f"{len(keep)} rows of " if keep.ndim == 3 else ""
            raise ValueError(
                f"mask is for {rows}{keep.shape[-2]} KV heads of {keep.shape[-1]} channels, "
                f"the model has {heads} of {dim} (batch {batch}): use the mask made for this model and batch"
            )
        count = keep.sum(-1)
        labels = None if labels is None else labels.to(keep.device) & keep
        rank = (~keep).to(torch.uint8) if labels is None else 2 - keep.to(torch.uint8) - labels.to(torch.uint8)
        order = torch.argsort(rank, dim=-1, stable=True)
        index = torch.where(torch.arange(dim, device=keep.device) < count[..., None], order, 0).to(torch.int32)
        on_device = index if index.device == k.device else upload(index.cpu().numpy(), k.device)

        def of_rows(count: Tensor) -> np.ndarray:
            return np.broadcast_to(count.cpu().numpy().astype(np.int64), (batch, heads))

        first = None if labels is None else of_rows(labels.sum(-1))
        return cls(of_rows(count), on_device.expand(batch, heads, dim), first)

    @property
    def in_order(self) -> bool:
        """Whether every head keeps every channel where it was."""
        return self.first is None and bool((self.count == self.index.shape[-1]).all())

    def select(self, rows: Tensor) -> KeptChannels:
        """The table of the batch `rows` [R], in that order."""
        at = rows.cpu().numpy()
        first = None if self.first is None else self.first[at]
        return KeptChannels(self.count[at], self.index[rows.to(self.index.device)], first)


def layer_masks(mask: object) -> Tensor:
    """The bool tensor [L, H, D], True = kept, of a ChannelMask, of the path of its file, or of a bool tensor.

    Raises ValueError for numbers that are not bool (0.01 would count as kept), or another number of axes.
    """
    if isinstance(mask, str | os.PathLike):
        return ChannelMask.load(mask).keep
    try:
        keep = torch.as_tensor(getattr(mask, "keep", mask))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"a mask is a ChannelMask, the path of its file, or a bool tensor, got {type(mask).__name__}"
        ) from None
    return ChannelMask(keep).keep
