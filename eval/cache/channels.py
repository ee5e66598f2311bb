"""The *channels* axis of a compressed cache: which channels of a middle key stay (LeanK, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class KeptChannels:
    """Kept channels per row and KV head, ragged.

    count: [B, H] how many channels a head keeps (host); 0 = the head keeps no middle at all.
    index: [B, H, D] int32, the kept channels in ascending order, then zeros (device of the cache).
    """

    count: np.ndarray
    index: Tensor

    def select(self, rows: Tensor) -> KeptChannels:
        """The table of the batch `rows` [R], in that order."""
        return KeptChannels(self.count[rows.cpu().numpy()], self.index[rows.to(self.index.device)])


class MaskChannels:
    """A fixed mask, the same for every row and token: LeanK's beta for one layer.

    keep: [H, D] bool, True = kept.
    """

    def __init__(self, keep: Tensor):
        if keep.ndim != 2:
            raise ValueError(f"a layer's mask has shape [kv_heads, head_dim], got {tuple(keep.shape)}")
        self.keep = keep.bool().cpu()

    def choose(self, k: Tensor) -> KeptChannels:
        """The channels to keep of the prompt's keys k [B, H, T, D].

        Raises ValueError if the mask was made for another number of heads or another head_dim.
        """
        batch, heads, _, dim = k.shape
        if self.keep.shape != (heads, dim):
            raise ValueError(
                f"mask is for {self.keep.shape[0]} KV heads of {self.keep.shape[1]} channels, "
                f"the model has {heads} of {dim}: use the mask trained for this model"
            )
        count = self.keep.sum(-1)
        order = torch.argsort(~self.keep, dim=-1, stable=True)
        index = torch.where(torch.arange(dim) < count[:, None], order, 0).to(torch.int32)
        return KeptChannels(
            np.broadcast_to(count.numpy().astype(np.int64), (batch, heads)),
            index.to(k.device).expand(batch, heads, dim),
        )


def layer_masks(mask: Any) -> Tensor:
    """The bool tensor [L, H, D] (True = kept) in a ChannelMask-like object (`.keep`) or tensor.

    Raises ValueError if it has another number of axes.
    """
    keep = torch.as_tensor(getattr(mask, "keep", mask)).bool()
    if keep.ndim != 3:
        raise ValueError(f"a mask has shape [layers, kv_heads, head_dim], got {tuple(keep.shape)}")
    return keep
