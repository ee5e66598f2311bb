"""The five axes on which a method chooses; every choice is a file of its own with one small frozen dataclass.

The fields of such a class are its configuration. A combination is a Method (eval.methods.base), never a new class.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.channel_scores import pruned
from leank.data_gen.task import Sample
from leank.eval.cache.storage import codecs, middle
from leank.eval.cache.storage.eviction import Eviction
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill
from leank.precision import Precision
from leank.shape import kv_shape
from leank.typed import Checked

Observe = Callable[[Sample, int], Prefill]  # (a sample, obs_queries) -> its dense pass


@dataclass(frozen=True)
class Held:
    """What every KV head holds of one prompt, counted in tokens and channels; its bytes are eval.methods.memory's.

    ends, middle: int [L, H]: tokens in sink and window, which are whole, and in the middle.
    k, v: int [L, H]: channels of the middle's K and V.
    dim: int: head_dim.
    itemsize: int, bytes: size of a number that is not packed.
    """

    ends: np.ndarray
    middle: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dim: int
    itemsize: int

    @property
    def dtype(self) -> torch.dtype:
        """A type of such numbers."""
        return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[self.itemsize]


class Axis(Checked):
    """A choice on one axis.

    Its fields hold what their annotations say (`leank.typed`); `check` adds what depends on the model.
    Fields whose names begin with an underscore are no settings.

    free: str or None: the setting that says how much is kept, one of its own or the cache's `window`; `match` moves it.
    registered: str or None: the name that `method` gives it in configurations.
    column_sums: bool: whether it needs the attention that each key receives from all queries of the prompt.
    """

    free: str | None = None
    registered: str | None = None
    column_sums: bool = False

    @property
    def obs_queries(self) -> int:
        """How many of the prompt's last queries it needs: those of its setting `queries`, if it has one."""
        return getattr(self, "queries", 0)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError or FileNotFoundError if this cannot run on such a model; no weights are loaded yet."""

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise ValueError if this makes no sense with such a sink, window and flush."""

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        """Look at samples once, before the first batch."""

    def identity(self) -> dict[str, object]:
        """What the answers depend on, as JSON; by default every setting."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # every choice is a dataclass
        return {name: getattr(self, name) for name in names if not name.startswith("_")}

    def extra_bytes(self, held: Held) -> float:
        """Bytes that this holds for one prompt in addition to K and V."""
        return 0


Choice = TypeVar("Choice", bound=Axis)


def method(name: str) -> Callable[[type[Choice]], type[Choice]]:
    """Return the decorator that gives a choice's class its file's name, eval/methods/<axis>/<name>.py."""

    def decorate(kind: type[Choice]) -> type[Choice]:
        kind.registered = name
        return kind

    return decorate


class Channels(Axis, ABC):
    """Which channels of the middle's keys stay."""

    @abstractmethod
    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        """Kept channels of K: bool [L, H, D], or [B, L, H, D]; `prefill.selected` says which tokens are kept."""

    def keep_value_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor | None:
        """Kept channels of V, in the shape of `keep_mask`; None if all stay."""
        return None

    def mean_keys(self) -> Tensor | None:
        """What stands for pruned channels of K, [L, H, D]; None is 0."""
        return None

    def precision(self) -> Precision | None:
        """In how many bits the channels of K, and V, are stored; None leaves that to the axis of bits."""
        return None

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """How many channels of K and of V each head keeps, each [L, H]; None if they depend on the prompt."""
        return None


class Uniform(Channels):
    """A choice that keeps equally many channels in every head: floor(ratio * D) of K are pruned, none of V."""

    ratio: float
    free = "ratio"

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
        layers, heads, dim = kv_shape(config)
        return np.full((layers, heads), dim - pruned(dim, self.ratio)), np.full((layers, heads), dim)


class Tokens(Axis, ABC):
    """Which tokens of the middle stay."""

    @abstractmethod
    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        """For each layer, tokens that stay: bool [B, H, T], None if all, or for sliding windows; the ends always do."""

    def joins(self, config: PreTrainedConfig) -> Tensor | None:
        """Whether tokens that leave the window while decoding join the middle: bool [L, H], None if all do."""
        return None

    def eviction(self, index: int, config: PreTrainedConfig, sizes: Sizes) -> Eviction | None:
        """Which tokens leave the middle of layer `index` while decoding; None if none leave."""
        return None

    def most(self, sizes: Sizes) -> int | None:
        """How many tokens of a head's middle stay while decoding; None if all that join it do, or scores decide."""
        return None

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray | None:
        """How many tokens of a prompt's middle each head keeps [L, H]; a shorter middle is kept whole.

        columns: tokens that each layer gets of the prompt.
        Returns None if the counts depend on the prompt, and means over the heads where `settled` is false.
        """
        return None

    @property
    def settled(self) -> bool:
        """Whether it is known already which heads keep how much."""
        return True


class Bits(Axis, ABC):
    """How the numbers of the middle are stored."""

    @abstractmethod
    def of_layer(self, index: int, prefill: Prefill) -> codecs.Codec | None:
        """The codec of one layer for these prompts; None stores the numbers in the model's type."""

    @abstractmethod
    def sized(self, index: int, held: Held) -> codecs.Codec | None:
        """A codec that takes as many bytes as the one of this layer, before any prompt or calibration; None as there.

        held: of all layers
        """


class Reads(Axis, ABC):
    """Which tokens of the middle a decoding step reads."""

    @abstractmethod
    def of_layer(self, index: int) -> middle.ReadChoice | None:
        """The rule of one layer; None reads all tokens."""


class PromptPass(Axis, ABC):
    """A pass over the prompt that drops tokens on its way up, in place of the dense one."""

    @abstractmethod
    def run(
        self, model: PreTrainedModel, ids: Tensor, real: Tensor | None, room: int, obs_queries: int, chunk: int | None
    ) -> Prefill:
        """Run the pass; parameters and result are those of eval.inference.prefill.prefill."""

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]] | None:
        """How many of a prompt's `length` tokens each layer gets, at least and at most; None if unknown."""
        return None
