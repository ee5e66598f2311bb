"""What one layer's middle is: its choice on each axis of a method. What is of one prompt only comes with seal()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.channels import KeptChannels
from eval.cache.storage.eviction import Eviction
from eval.cache.storage.pages import Segment


class Codec(Protocol):
    """How the middle's numbers are stored."""

    def segment(
        self,
        channels: KeptChannels,
        capacity: np.ndarray,
        head_dim: int,
        dtype: torch.dtype,
        values: KeptChannels | None,
    ) -> Segment:
        """As Segment(...), which it takes the place of."""

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it, or None."""


class ReadChoice(Protocol):
    """Which tokens of the middle a query reads."""

    def start(self, store: Any) -> ReadState:
        """The choice's state for one sealed layer."""


class Columns(Protocol):
    """What the middle's tokens and channels are in padded tensors; see `eval.cache.attention.batched.PartLayout`."""

    hidden: Tensor

    def kept(self, rows: Tensor) -> Tensor:
        """Of x [X, R, D] the kept channels of K, [X, R, C], then zeros."""

    def token(self) -> Tensor:
        """The middle token in each column, counted from the prompt's first: [X, N]."""


class ReadState(Protocol):
    """What a choice of reads keeps beside one layer."""

    def moved(self, store: Any) -> None:
        """The middle has other tokens than before, or the batch other rows."""

    def visible(self, row: int, head: int, q: Tensor, k: Tensor, channels: Tensor) -> Tensor:
        """What queries q [G, Q, c] of one KV head read of its middle k [tokens, c], the prompt's then the tail's: bool,
        expandable to [G, Q, tokens]. channels [c]: which channels are kept, the same in both.
        """

    def sees(self, q: Tensor, keys: list[Tensor], layout: Columns) -> Tensor:
        """As `visible`, of all heads at once: what queries q [X, R, C] read of keys [X, C, N] of each part of the
        layout, bool [X, R, N], the parts side by side, in hidden columns anything. In channels that a head lacks q is
        zero.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""


@dataclass(frozen=True)
class Middle:
    """channels, values: kept channels of K and V, bool [H, D] or [B, H, D], None = all; a head that keeps no channel of
    K has no middle at all. joins: bool [H], whether tokens that leave the window while decoding join the middle, None =
    all do. bits, reads: see above, None = as they come, and everything. eviction: which of its tokens leave while
    decoding, None = none. Raises ValueError for choices that exclude each other.
    """

    channels: Tensor | None = None
    values: Tensor | None = None
    joins: Tensor | None = None
    bits: Codec | None = None
    reads: ReadChoice | None = None
    eviction: Eviction | None = None

    def __post_init__(self) -> None:
        if self.eviction is not None and (self.bits is not None or self.reads is not None):
            other = "bits" if self.bits is not None else "reads"
            raise ValueError(
                f"eviction while decoding cannot be combined with a choice on the axis {other}: it needs every token's "
                "attention weight and moves single tokens; leave one of the two out"
            )
        if self.bits is not None and self.values is not None:
            raise ValueError("pruned value channels cannot be stored in fewer bits; leave one of the two out")

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can run over such a middle, or None."""
        if self.values is not None:
            return "the kernel reads every channel of V, this method prunes some"
        if self.eviction is not None:
            return "the kernel gives no attention weights, this method evicts tokens by them while decoding"
        if self.reads is not None:
            return "the kernel reads every token, this method chooses"
        return None if self.bits is None else self.bits.why_not_kernel

    def segment(
        self,
        channels: KeptChannels,
        capacity: np.ndarray,
        head_dim: int,
        dtype: torch.dtype,
        values: KeptChannels | None,
    ) -> Segment:
        """Room for `capacity` [B, H] tokens."""
        make = Segment if self.bits is None else self.bits.segment
        return make(channels, capacity, head_dim, dtype, values)
