"""How one layer keeps its middle: its choice on each axis of a method.

A choice here serves every prompt. Tokens and scores of one prompt are arguments of `CompressedLayer.compress`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.eviction import Eviction
from leank.eval.cache.storage.segment import Extent, Segment, TokenSegment


class ReadChoice(Protocol):
    """Which tokens of the middle a query reads.

    labels: bool [H, D], the channels by which tokens are ranked; they are stored before the others. None = every
        channel. A choice that lacks the attribute has None.
    """

    def start(self, store: Any) -> ReadState:
        """The choice's state for one compressed layer, whose Store it is given."""


class ReadState(Protocol):
    """What a choice of reads keeps for one layer.

    ranking: what the kernel must know to choose by itself (`eval.cache.attention.ranking`). A state that lacks the
        attribute chooses in plain PyTorch alone.
    """

    def moved(self, store: Any) -> None:
        """The middle has other tokens than before, or the batch other rows; what runs the layer may know it already."""

    def sees(self, q: Tensor, keys: list[Tensor], layout: Any) -> Tensor:
        """Which tokens the queries of all heads read, bool [X, R, N], the parts side by side; hidden ones may be any.

        q: [X, R, C], zero in channels that a head lacks; keys: [X, C, N] of each part of the layout
        layout: the `eval.cache.attention.batched.PartLayout` of the store
        """

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""


@dataclass(frozen=True)
class Middle:
    """How a layer keeps its middle.

    channels: kept channels of K, bool [H, D] or [B, H, D], None = all; a head without channels has no middle
    values: kept channels of V, bool [H, D] or [B, H, D], None = all
    joins: bool [H], whether tokens that leave the window while decoding join the middle, None = in every head
    bits: how numbers are stored, None = in the model's dtype
    reads: which tokens a query reads, None = every token
    eviction: which tokens leave while decoding, None = none
    center: float [H, D], what every key loses before it is stored, in sink and window too, None = nothing. A softmax
        does not change if all keys lose the same vector, so with the mean key here, a pruned channel counts as its mean
        instead of 0 (`ChannelMask.mean_keys`).

    Raises ValueError for choices that exclude each other.
    """

    channels: Tensor | None = None
    values: Tensor | None = None
    joins: Tensor | None = None
    bits: Codec | None = None
    reads: ReadChoice | None = None
    eviction: Eviction | None = None
    center: Tensor | None = None

    def __post_init__(self) -> None:
        if self.eviction is not None and (self.bits is not None or self.reads is not None):
            other = "bits" if self.bits is not None else "reads"
            raise ValueError(
                f"eviction while decoding cannot be combined with a choice on the axis {other}: it needs every token's "
                "attention weight and moves single tokens; leave one of the two out"
            )
        if self.bits is not None and self.values is not None:
            raise ValueError("pruned value channels cannot be stored in fewer bits; leave one of the two out")

    def center_on(self, device: torch.device) -> Tensor | None:
        """`center` in the form in which keys lose it, float32 [H, 1, D]."""
        return None if self.center is None else self.center.to(device, torch.float32)[:, None]

    @property
    def labels(self) -> Tensor | None:
        """Numbers of channels [H, D], of which those of larger numbers are stored before the others; None = none.

        With bits they are the codec's: the kernel, which alone gains from the order of reads, reads no codes by choice.
        """
        return getattr(self.reads, "labels", None) if self.bits is None else self.bits.order

    def joining(self, channels: KeptChannels) -> np.ndarray:
        """Which heads [B, H] take tokens that leave the window, bool."""
        has_middle = channels.count > 0
        return has_middle if self.joins is None else has_middle & self.joins.cpu().numpy()

    def segment(self, extent: Extent) -> Segment:
        """An empty segment of the form that these choices need."""
        if self.bits is not None:
            return self.bits.segment(extent)
        return Segment(extent) if self.reads is None else TokenSegment(extent)
