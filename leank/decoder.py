"""Which decoders can have a mask."""

from transformers import PreTrainedConfig, PreTrainedModel

from leank.shape import kv_shape


def check_decoder(model: PreTrainedModel) -> None:
    """Raise ValueError, naming the reason, for a model whose mask cannot be learned."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError(
            f"model={config.model_type} takes more than text; load its language model ({text.model_type}) alone"
        )
    if not has_rope(config):
        raise ValueError(
            f"model={config.model_type} has no rotary positions (RoPE); choose a RoPE decoder such as Llama"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"model={config.model_type} takes no registered attention function; choose another model")
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(
            f"model={config.model_type} has layers of {', '.join(sorted(other))} (layer_types); training knows full "
            "attention: choose another model"
        )
    if model.base_model is model:
        raise ValueError(f"model={config.model_type} names no base model without a head; choose another model")
    kv_shape(config)


def has_rope(config: PreTrainedConfig) -> bool:
    """Whether a model of this config has rotary positions."""
    return getattr(config, "rope_parameters", None) is not None or getattr(config, "rope_theta", None) is not None
