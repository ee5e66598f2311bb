"""The model families that the tests know, as tiny random models, and the table of docs/families.md made from them.

`make families` runs the tests of all families and, if they pass, writes the table.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
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
    """model: class name; settings: of its config, None = leave BASE's out; config: class name where it differs."""

    model: str
    settings: Mapping = MappingProxyType({})
    config: str = ""


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}}


RIGHT = {
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
    "olmo2": Family("Olmo2ForCausalLM"),
    "granite": Family("GraniteForCausalLM", {"attention_multiplier": 0.25}),
    "starcoder2": Family("Starcoder2ForCausalLM", {"sliding_window": None}),
    "glm4": Family("Glm4ForCausalLM", {"head_dim": 16}),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "gemma": Family("GemmaForCausalLM", {"head_dim": 16}),
    "cohere": Family("CohereForCausalLM"),
    "ernie4_5": Family("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "olmo3": Family("Olmo3ForCausalLM", HALF_SLIDING),
    "exaone4": Family("Exaone4ForCausalLM", HALF_SLIDING),
    "nemotron": Family("NemotronForCausalLM", {"head_dim": 16}),
    "stablelm": Family("StableLmForCausalLM"),
    "qwen2_sliding": Family("Qwen2ForCausalLM", {"use_sliding_window": True, **HALF_SLIDING}),
    "cohere2": Family("Cohere2ForCausalLM", HALF_SLIDING),
    "ministral": Family("MinistralForCausalLM", {"head_dim": 16, **HALF_SLIDING}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, **HALF_SLIDING},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 16, **HALF_SLIDING}, "Gemma3TextConfig"
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        {
            "head_dim": 16,
            "num_kv_shared_layers": 0,
            "intermediate_size": [48] * 2,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 2,
            **HALF_SLIDING,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "Gemma3nTextConfig",
    ),
    "gpt_oss": Family("GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 4, **HALF_SLIDING}),
    "granite_swa": Family("GraniteSWAForCausalLM", {"attention_multiplier": 0.25, **HALF_SLIDING}),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "Llama4TextConfig",
    ),
}
NO_KV_HEADS = {"num_key_value_heads": None}
REFUSED = {
    "deepseek_v3": (
        Family(
            "DeepseekV3ForCausalLM",
            {
                **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
                **{"v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
            },
        ),
        "model=deepseek_v3 has keys of 24 channels and values of 16",
    ),
    "mimo": (
        Family("MiMoV2FlashForCausalLM", {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4}),
        "model=mimo_v2_flash has keys of 24 channels and values of 16",
    ),
    "falcon": (Family("FalconForCausalLM", NO_KV_HEADS), "model=falcon has no num_key_value_heads"),
    "gpt2": (Family("GPT2LMHeadModel", NO_KV_HEADS), "model=gpt2 has no num_key_value_heads"),
    "gpt_neox": (Family("GPTNeoXForCausalLM", NO_KV_HEADS), "model=gpt_neox has no num_key_value_heads"),
    "opt": (
        Family("OPTForCausalLM", {**NO_KV_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 64}),
        "model=opt has no num_key_value_heads",
    ),
    "bloom": (Family("BloomForCausalLM", NO_KV_HEADS), "model=bloom has no num_key_value_heads"),
    "jamba": (
        Family("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
        "layer 0 of jamba uses LinearAttentionLayer",
    ),
    "mamba": (Family("MambaForCausalLM", NO_KV_HEADS), "model=mamba has no num_key_value_heads"),
    "qwen3_next": (
        Family(
            "Qwen3NextForCausalLM",
            {
                **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], **EXPERTS},
                **{"linear_num_value_heads": 2, "linear_num_key_heads": 2},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            },
        ),
        "layer 0 of qwen3_next uses LinearAttentionLayer",
    ),
}


NONE_IS_A_VALUE = ("eos_token_id", "sliding_window")
UNTRAINED = {
    "gpt_oss": r"model=gpt_oss: its attention has attention sinks \(s_aux\)",
    "granite_swa": r"model=granite_swa: its attention has attention sinks \(s_aux\)",
    "gemma2": r"model=gemma2: its attention has soft-capped logits \(softcap\)",
    "llama4": r"model=llama4_text has layers of chunked_attention \(layer_types\)",
    "nemotron": "model=nemotron does not hand keyword arguments down to its attention",
    "stablelm": "model=stablelm takes no registered attention function",
    "deepseek_v3": "model=deepseek_v3 has keys of 24 channels and values of 16",
    "mimo": "model=mimo_v2_flash has keys of 24 channels and values of 16",
    "falcon": "model=falcon has no num_key_value_heads",
    "gpt_neox": "model=gpt_neox has no num_key_value_heads",
    "gpt2": "model=gpt2 has no rotary positions",
    "opt": "model=opt has no rotary positions",
    "bloom": "model=bloom has no rotary positions",
    "jamba": "model=jamba has no rotary positions",
    "mamba": "model=mamba has no rotary positions",
    "qwen3_next": "model=qwen3_next",
}


@functools.cache
def build(name):
    family = RIGHT[name] if name in RIGHT else REFUSED[name][0]
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
    return sorted(RIGHT.keys() - UNTRAINED.keys())


def plain(pattern):
    """The text that a pattern of an error stands for."""
    return pattern.replace("\\", "")


def table():
    """The table in Markdown: what works, or the line that says why not."""
    lines = []
    for name in sorted({*RIGHT, *REFUSED}):
        family = RIGHT[name] if name in RIGHT else REFUSED[name][0]
        cache = "yes" if name in RIGHT else plain(REFUSED[name][1])
        training = plain(UNTRAINED[name]) if name in UNTRAINED else "yes"
        lines.append([name, family.model, cache, cache if name in RIGHT else "no", training])
    return pd.DataFrame(
        lines, columns=["family", "class of transformers", "cache", "generate()", "training"]
    ).to_markdown(index=False)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, mark, _ = page.read_text(encoding="utf-8").partition("<!-- made by make families -->\n")
    page.write_text(before + mark + "\n" + table() + "\n", encoding="utf-8")
