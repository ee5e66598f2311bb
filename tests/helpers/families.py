"""The model families that the default tests know, as tiny random models.

`tests/helpers/walk.py` walks over every family of transformers; these have settings of their own, or tests beyond it.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import transformers

WINDOW = 64  # of layers with a sliding window
BASE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HALF_SLIDING = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]}


class Family(NamedTuple):
    """A model class, and what of it works.

    model: class name.
    settings: of its config; None = leave BASE's out.
    cache, training: patterns of the lines with which each refuses it; "" = it works.
    config: class name where it differs.
    """

    model: str
    settings: Mapping = MappingProxyType({})
    cache: str = ""
    training: str = ""
    config: str = ""


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}}


def no_kv_heads(kind, model, training="has no rotary positions", **settings):
    """A family that says nothing of KV heads."""
    settings = {"num_key_value_heads": None, **settings}
    return Family(model, settings, f"model={kind} has no num_key_value_heads", f"model={kind} {training}")


OTHER_WIDTH = "model={} has keys of 24 channels and values of 16"
LATENT = r"model={} has latent attention \(MLA, kv_lora_rank\)"
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "llama3": Family(
        "LlamaForCausalLM",
        rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn": Family("LlamaForCausalLM", rope("yarn", original_max_position_embeddings=128)),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"head_dim": 16, **EXPERTS}),
    "mistral": Family("MistralForCausalLM", {"sliding_window": None}),
    "mixtral": Family("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "phi": Family("PhiForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "granite": Family("GraniteForCausalLM", {"attention_multiplier": 0.25}),
    "glm4": Family("Glm4ForCausalLM", {"head_dim": 16}),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "gemma": Family("GemmaForCausalLM", {"head_dim": 16}),
    "cohere": Family("CohereForCausalLM"),
    "ernie4_5": Family("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "olmo3": Family("Olmo3ForCausalLM", HALF_SLIDING),
    "nemotron": Family(
        "NemotronForCausalLM", {"head_dim": 16},
        training="model=nemotron does not hand keyword arguments down to its attention",
    ),
    "stablelm": Family("StableLmForCausalLM", training="model=stablelm takes no registered attention function"),
    "qwen2_sliding": Family("Qwen2ForCausalLM", {"use_sliding_window": True, **HALF_SLIDING}),
    "cohere2": Family("Cohere2ForCausalLM", HALF_SLIDING),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, **HALF_SLIDING},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 16, **HALF_SLIDING}, config="Gemma3TextConfig"
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        {
            "head_dim": 16, "num_kv_shared_layers": 0, "intermediate_size": [48] * 2, "laurel_rank": 4,
            "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 2, **HALF_SLIDING,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        config="Gemma3nTextConfig",
    ),
    "gpt_oss": Family("GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 4, **HALF_SLIDING}),
    "granite_swa": Family("GraniteSWAForCausalLM", {"attention_multiplier": 0.25, **HALF_SLIDING}),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        training=r"model=llama4_text has layers of chunked_attention \(layer_types\)",
        config="Llama4TextConfig",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        },
        *2 * [LATENT.format("deepseek_v3")],
    ),
    "mimo": Family(
        "MiMoV2FlashForCausalLM", {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4},
        *2 * [OTHER_WIDTH.format("mimo_v2_flash")],
    ),
    "gpt2": no_kv_heads("gpt2", "GPT2LMHeadModel"),
    "mamba": no_kv_heads("mamba", "MambaForCausalLM"),
    "jamba": Family(
        "JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
        training="model=jamba has no rotary positions",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
            "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **EXPERTS,
        },
        training=r"model=qwen3_next has layers of linear_attention \(layer_types\)",
    ),
}  # fmt: skip
RIGHT = [name for name, family in FAMILIES.items() if not family.cache]
REFUSED = {name: family.cache for name, family in FAMILIES.items() if family.cache}
UNTRAINED = {name: family.training for name, family in FAMILIES.items() if family.training}
NONE_IS_A_VALUE = ("eos_token_id", "sliding_window")


@functools.cache
def build(name):
    family = FAMILIES[name]
    config_class = family.config or family.model.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
    if not (hasattr(transformers, family.model) and hasattr(transformers, config_class)):
        pytest.skip(f"this transformers has no {family.model}")
    settings = {k: v for k, v in {**BASE, **family.settings}.items() if v is not None or k in NONE_IS_A_VALUE}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, family.model)(config).double().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # some are made as zeros, which every head would share
            parameter.data.normal_(0, 2)
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def trained():
    """Families that a mask can be learned for."""
    return sorted(FAMILIES.keys() - UNTRAINED.keys())
