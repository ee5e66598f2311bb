"""Which decoders can have a mask, and the shape of their K cache, and so of alpha, masks and scores."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


IN_ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # RoPE is not among it, whose scaling a run may override  # fmt: skip


BEYOND = {  # model types that hold or read keys or states in a way of their own, which no setting tells
    "diffllama": "attends twice in each layer",
    "doge": "has a mask of its own in each head",
    "jetmoe": "repeats its keys for every expert of its attention",
    "minimax": "takes no cache but its own",
    "moshi": "has a sliding window in its cache, but none in its attention",
    "recurrent_gemma": "holds its states in the model itself, not in a cache",
    "mllama_text_model": "has layers that attend to a picture (cross_attention_layers)",
}


class DecoderShape(NamedTuple):
    """The shape [L, H, D] of alpha and of a mask."""

    layers: int  # L, decoder layers
    kv_heads: int  # H, KV heads per layer
    head_dim: int  # D, channels of a key


def kv_shape(config: PreTrainedConfig) -> DecoderShape:
    """Return the shape of a decoder with this config. Raises ValueError, naming why, for one that no mask can be of."""
    kind = getattr(config, "model_type", "unknown")
    if kind in BEYOND:
        raise ValueError(f"model={kind} {BEYOND[kind]}; choose another model")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"model={kind} has attention that is not causal (use_bidirectional_attention); choose another model"
        )
    try:
        heads, dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    except RuntimeError as error:  # of transformers, for what differs from layer to layer, as in Gemma 4
        raise ValueError(
            f"model={kind} has layers of different shapes (per_layer_config); a mask needs as many KV heads and "
            "channels in each: choose another model"
        ) from error
    if heads is None:
        raise ValueError(f"model={kind} has no num_key_value_heads in its config; choose a decoder such as Llama")
    if not heads or config.num_attention_heads % heads:
        raise ValueError(
            f"model={kind} has num_key_value_heads={heads}, which does not divide "
            f"num_attention_heads={config.num_attention_heads}; copy its config again"
        )
    dim = dim or config.hidden_size // config.num_attention_heads
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"model={kind} has layers that read keys of others (num_kv_shared_layers={shared}); choose another model"
        )
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"model={kind} has latent attention (MLA, kv_lora_rank), whose cache holds no keys of its heads; choose "
            "another model"
        )
    values = getattr(config, "v_head_dim", None) or dim
    if dim != values:
        raise ValueError(
            f"model={kind} has keys of {dim} channels and values of {values} (v_head_dim); a mask needs the same "
            "number of both: choose another model"
        )
    return DecoderShape(config.num_hidden_layers, heads, dim)


def check_config(config: PreTrainedConfig) -> DecoderShape:
    """Return the shape of a decoder; raise ValueError, naming the reason, if no mask can be learned for its config."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError(
            f"model={config.model_type} takes more than text; load its language model ({text.model_type}) alone"
        )
    if getattr(config, "rope_parameters", None) is None and getattr(config, "rope_theta", None) is None:
        raise ValueError(
            f"model={config.model_type} has no rotary positions (RoPE); choose a RoPE decoder such as Llama"
        )
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(
            f"model={config.model_type} has layers of {', '.join(sorted(other))} (layer_types); training knows full "
            "attention: choose another model"
        )
    return kv_shape(config)


def check_decoder(model: PreTrainedModel) -> None:
    """Raise ValueError, naming the reason, for a model whose mask cannot be learned."""
    kind = model.config.model_type
    check_config(model.config)
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"model={kind} takes no registered attention function; choose another model")
    if model.base_model is model:
        raise ValueError(f"model={kind} names no base model without a head; choose another model")


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return how many tokens the layers with a sliding window see; None if there are none."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None


def scaled_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a decoder has with the scaling of its RoPE; None if its config says nothing.

    Some configs that YaRN extends still have max_position_embeddings of the model before.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    ropes = getattr(config, "rope_parameters", None) or {}
    scaled = [
        int((rope.get("original_max_position_embeddings") or limit) * factor)
        for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict)))  # some have one per layer type
        if isinstance(factor := rope.get("factor"), int | float) and rope.get("rope_type", "default") != "default"
    ]
    return max([limit, *scaled])


def architecture(config: PreTrainedConfig) -> str:
    """Return twelve hexadecimal digits of an architecture, which a fine-tuned model shares with its base."""
    found = {name: getattr(config, name, None) for name in IN_ARCHITECTURE}
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:12]
