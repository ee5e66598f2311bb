"""The cache of a whole model, and the one line that makes it."""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from eval.cache.backend import choose_backend
from eval.cache.channels import layer_masks
from eval.cache.hook import ATTENTION
from eval.cache.layer import Backend, CompressedLayer
from eval.cache.memory import Memory, measure
from eval.cache.middle import Middle
from eval.cache.store import Sizes


class CompressedCache(Cache):
    """A transformers Cache of CompressedLayers; layers with a sliding window of their own stay transformers' own."""

    def __init__(self, layers: list[Any], backend: Backend):
        super().__init__(layers=layers)
        self.backend = backend

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def expect(self, tokens: int) -> None:
        """Announce a prompt of `tokens` columns (padding included) that comes in several calls: chunked prefill.

        Raises RuntimeError once a prompt has begun; update() raises ValueError if more tokens come than were announced.
        """
        for layer in self.compressed:
            layer.expect(tokens)

    def advance(self, tokens: int = 1) -> None:
        """After each replay of a captured decoding step: account for its tokens, move what is due out of the window.

        Capturing itself appends nothing and moves nothing. Capture once every row is longer than the sink, without an
        attention mask (rows remember their padding), and after a first step has compiled the kernels.
        """
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                raise RuntimeError(f"{type(layer).__name__} cannot run in a captured graph")
            layer.advance(tokens)

    def memory(self) -> Memory:
        """Bytes held now, by part."""
        return measure(self.layers, self.backend.tensors())


def compressed_cache(
    model: PreTrainedModel, mask: Any, sink: int = 128, window: int = 1024, flush: int = 32, backend: str = "auto"
) -> CompressedCache:
    """A cache for `model.generate(past_key_values=...)` that keeps the mask's channels in the middle (LeanK 3.3).

    mask: ChannelMask, the path of its file, or bool [layers, kv_heads, head_dim], True = kept; or a list of one Middle
    a layer, for what else a middle can be. sink, window: tokens kept whole at both ends; flush: tokens that move to the
    middle at a time. backend: "auto" (the Triton kernel where it can run), "reference" or "triton". Switches the model
    to the attention implementation "leank", which is SDPA for every other cache. One cache serves one batch; `reset()`
    makes it new.

    Raises ValueError if the mask does not fit the model or a layer's attention is neither full nor sliding.
    """
    middles = mask if isinstance(mask, list) else [Middle(keep) for keep in layer_masks(mask)]
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    expected = (config.num_hidden_layers, config.num_key_value_heads, head_dim)
    for shape in ((len(middles), *m.channels.shape[-2:]) for m in middles if m.channels is not None):
        if shape != expected:
            raise ValueError(f"mask has shape {shape}, the model needs {expected} (layers, KV heads, head_dim)")
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
    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    return CompressedCache(layers, runs)
