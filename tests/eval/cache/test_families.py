"""Tiny random models of many families: with every channel kept the cache is the dense model, with a pruned mask it is
the oracle; or one line says why the model is refused."""

import functools
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, StaticCache

from eval.cache import CompressedLayer, compressed_cache
from eval.cache.hook import ATTENTION
from leank_train.forward.hook import check_decoder, kv_shape, run_decoder
from tests.helpers.cache_oracle import oracle_cache

SIZES = (4, 12, 4)  # sink, window, flush
PROMPT, STEPS, WINDOW = 70, 6, 64  # the prompt is longer than the sliding windows
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


def teach(model, cache, ids, mask=None, steps=STEPS):
    """Logits after the prompt and after each of `steps` tokens that are fed in, [steps + 1, B, vocabulary]."""
    cut, found = ids.shape[1] - steps, []
    position = (torch.ones_like(ids) if mask is None else mask).cumsum(-1).sub(1).clamp(min=0)
    for start, stop in [(0, cut), *((t, t + 1) for t in range(cut, ids.shape[1]))]:
        with torch.no_grad():
            out = model(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=position[:, start:stop],
                past_key_values=cache,
            )
        found.append(out.logits[:, -1])
    return torch.stack(found)


def prompts(rows):
    ids = torch.randint(2, 61, (rows, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :30] = 0
    return ids, mask


def close(got, want, tolerance=1e-5):  # norms and the eager softmax of many models round to float32
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def config_of(model):
    return model.config.get_text_config(decoder=True)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_pruned_is_the_dense_model(name):
    """Eager attention, written in the model's own file, against the cache and against other caches after the switch."""
    model, (ids, _) = build(name), prompts(1)
    model.set_attn_implementation("eager")
    want = teach(model, DynamicCache(config=config_of(model)), ids)
    cache = compressed_cache(model, None, *SIZES)
    assert any(isinstance(layer, CompressedLayer) for layer in cache.layers)
    close(teach(model, cache, ids), want)
    close(teach(model, DynamicCache(config=config_of(model)), ids), want)
    close(teach(model, StaticCache(config=config_of(model), max_cache_len=PROMPT + STEPS + 9), ids), want)


@pytest.mark.parametrize("name", RIGHT)
def test_a_pruned_mask_is_the_oracle(name):
    model, (ids, mask) = build(name), prompts(2)
    shape = kv_shape(config_of(model))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[:, 0] &= torch.arange(shape[2]) < 3
    cache, oracle = compressed_cache(model, keep, *SIZES), oracle_cache(keep, *SIZES)
    for index, layer in enumerate(DynamicCache(config=config_of(model)).layers):
        if not isinstance(cache.layers[index], CompressedLayer):
            oracle.layers[index] = layer
    got = teach(model, cache, ids, mask)
    model.set_attn_implementation("oracle")
    close(got, teach(model, oracle, ids, mask))
    model.set_attn_implementation(ATTENTION)
    whole = teach(model, compressed_cache(model, None, *SIZES), ids, mask)
    assert (got - whole)[1:].abs().max() > 1e-3  # the mask matters


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name):
    model, line = build(name), REFUSED[name][1]
    before = model.config._attn_implementation
    mask = torch.ones(2, 2, 16, dtype=torch.bool)
    with pytest.raises(ValueError, match=line) as error:
        compressed_cache(model, mask, *SIZES)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before


class Causal:
    """What a training pass does in its layers when nothing is scaled."""

    longest = 20

    def attend(self, layer, q, k, v, scale):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def hidden_in_training(model, ids):
    check_decoder(model)
    with torch.no_grad():
        return run_decoder(model, ids, torch.arange(ids.shape[1])[None], Causal())


UNTRAINED = {
    "gpt_oss": r"model=gpt_oss: its attention has attention sinks \(s_aux\)",
    "granite_swa": r"model=granite_swa: its attention has attention sinks \(s_aux\)",
    "gemma2": r"model=gemma2: its attention has soft-capped logits \(softcap\)",
    "llama4": r"model=llama4_text has layers of chunked_attention \(layer_types\)",
    "nemotron": "model=nemotron does not hand keyword arguments down to its attention",
    "stablelm": "model=stablelm takes no registered attention function",
    "deepseek_v3": "model=deepseek_v3 has keys of 24 channels and values of 16",
    "mimo": "model=mimo_v2_flash has keys of 24 channels and values of 16",
    "falcon": "model=falcon takes no registered attention function",
    "gpt_neox": "model=gpt_neox has no num_key_value_heads",
    "gpt2": "model=gpt2 has no rotary positions",
    "opt": "model=opt has no rotary positions",
    "bloom": "model=bloom has no rotary positions",
    "jamba": "model=jamba has no rotary positions",
    "mamba": "model=mamba has no rotary positions",
    "qwen3_next": "model=qwen3_next",
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_training_refuses_what_it_does_not_know(name):
    with pytest.raises(ValueError, match=UNTRAINED[name]) as error:
        hidden_in_training(build(name), prompts(1)[0][:, :20])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(RIGHT.keys() - UNTRAINED.keys()))
def test_training_sees_the_model(name):
    """Shorter than its sliding windows every other family has the hidden states of eager attention."""
    model, ids = build(name), prompts(1)[0][:, :20]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.base_model(ids).last_hidden_state
    close(hidden_in_training(model, ids), want)


@pytest.mark.parametrize(("config", "text"), [("LlavaConfig", "llama"), ("Qwen2_5_VLConfig", "qwen2_5_vl_text")])
def test_training_wants_the_language_model_alone(config, text):
    model = SimpleNamespace(config=getattr(transformers, config)())
    with pytest.raises(ValueError, match=rf"takes more than text; load its language model \({text}\) alone"):
        check_decoder(model)
