"""The axes on which a method chooses: every choice is a file of its own with one small frozen dataclass.

The fields of such a class are its configuration. A combination is a Method (eval.methods.base), never a new class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from eval.cache import middle
from eval.cache.eviction import Eviction
from eval.cache.store import Sizes
from eval.prefill import Prefill, PromptLayer

Observe = Callable[[Any, int], Prefill]  # (data_gen Sample, obs_queries) -> its dense pass


class Axis:
    """A choice on one axis.

    obs_queries: how many of the prompt's last queries it wants to see (`PromptLayer.queries`); column_sums: whether it
    wants what each key receives from all of them (`PromptLayer.column_sums`).
    """

    obs_queries = 0
    column_sums = False

    def check(self, config: Any, tokenizer: Any) -> None:
        """Raise ValueError or FileNotFoundError if this cannot run on such a model; no weights are loaded yet."""

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise ValueError if this makes no sense beside such a sink, window and flush."""

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        """Look at samples once, before the first batch."""

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as JSON; by default every field."""
        return asdict(self)  # type: ignore[call-overload]


class Channels(Axis):
    """Which channels of the middle's keys stay."""

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        """Kept channels of K, bool [L, H, D] for all rows or [B, L, H, D].

        `prefill.selected` says which tokens the method keeps, where it does not keep all.
        """
        raise NotImplementedError

    def keep_values(self, prefill: Prefill, config: Any) -> Tensor | None:
        """Kept channels of V, as `keep`; None = all."""
        return None


class Tokens(Axis):
    """Which tokens of the middle stay."""

    def keep(self, prefill: Prefill, config: Any, sizes: Sizes) -> list[Tensor | None]:
        """Of every layer, the prompt's tokens that stay, bool [B, H, T] over its columns; None = all of the layer.

        Sink and window stay whatever this says. Layers whose own attention slides are None.
        """
        raise NotImplementedError

    def joins(self, config: Any) -> Tensor | None:
        """Bool [L, H]: whether tokens that leave the window while decoding join the middle; None = all do."""
        return None

    def eviction(self, layer: PromptLayer, config: Any, sizes: Sizes) -> Eviction | None:
        """Which tokens leave the middle of one layer while decoding; None = none."""
        return None


class Bits(Axis):
    """How the numbers of the middle are stored."""

    def of_layer(self, index: int, config: Any) -> middle.Bits | None:
        """The choice for one layer; None = as they come."""
        raise NotImplementedError


class Reads(Axis):
    """Which tokens of the middle a decoding step reads."""

    def of_layer(self, index: int, config: Any) -> middle.Reads | None:
        """The choice for one layer; None = all of them."""
        raise NotImplementedError


class PrefillPass(Axis):
    """A pass over the prompt that is not the dense one: it drops tokens on its way up."""

    def run(
        self, model: PreTrainedModel, ids: Tensor, real: Tensor | None, room: int, obs_queries: int, chunk: int | None
    ) -> Prefill:
        """As eval.prefill.prefill, which it takes the place of."""
        raise NotImplementedError
