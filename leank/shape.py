"""The shape of a decoder's K cache, and so of everything that is said of its channels: alpha, masks, scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


class DecoderShape(NamedTuple):
    """The shape [L, H, D] of alpha and of a mask.

    layers: L, decoder layers.
    kv_heads: H, KV heads per layer.
    head_dim: D, channels of a key.
    """

    layers: int
    kv_heads: int
    head_dim: int


def kv_shape(config: PreTrainedConfig) -> DecoderShape:
    """Return the shape of a decoder with this config.

    Raises ValueError if the config does not name its KV heads, or if layers, or keys and values, differ in width.
    """
    kind = getattr(config, "model_type", "unknown")
    try:
        heads, dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    except RuntimeError as error:  # of transformers, for what differs from layer to layer, as in Gemma 4
        raise ValueError(
            f"model={kind} has layers of different shapes (per_layer_config); a mask needs as many KV heads and "
            "channels in each: choose another model"
        ) from error
    if heads is None:
        raise ValueError(f"model={kind} has no num_key_value_heads in its config; choose a decoder such as Llama")
    dim = dim or config.hidden_size // config.num_attention_heads
    keys = getattr(config, "qk_head_dim", None) or dim  # latent attention (MLA): head_dim is its rotary part alone
    values = getattr(config, "v_head_dim", None) or keys
    if keys != values:
        raise ValueError(
            f"model={kind} has keys of {keys} channels and values of {values} (v_head_dim); a mask needs the same "
            "number of both: choose another model"
        )
    return DecoderShape(config.num_hidden_layers, heads, keys)
