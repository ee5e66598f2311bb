"""The cache of a whole model, and the one line that makes it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from eval.cache.attention.backend import choose_backend
from eval.cache.generate import generate
from eval.cache.hook import ATTENTION
from eval.cache.layer import Backend, CompressedLayer
from eval.cache.memory import Memory, measure
from eval.cache.storage.channels import layer_masks
from eval.cache.storage.middle import Middle
from eval.cache.storage.store import Sizes
from leank_train.forward.hook import kv_shape


class CompressedCache(Cache):
    """A transformers Cache of CompressedLayers; layers with a sliding window of their own stay transformers' own."""

    def __init__(self, layers: list[Any], backend: Backend) -> None:
        super().__init__(layers=layers)
        self.backend = backend
        self._since_crop: int | None = None  # passes since the last crop() while past is recorded, None = no crop yet

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def expect(self, tokens: int) -> None:
        """Announce a prompt of `tokens` columns (padding included) that comes in several calls: chunked prefill.

        `model.generate(prefill_chunk_size=n)` needs it: nothing that reaches a cache says whether a chunk is the last.
        Raises ValueError for what is no number of tokens, RuntimeError once a prompt has begun; update() raises
        ValueError if more tokens come than were announced.
        """
        for layer in self.compressed:
            layer.expect(tokens)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append the new tokens of one layer. Raises ValueError for a layer that the cache's model does not have."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers, and layer {layer_idx} asks for it: "
                "make one for this model with compressed_cache()"
            )
        if layer_idx == 0:
            self._begin_pass(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _begin_pass(self, new: int) -> None:
        """Before a pass of `new` columns: end a recording that is over, warn of an unannounced chunk."""
        if self._since_crop:  # assisted decoding crops after every pass: what came without is there to stay
            self._end_recording()
        elif self._since_crop == 0:
            self._since_crop = 1
        first = next(iter(self.compressed), None)
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
        layers: list[Any] = self.layers
        for layer in layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)
                layer.record_past = False

    def activate_past_recording(self) -> None:
        """Let tokens wait until crop() is called, so that any of them can be taken back (assisted decoding).

        It ends with reset(), or when after a crop() two passes follow each other without one, as after assisted
        decoding: the tokens of the first are then kept.
        """
        super().activate_past_recording()
        self._since_crop = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens of every layer; see CompressedLayer.crop."""
        super().crop(tokens_to_remove)
        self._since_crop = 0

    def reset(self) -> None:
        """Make the cache new: no tokens, no announcement, no recording."""
        super().reset()
        self._since_crop = None
        layers: list[Any] = self.layers
        for layer in layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def advance(self, tokens: int = 1) -> None:
        """After each replay of a captured decoding step: account for its tokens, move what is due out of the window.

        Capturing itself appends nothing and moves nothing. Capture once every row is longer than the sink, without an
        attention mask (rows remember their padding), and after a first step has compiled the kernels.
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
        layers = self.compressed
        stores = [layer.store for layer in layers]
        return (
            len(layers) == len(self.layers)
            and all(
                s is not None and s.backend is not None and s.backend.captures and (s.seen >= s.sizes.sink).all()
                for s in stores
            )
            and not any(layer.record_past for layer in layers)
        )

    def generate(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """`model.generate()` from this cache; decoding steps replay one captured CUDA graph where that is possible.

        model: the model that the cache was made for.
        kwargs: as for `model.generate()`, streamer, beams and assisted decoding included, without `past_key_values`.

        Returns what `model.generate()` returns, with the same tokens as without graphs.
        """
        return generate(self, model, **kwargs)

    def memory(self) -> Memory:
        """Bytes held now, by part."""
        return measure(self.layers, self.backend.tensors())


def compressed_cache(
    model: PreTrainedModel, mask: Any, sink: int = 128, window: int = 1024, flush: int = 32, backend: str = "auto"
) -> CompressedCache:
    """A cache for `model.generate(past_key_values=...)` that keeps the mask's channels in the middle (LeanK 3.3).

    mask: ChannelMask, the path of its file, or bool [layers, kv_heads, head_dim], True = kept; None = every channel; or
    a list of one Middle a layer, for what else a middle can be. sink, window: tokens kept whole at both ends; flush:
    tokens that move to the middle at a time. backend: "auto" (the Triton kernel where it can run), "torch" or
    "triton". Switches the model to the attention implementation "leank", which is SDPA for every other cache. One cache
    serves one batch; `reset()` makes it new.

    Raises ValueError if the mask does not fit the model, a layer's attention is neither full nor sliding, or the model
    takes no registered attention function. Warns if no layer can be compressed.
    """
    config = model.config.get_text_config(decoder=True)
    expected = kv_shape(config)
    middles = _middles(mask, expected)
    sizes, runs = Sizes(sink, window, flush), choose_backend(backend)
    layers: list[Any] = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            layers.append(CompressedLayer(middles[index], sizes, runs))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(layer)
        else:
            raise ValueError(
                f"layer {index} of {config.model_type} uses {type(layer).__name__}, which cannot be compressed"
            )
    if not any(isinstance(layer, CompressedLayer) for layer in layers):
        warnings.warn(
            f"every layer of {config.model_type} has a sliding window of its own: nothing is compressed, and the mask "
            "is not used",
            RuntimeWarning,
            stacklevel=2,
        )
    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise ValueError(f"{config.model_type} takes no registered attention function; use another model")
    return CompressedCache(layers, runs)


def _middles(mask: Any, expected: tuple[int, int, int]) -> list[Middle]:
    """One Middle a layer of a model of `expected` (layers, KV heads, head_dim). Raises ValueError if they do not
    fit.
    """
    if mask is None:
        return [Middle()] * expected[0]
    middles = isinstance(mask, list) and all(isinstance(middle, Middle) for middle in mask)
    found = mask if middles else [Middle(keep) for keep in layer_masks(mask)]
    shapes = [(len(found), *m.channels.shape[-2:]) for m in found if m.channels is not None]
    for shape in shapes or [(len(found), *expected[1:])]:
        if shape != expected:
            raise ValueError(f"mask has shape {shape}, the model needs {expected} (layers, KV heads, head_dim)")
    return found
