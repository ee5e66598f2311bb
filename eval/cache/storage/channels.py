"""The *channels* axis of a compressed cache: which channels of a middle key stay (LeanK, section 3.3)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.upload import upload
from leank.mask import ChannelMask

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

MaskLike: TypeAlias = ChannelMask | Tensor | str | os.PathLike[str]


@dataclass
class KeptChannels:
    """Kept channels per row and KV head, ragged."""

    count: np.ndarray  # [B, H] on the host, how many channels a head keeps
    # [B, H, D] int32 on the cache's device, the kept channels in ascending order, labels first, then zeros
    index: Tensor
    # [B, H] on the host, how many of them are labels, which stand before the others; None = there are none
    first: np.ndarray | None = None
    _ranks: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, keep: Tensor | None, k: Tensor, labels: Tensor | None = None) -> KeptChannels:
        """The table of a mask [H, D] or [B, H, D], None = every channel, for keys or values k [B, H, T, D].

        labels: bool or uint8 [H, D], kept channels of a larger number stand before the others, None = no channel does
        Raises ValueError if the mask was made for another batch, number of heads or head_dim.
        """
        batch, heads, _, dim = k.shape
        keep = torch.ones(heads, dim, dtype=torch.bool) if keep is None else keep.bool()
        if keep.shape[-2:] != (heads, dim) or keep.ndim > 3 or (keep.ndim == 3 and len(keep) != batch):
            raise ValueError(
                f"a mask of shape {tuple(keep.shape)} does not fit {heads} KV heads of {dim} channels in {batch} rows: "
                "use the mask made for this model and batch"
            )
        count = keep.sum(-1)
        labels = None if labels is None else labels.to(keep.device, torch.uint8) * keep
        rank = (~keep).to(torch.int16) if labels is None else -(keep.to(torch.int16) + labels)
        order = torch.argsort(rank, dim=-1, stable=True)
        index = torch.where(torch.arange(dim, device=keep.device) < count[..., None], order, 0).to(torch.int32)
        on_device = index if index.device == k.device else upload(index.cpu().numpy(), k.device)

        def of_rows(count: Tensor) -> np.ndarray:
            return np.broadcast_to(count.cpu().numpy().astype(np.int64), (batch, heads))

        first = None if labels is None else of_rows((labels > 0).sum(-1))
        return cls(of_rows(count), on_device.expand(batch, heads, dim), first)

    @property
    def in_order(self) -> bool:
        """Whether every head keeps every channel where it was."""
        return self.first is None and bool((self.count == self.index.shape[-1]).all())

    def ranks(self) -> Tensor:
        """The place of each channel among those that its head keeps, -1 = pruned: [B, H, D] int32; made once."""
        if self._ranks is None:
            batch, heads, dim = self.index.shape
            shared = self.index.stride(0) == 0  # one table for all rows
            index, count = (self.index[:1], self.count[:1]) if shared else (self.index, self.count)
            place = torch.arange(dim, device=index.device, dtype=torch.int32)
            own = place < upload(count, index.device)[..., None]
            ranks = torch.full((len(index), heads, dim + 1), -1, dtype=torch.int32, device=index.device)
            ranks.scatter_(2, torch.where(own, index, dim).long(), place.expand_as(index).contiguous())
            self._ranks = ranks[..., :dim].contiguous().expand(batch, heads, dim)
        return self._ranks

    def mask(self) -> Tensor:
        """Which channels are kept, bool [B, H, D]."""
        keep = torch.zeros(*self.index.shape[:2], self.index.shape[2] + 1, dtype=torch.bool, device=self.index.device)
        return keep.scatter_(2, self.columns(), True)[..., :-1]

    def columns(self) -> Tensor:
        """The kept channels of every head, then D in place of missing ones: [B, H, C] int64."""
        count = upload(self.count[..., None], self.index.device)
        index = self.index[..., : int(self.count.max())].long()
        return torch.where(torch.arange(index.shape[-1], device=index.device) < count, index, self.index.shape[2])

    def keep_ranks(self, at: Tensor) -> None:
        """Let `ranks` lie at the tensor `at`, which holds them."""
        self._ranks = at

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        return {"index": self.index} | ({} if self._ranks is None else {"ranks": self._ranks})

    def select(self, rows: Tensor) -> KeptChannels:
        """The table of the batch `rows` [R], in that order."""
        at = rows.cpu().numpy()
        first = None if self.first is None else self.first[at]
        return KeptChannels(self.count[at], self.index[rows.to(self.index.device)], first)


def layer_masks(mask: object, config: PreTrainedConfig | None = None) -> Tensor:
    """The bool tensor [L, H, D], True = kept, of a ChannelMask, of the path of its file, or of a bool tensor.

    config: of the model that the mask is used on, None = not known; a mask that names another model warns
    Raises ValueError for numbers that are not bool, another number of axes, or a ChannelMask that does not fit.
    """
    if isinstance(mask, str | os.PathLike):
        mask = ChannelMask.load(mask)
    if isinstance(mask, ChannelMask) and config is not None:
        mask.check_model(config)
    return mask.keep if isinstance(mask, ChannelMask) else ChannelMask(torch.as_tensor(mask)).keep
