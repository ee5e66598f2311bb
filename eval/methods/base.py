"""A method of the tables: a choice on each axis of how a compressed cache keeps its middle."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from leank.errors import naming
from leank.eval.cache import CompressedCache, CompressedLayer, Sizes, compressed_cache
from leank.eval.cache.storage import banded
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import middle_columns, real_positions
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.inference.prefill import prefill as dense_pass
from leank.eval.methods.axes import Axis, Bits, Channels, PromptPass, Reads, Tokens
from leank.eval.methods.registry import AXES, name_of
from leank.precision import Precision
from leank.typed import Checked, Count, OneOf, Positive

BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class Method(Checked):
    """One row of the tables; without a choice on any axis it is the dense cache.

    label: str: its name in the tables.
    channels, tokens, bits, reads, prefill: a choice on that axis, default None: all of the middle is kept as it is.
    sink, window: int, tokens, default 128 and 1024: first and last tokens that are kept whole.
    flush: int, tokens, default 32: how many tokens leave the window at a time.
    backend: "auto", "torch" or "triton", default "auto": see eval.cache.compressed_cache.
    matched: mapping or None: which settings `match` moved (eval.run.build), and to what bytes.

    Raises ValueError for choices that exclude each other or do not fit sink, window and flush.
    """

    label: str
    channels: Channels | None = None
    tokens: Tokens | None = None
    bits: Bits | None = None
    reads: Reads | None = None
    prefill: PromptPass | None = None
    sink: Count = 128
    window: Count = 1024
    flush: Positive = 32
    backend: Annotated[str, OneOf(*BACKENDS)] = "auto"
    matched: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.column_sums and self.prefill is not None:
            raise ValueError(
                f"method.{self.label}: its choice of tokens needs the attention of all queries to every token, which a "
                "prefill that drops tokens does not give; leave out prefill, or choose tokens by snapkv"
            )
        for choice in self.axes.values():
            with naming(f"method.{self.label}"):
                choice.check_sizes(Sizes(self.sink, self.window, self.flush))

    @property
    def axes(self) -> dict[str, Axis]:
        """The choices made, by axis."""
        return {name: choice for name in AXES if (choice := getattr(self, name)) is not None}

    @property
    def obs_queries(self) -> int:
        """How many of the prompt's last queries this method needs."""
        return max((choice.obs_queries for choice in self.axes.values()), default=0)

    @property
    def column_sums(self) -> bool:
        """Whether this method needs the attention that each key receives from all queries of the prompt."""
        return any(choice.column_sums for choice in self.axes.values())

    def layout(self) -> Precision | None:
        """The bits per channel of its mask, or None. Raises ValueError beside bits, and if flush splits groups."""
        found = None if self.channels is None else self.channels.precision()
        if found is not None:
            if self.bits is not None:
                raise ValueError(
                    f"method.{self.label}: its mask has bits per channel, and method.{self.label}.bits="
                    f"{name_of(self.bits)} would store them otherwise; leave out one of the two"
                )
            with naming(f"method.{self.label}"):
                banded.check_flush(self.flush)
        return found

    def config(self) -> dict[str, Any]:
        """What the answers depend on, as JSON: choices and sizes; empty for the dense cache."""
        if not self.axes:
            return {}
        chosen = {name: {"name": name_of(choice), **choice.identity()} for name, choice in self.axes.items()}
        matched = {} if self.matched is None else {"matched": dict(self.matched)}
        return {**chosen, "sink": self.sink, "window": self.window, "flush": self.flush, **matched}

    def run_prefill(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        real: Tensor | None,
        room: int,
        chunk: int | None = None,
        obs_queries: int = 0,
    ) -> Prefill:
        """The pass over the prompts from which `cache` is built: this method's own, or the dense one.

        obs_queries: last queries that other methods on this pass need, too; others: see eval.inference.prefill.prefill.
        """
        queries = max(self.obs_queries, obs_queries)
        if self.prefill is None:
            return dense_pass(model, ids, real, room, queries, chunk, self.column_sums)
        return self.prefill.run(model, ids, real, room, queries, chunk)

    def cache(self, model: PreTrainedModel, prefill: Prefill) -> Cache:
        """The cache with the prompts of its pass, or of one that it can share, in it, ready to decode."""
        if not self.axes or not any(isinstance(layer, PromptLayer) for layer in prefill.layers):
            return prefill.fork()
        return self.compressed(model, prefill)

    def compressed(self, model: PreTrainedModel, prefill: Prefill) -> CompressedCache:
        """`cache` in this project's own storage, which the kernel reads, also where no axis has a choice."""
        config, sizes = model.config.get_text_config(decoder=True), Sizes(self.sink, self.window, self.flush)
        if self.tokens is not None:
            prefill = replace(
                prefill, selected=_selected(self.tokens.keep_mask(prefill, config, sizes), prefill, sizes)
            )
        middles = self._middles(prefill, config, sizes)
        cache = compressed_cache(model, middles, self.sink, self.window, self.flush, self.backend)
        tokens = prefill.selected or [None] * len(middles)
        for index, (layer, dense) in enumerate(zip(cache.layers, prefill.layers, strict=True)):
            if isinstance(layer, CompressedLayer):
                real, columns = dense.real(prefill.real), dense.get_seq_length()
                layer.compress(dense.keys, dense.values, real, tokens[index], dense.column_sums, columns)
            else:
                cache.layers[index] = copy.copy(dense)
        return cache

    def _middles(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Middle]:
        channels = None if self.channels is None else self.channels.keep_mask(prefill, config)
        values = None if self.channels is None else self.channels.keep_value_mask(prefill, config)
        means = None if self.channels is None else self.channels.mean_keys()
        layout = self.layout()
        codecs: list[Codec | None] = [None] * len(prefill.layers)
        if layout is not None:
            codecs = [*banded.codecs(layout)]
        elif self.bits is not None:
            codecs = [self.bits.of_layer(index, prefill) for index in range(len(codecs))]
        joins = None if self.tokens is None else self.tokens.joins(config)
        return [
            Middle(
                channels=None if channels is None else channels[..., index, :, :],
                values=None if values is None else values[..., index, :, :],
                joins=None if joins is None else joins[index],
                bits=codecs[index],
                reads=None if self.reads is None else self.reads.of_layer(index),
                eviction=self.tokens.eviction(index, config, sizes)
                if self.tokens is not None and isinstance(layer, PromptLayer)
                else None,
                center=None if means is None else means[index],
            )
            for index, layer in enumerate(prefill.layers)
        ]


def _selected(tokens: list[Tensor | None], prefill: Prefill, sizes: Sizes) -> list[Tensor | None]:
    """The chosen tokens with sink and window, without padding: bool [B, H, T] per layer, None if all stay."""
    selected: list[Tensor | None] = []
    for layer, keep in zip(prefill.layers, tokens, strict=True):
        if keep is not None:
            none_seen = torch.zeros(len(keep), dtype=torch.long, device=keep.device)
            position = real_positions(none_seen, keep.shape[-1], layer.real(prefill.real))
            keep = (position >= 0)[:, None] & (keep | ~middle_columns(position, sizes)[:, None])
        selected.append(keep)
    return selected
