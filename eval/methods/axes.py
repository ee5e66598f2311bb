"""The axes on which a method chooses: every choice is a file of its own with one small frozen dataclass.

The fields of such a class are its configuration. A combination is a Method (eval.methods.base), never a new class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from eval.cache.storage import middle
from eval.cache.storage.eviction import Eviction
from eval.cache.storage.store import Sizes
from eval.inference.models import shape_of
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.held import Held
from leank_train.channel_scores import pruned
from leank_train.common.typed import Checked

Observe = Callable[[Any, int], Prefill]  # (data_gen Sample, obs_queries) -> its dense pass


class Axis(Checked):
    """A choice on one axis.

    obs_queries: how many of the prompt's last queries it wants to see (`PromptLayer.queries`); column_sums: whether it
    wants what each key receives from all of them (`PromptLayer.column_sums`). free: the setting that says how much is
    kept, of the choice or of the cache (`window`); `match` moves it. Its fields hold what their annotations say
    (`leank_train.common.typed`); `check` adds what depends on the model.
    """

    obs_queries = 0
    column_sums = False
    free: str | None = None

    def check(self, config: Any, tokenizer: Any) -> None:
        """Raise ValueError or FileNotFoundError if this cannot run on such a model; no weights are loaded yet."""

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise ValueError if this makes no sense beside such a sink, window and flush."""

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        """Look at samples once, before the first batch."""

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as JSON; by default every field."""
        return asdict(self)  # type: ignore[call-overload]

    def extra_bytes(self, held: Held) -> float:
        """Bytes that this holds of a prompt beside K and V."""
        return 0


class Channels(Axis, ABC):
    """Which channels of the middle's keys stay."""

    @abstractmethod
    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        """Kept channels of K, bool [L, H, D] for all rows or [B, L, H, D].

        `prefill.selected` says which tokens the method keeps, where it does not keep all.
        """

    def keep_value_mask(self, prefill: Prefill, config: Any) -> Tensor | None:
        """Kept channels of V, as `keep`; None = all."""
        return None

    def kept_counts(self, config: Any, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """How many channels of K and of V each head keeps of a prompt of `length` tokens [L, H]; None = who knows."""
        return None


class Uniform(Channels):
    """As many in every head: all of V and, of K, what is left when floor(ratio * D) channels are pruned."""

    ratio: float
    free = "ratio"

    def kept_counts(self, config: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        layers, heads, dim = shape_of(config)
        return np.full((layers, heads), dim - pruned(dim, self.ratio)), np.full((layers, heads), dim)


class Tokens(Axis, ABC):
    """Which tokens of the middle stay."""

    @abstractmethod
    def keep_mask(self, prefill: Prefill, config: Any, sizes: Sizes) -> list[Tensor | None]:
        """Of every layer, the prompt's tokens that stay, bool [B, H, T] over its columns; None = all of the layer.

        Sink and window stay whatever this says. Layers whose own attention slides are None.
        """

    def joins(self, config: Any) -> Tensor | None:
        """Bool [L, H]: whether tokens that leave the window while decoding join the middle; None = all do."""
        return None

    def eviction(self, layer: PromptLayer, config: Any, sizes: Sizes) -> Eviction | None:
        """Which tokens leave the middle of one layer while decoding; None = none."""
        return None

    def kept_counts(self, config: Any, columns: list[int], sizes: Sizes) -> np.ndarray | None:
        """How many tokens of a prompt's middle each head keeps [L, H], all if there are fewer; None = who knows.

        columns: tokens that each layer gets of the prompt. Where `settled` is false these are means over the heads.
        """
        return None

    @property
    def settled(self) -> bool:
        """Whether it is known which heads keep how much."""
        return True


class Bits(Axis, ABC):
    """How the numbers of the middle are stored."""

    @abstractmethod
    def of_layer(self, index: int, config: Any) -> middle.Codec | None:
        """The choice for one layer; None = as they come."""

    @abstractmethod
    def packed(self, held: Held) -> float:
        """Bytes of the middle's K and V."""


class Reads(Axis, ABC):
    """Which tokens of the middle a decoding step reads."""

    @abstractmethod
    def of_layer(self, index: int, config: Any) -> middle.ReadChoice | None:
        """The choice for one layer; None = all of them."""


class PromptPass(Axis, ABC):
    """A pass over the prompt that is not the dense one: it drops tokens on its way up."""

    @abstractmethod
    def run(
        self, model: PreTrainedModel, ids: Tensor, real: Tensor | None, room: int, obs_queries: int, chunk: int | None
    ) -> Prefill:
        """As eval.inference.prefill.prefill, which it takes the place of."""

    def kept_counts(self, config: Any, length: int) -> tuple[list[int], list[int]] | None:
        """How many of a prompt's `length` tokens each layer gets, at least and at most; None = who knows."""
        return None
