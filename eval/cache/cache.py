"""The cache of a whole model, and the one line that makes it."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Never, Self

import numpy as np
from torch import LongTensor, Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.generation.utils import GenerateOutput

from leank.data_gen.amount import amount
from leank.errors import naming
from leank.eval.cache.attention.backend import BackendChoice, choose_backend
from leank.eval.cache.conversation import Conversation, decoder_of, listen
from leank.eval.cache.generate import generate
from leank.eval.cache.graph import KeptSteps
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.layer import CompressedLayer, State
from leank.eval.cache.memory import Memory, measure
from leank.eval.cache.saved import Saved, save
from leank.eval.cache.states import StateLayer
from leank.eval.cache.storage import banded
from leank.eval.cache.storage.channels import MaskLike, layer_masks
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.mask import ChannelMask
from leank.precision import GROUP
from leank.shape import kv_shape
from leank.versions import GETS_STATES

Layer = CacheLayerMixin | StateLayer

# Model types whose linear attention forgets its state when several tokens come at once, in transformers itself.
FORGETFUL = ("jamba",)
BROKEN = "the last pass broke off, and some layers lack its tokens: call reset() and begin anew"


class CompressedCache(Cache):
    """A transformers Cache of CompressedLayers; layers with a sliding window or linear attention stay as they are.

    layers: one per layer of the model
    choice: chooses the backend of every compressed layer
    model: the model that it is made for, which `save` notes, None = not known
    steps: decoding steps that generate() has captured
    conversation: ids that it has read, and the model that read them
    """

    def __init__(self, layers: Sequence[Layer], choice: BackendChoice, model: PreTrainedModel | None = None) -> None:
        super().__init__(layers=list(layers))
        self.choice = choice
        self.steps = KeptSteps()
        self.conversation = Conversation()
        self._with_tokens = [i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        self._model = None if model is None else weakref.ref(model)
        kind = "" if model is None else model.config.get_text_config(decoder=True).model_type
        self._forgetful = kind if kind in FORGETFUL else ""
        states = any(isinstance(layer, StateLayer) for layer in layers)
        for layer in self.compressed:
            layer.beside_states = states
        self._since_crop: int | None = None  # passes since the last crop() of a recorded past, None = no crop yet
        self._widest = 0  # columns of the largest pass since the cache was new
        self._reached = -1  # the layer that a pass came to last
        # the layer that a pass must come to; only states need it, which do not tell how many tokens they have read.
        # A dummy stands for a layer without a cache; transformers 5.17 has no such class.
        self._last = max(i for i, layer in enumerate(layers) if type(layer).__name__ != "DummyLayer") if states else -1

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def held(self) -> int:
        """Columns that have come, padding included."""
        return self.get_seq_length(self._with_tokens[0])

    @property
    def taken(self) -> np.ndarray | None:
        """Tokens of each row among the columns that have come, [B] on the host; None = not known, or nothing came."""
        first = next(iter(self.compressed), None)
        return None if first is None else first.taken

    max_cache_len = property()  # transformers 5.17 has one; without a getter, the following answers

    def __getattr__(self, name: str) -> Never:  # called for attributes that a cache lacks
        why = (
            "; peft's prefix tuning needs a cache of its own: take LoRA or prompt tuning"
            if name == "max_cache_len"
            else ""
        )
        raise AttributeError(f"a compressed cache has no {name!r}{why}")

    def expect(self, tokens: int) -> None:
        """Announce a prompt of `tokens` columns, padding included, that comes in several calls (chunked prefill).

        `model.generate(prefill_chunk_size=n)` needs it, because nothing tells a cache which chunk is the last. Drafts
        of assisted decoding may come with the last chunk. A warning says so where decoding begins before all has come.

        Raises ValueError unless `tokens` is a positive integer, RuntimeError once a prompt has begun. update() raises
        ValueError if more tokens come than were announced.
        """
        for layer in self.compressed:
            layer.expect(tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's tokens. Raises ValueError for another model's layers, RuntimeError after a broken pass."""
        if layer_idx >= len(self.layers):
            made = f"this cache was made for a model of {amount(len(self.layers), 'layer')}"
            raise ValueError(f"{made}, and layer {layer_idx} asks for it: make one with compressed_cache()")
        if layer_idx == self._with_tokens[0]:
            if self._model is not None and not self.conversation.heard:
                raise ValueError(
                    "this model does not tell the cache what it reads: call the model itself, not its forward(); of an "
                    "equal copy, make a cache of its own with compressed_cache(), or load() this one"
                )
            self.conversation.heard = False
            self._begin_pass(key_states.shape[2])
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._reach(layer_idx)
        return found

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state with which a layer of linear attention begins. Raises RuntimeError after a broken pass."""
        self._reach(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer of linear attention has read tokens. Raises RuntimeError after a broken pass."""
        if layer_idx is not None and not GETS_STATES:
            self._reach(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def _reach(self, layer_idx: int) -> None:
        """Note that a pass has come to a layer. Raises RuntimeError if it is a new one, and the last broke off."""
        if layer_idx <= self._reached < self._last:
            raise RuntimeError(BROKEN)
        self._reached = layer_idx

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See `CompressedLayer.get_mask_sizes`; models ask for it before any layer runs.

        Raises ValueError for several tokens after the first pass, of a model whose states cannot take them.
        """
        if self._forgetful and query_length > 1 and self.held:
            raise ValueError(
                f"linear attention of {self._forgetful} forgets what it has read when several tokens come at once: "
                "give the prompt in one pass and later tokens one by one, or call cache.reset() before the whole "
                "conversation"
            )
        return super().get_mask_sizes(query_length, layer_idx)

    def _begin_pass(self, new: int) -> None:
        """Before a pass of `new` columns, end a recording that is over and warn of an unannounced chunk."""
        if len({*map(self.get_seq_length, self._with_tokens)}) > 1 or any(
            one.state is State.OPEN for one in self.compressed
        ):
            raise RuntimeError(BROKEN)
        if self._since_crop:  # assisted decoding crops after every pass, so tokens without a crop are there to stay
            self._end_recording()
        elif self._since_crop == 0:
            self._since_crop = 1
        first = next(iter(self.compressed), None)
        if first is not None and new == 1 < self._widest and first.awaits > 1 and not first.record_past:
            self._widest = 1  # say it once
            warnings.warn(
                f"a single token came while {amount(first.awaits, 'token')} of the announced prompt are missing: until "
                "they have come, nothing is compressed; call cache.expect() with the prompt's own number of tokens",
                RuntimeWarning,
                stacklevel=3,
            )
        self._widest = max(self._widest, new)
        if new > 1 and first is not None and first.ended_at == first.get_seq_length() and not first.record_past:
            warnings.warn(
                f"a pass of {new} tokens follows the prompt of {first.ended_at} directly and reads its compressed "
                "middle; if both are chunks of one prompt (prefill_chunk_size), call cache.expect(its tokens) before "
                "the first",
                RuntimeWarning,
                stacklevel=2,
            )

    def _end_recording(self) -> None:
        self._since_crop = None
        for layer in list[Any](self.layers):
            if getattr(layer, "record_past", False):
                layer.crop(0)
                layer.record_past = False

    def activate_past_recording(self) -> None:
        """Let tokens wait until crop() is called, so that any of them can be taken back (assisted decoding).

        The recording ends with reset(), or with two passes after a crop() without another one, as after assisted
        decoding; the tokens of the first pass are then kept.
        """
        super().activate_past_recording()
        self._since_crop = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens of every layer; see `CompressedLayer.crop`."""
        super().crop(int(tokens_to_remove))  # assisted decoding may hand over a tensor
        self.conversation.cut(self.held)
        self._since_crop = 0

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Give every layer these rows in this order."""
        super().reorder_cache(beam_idx)
        self.conversation.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of every layer."""
        super().batch_select_indices(indices)
        self.conversation.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Give each row of every layer `repeats` times, side by side."""
        super().batch_repeat_interleave(repeats)
        self.conversation.repeat(repeats)

    def reset(self) -> None:
        """Make the cache new. Captured steps stay, and the next prompt's window goes to where they read."""
        self._since_crop, self._widest, self._reached = None, 0, -1
        self.conversation.clear()
        for layer in list[Any](self.layers):
            if isinstance(layer, CompressedLayer) and self.steps.loop is not None:
                layer.reset_in_place()
            else:
                layer.reset()
                layer.is_initialized = False  # or a sliding layer of transformers 5.17 goes on with keys of zeros
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def addresses(self) -> tuple[object, ...]:
        """Addresses and shapes of what a captured step reads; equal at two moments if one step can serve both."""
        scratch = (tensor.data_ptr() for tensor in self.choice.tensors().values())
        found = (layer.addresses() for layer in self.compressed)
        return *scratch, *(one.key() for one in found if one is not None)

    def __reduce__(self) -> Never:  # copies are made by __deepcopy__
        raise TypeError(
            "a compressed cache cannot be pickled: write it with save() and read it with CompressedCache.load, "
            "or copy it with copy.deepcopy()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        for layer in new.compressed:
            layer.ended_at = -1  # what is copied is no prompt that still lacks chunks
        return new

    def repeat(self, repeats: int) -> Self:
        """A new cache with each row `repeats` times, side by side. Raises ValueError unless it is positive."""
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            raise ValueError(f"repeat({repeats!r}): give the number of copies of each row, at least 1")
        new = copy.deepcopy(self)
        if repeats > 1:
            new.batch_repeat_interleave(repeats)
        return new

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything that the cache holds to a safetensors file, whole or not at all; `load` reads it.

        Raises ValueError for a cache without a whole prompt, one that evicts tokens while decoding or chooses what it
        reads, and one of prompt tuning or of adapters by row; RuntimeError if its model is gone.
        """
        model = None if self._model is None else self._model()
        if model is None:
            raise RuntimeError("save() notes which model made the cache, and that model is gone: keep it until then")
        if not self.conversation.made_by(decoder_of(model)):
            raise ValueError(
                "another model has filled this cache than the one that it was made for: make it with "
                "compressed_cache(that model, ...)"
            )
        self.conversation.check_saved()
        ids = self.conversation.ids
        save(path, self.layers, model, ids if ids is not None and ids.shape[1] == self.held else None)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        mask: MaskLike | None = None,
        backend: str = "auto",
    ) -> CompressedCache:
        """The cache that `save` wrote, on the model's device; it goes on with the same tokens.

        model, mask: those that it must have been made with, None = whichever mask it was
        backend: as in `compressed_cache`
        Raises FileNotFoundError, or ValueError if the file is damaged or was made by another model or mask.
        """
        found = Saved(path)
        if isinstance(mask, str | os.PathLike):
            mask = ChannelMask.load(mask)
        found.check(model, mask if mask is None or isinstance(mask, ChannelMask) else ChannelMask(mask))
        with naming(path):
            cache = compressed_cache(model, found.middles, **asdict(found.header.sizes), backend=backend)
        found.fill(cache.layers, model)
        cache.conversation.begin(decoder_of(model), found.ids)
        return cache

    def advance(self, tokens: int = 1) -> None:
        """Count the tokens of a replayed decoding step, and move tokens that are due out of the window.

        Call it after each replay; capturing itself appends nothing and moves nothing. Capture when every row is longer
        than the sink and a first step has compiled the kernels, without an attention mask: rows remember their padding.
        Raises RuntimeError for layers that are not compressed.
        """
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                raise RuntimeError(f"{type(layer).__name__} cannot run in a captured graph")
            layer.advance(tokens)

    @property
    def capturable(self) -> bool:
        """Whether a decoding step can be captured into a CUDA graph now.

        The Triton kernel must read every layer, and every row must be longer than the sink. False before the first
        step, which chooses what reads a layer and compiles it, and while past is being recorded.
        """
        return all(
            isinstance(layer, CompressedLayer) and layer.state is State.COMPRESSED and layer.capturable
            for layer in self.layers
        )

    def generate(
        self, model: PreTrainedModel, inputs: Tensor | None = None, **kwargs: object
    ) -> GenerateOutput | Tensor:
        """`model.generate()` from this cache; decoding steps replay one captured CUDA graph where that is possible.

        inputs, kwargs: as for `model.generate()`, streamer, beams and assisted decoding, too, but `past_key_values`.
        Returns what `model.generate()` returns, with the same tokens as without graphs.
        """
        return generate(self, model, inputs=inputs, **kwargs)

    def memory(self) -> Memory:
        """Bytes held now, by part; printed, megabytes and the share of a dense cache."""
        ids = self.conversation.ids
        return measure(self.layers, self.choice.tensors() | ({} if ids is None else {"ids": ids}))


def compressed_cache(
    model: PreTrainedModel,
    mask: MaskLike | list[Middle] | None,
    sink: int | None = None,
    window: int | None = None,
    flush: int | None = None,
    backend: str = "auto",
    grid: str = "prompt",
) -> CompressedCache:
    """A cache for `model.generate(past_key_values=...)` that keeps the mask's channels in the middle (LeanK 3.3).

    mask: a ChannelMask, the path of its file, or bool [layers, kv_heads, head_dim], True = kept; None = every channel;
        or a list with one Middle per layer, for other compressed forms; a ChannelMask brings bits per channel, too
    sink, window: tokens kept whole at both ends; None = those that the mask was trained with, which its file says, or
        128 and 1024 where it says nothing
    flush: tokens that move to the middle at a time; None = 32, or 64 under a mask with bits per channel, which needs a
        multiple of 64
    backend: "auto" (the Triton kernel where it can run), "torch" or "triton"
    grid: "prompt" = the window has exactly `window` tokens behind the prompt; "absolute" = the middle ends at multiples
        of `flush`, counted from the first token, and the window has up to flush - 1 tokens more. So do servers, whose
        pages must not depend on where a prompt ends

    The model is switched to the attention implementation "leank", which is SDPA for every other cache. One cache serves
    one batch; `reset()` makes it new.

    Raises ValueError if the mask or flush does not fit, a layer's attention is neither full, sliding nor linear, or
    the model takes no registered attention function. Warns if no layer can be compressed, or if the mask names another
    model.
    """
    if not hasattr(model, "config"):
        raise ValueError(f"model={model!r:.60} is no model: give what AutoModelForCausalLM.from_pretrained() returns")
    config = model.config.get_text_config(decoder=True)
    if isinstance(mask, str | os.PathLike):
        mask = ChannelMask.load(mask)
    trained = mask.metadata if isinstance(mask, ChannelMask) else {}
    given = {"sink": trained.get("sink") if sink is None else sink}
    given["window"] = trained.get("window") if window is None else window
    if isinstance(mask, ChannelMask) and mask.precision is not None:
        flush = GROUP if flush is None else flush
        banded.check_flush(flush)
    given["flush"] = flush
    sizes = Sizes(grid=grid, **{name: tokens for name, tokens in given.items() if tokens is not None})  # type: ignore[arg-type]
    middles, choice = _middles(mask, config), choose_backend(backend)
    layers: list[Layer] = []
    kinds = getattr(config, "layer_types", None)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            layers.append(CompressedLayer(middles[index], sizes, choice))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(layer)
        elif type(layer) is LinearAttentionLayer:
            layers.append(StateLayer(layer.number_of_states))
        elif kinds and kinds[index] in ("moe", "mlp"):  # it has no attention
            layers.append(layer)  # type: ignore[arg-type]
        else:
            raise ValueError(
                f"layer {index} of {config.model_type} uses {type(layer).__name__}, which cannot be compressed"
            )
    if not any(isinstance(layer, CompressedLayer) for layer in layers):
        warnings.warn(
            f"no layer of {config.model_type} has full attention: nothing is compressed, and the mask is not used",
            RuntimeWarning,
            stacklevel=2,
        )
    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise ValueError(f"{config.model_type} takes no registered attention function; use another model")
    listen(model)
    return CompressedCache(layers, choice, model)


def _middles(mask: MaskLike | list[Middle] | None, config: PreTrainedConfig) -> list[Middle]:
    """One Middle per layer; raises ValueError unless they fit the model's (layers, KV heads, head_dim)."""
    expected = kv_shape(config)
    if mask is None:
        return [Middle()] * expected[0]
    if isinstance(mask, list) and all(isinstance(middle, Middle) for middle in mask):
        found: list[Middle] = mask or [Middle()]
    else:
        keep, means, layout = layer_masks(mask, config), None, None
        if isinstance(mask, ChannelMask):
            means, layout = mask.mean_keys, mask.precision
        centers = [None] * len(keep) if means is None else list(means)
        bits = [None] * len(keep) if layout is None else banded.codecs(layout)
        found = [Middle(k, bits=b, center=c) for k, b, c in zip(keep, bits, centers, strict=True)]
    shapes = [(len(found), *m.channels.shape[-2:]) for m in found if m.channels is not None]
    for shape in shapes or [(len(found), *expected[1:])]:
        if shape != expected:
            raise ValueError(f"mask has shape {shape}, the model needs {tuple(expected)} (layers, KV heads, head_dim)")
    return found
