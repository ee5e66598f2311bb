"""A tiny random model with a tokenizer that reads the tasks, and its Q, K, V recomputed without the project's code."""

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from leank.mask import ChannelMask
from scripts.analyses.source import Source
from tests.helpers.text_tokenizers import tokenizer

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 8
LENGTH = 320  # the shortest at which the tasks of these tests have room


@functools.cache
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer("reference")), hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, head_dim=DIM, initializer_range=0.3,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def source(mask: bool = False) -> Source:
    return Source(tiny_model(), tokenizer("reference"), random_mask() if mask else None, "tiny")


def prompt(index: int = 0, task: str = "niah_single_2") -> torch.Tensor:
    """The tokens of a sample."""
    return source().ids(source().sample(task, LENGTH, index))


def random_mask(seed: int = 0) -> ChannelMask:
    """A mask in which one head of the first layer is empty."""
    keep = torch.rand(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) < 0.5
    keep[0, 1] = False
    return ChannelMask(keep)


@torch.no_grad()
def qkv(ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of every layer, after RoPE: q, k, v, each [Hq, T, D] with KV heads repeated, from transformers' modules."""
    model, found, seen = tiny_model(), [], {}

    def catch(module, args, kwargs):
        seen[module.layer_idx] = (kwargs["hidden_states"], kwargs["position_embeddings"])

    hooks = [layer.self_attn.register_forward_pre_hook(catch, with_kwargs=True) for layer in model.model.layers]
    model.set_attn_implementation("sdpa")
    model(ids)
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(model.model.layers):
        hidden, (cos, sin) = seen[index]
        own = layer.self_attn
        q, k, v = (part(hidden).view(1, -1, heads, DIM).transpose(1, 2) for part, heads in (
            (own.q_proj, HEADS * GROUP), (own.k_proj, HEADS), (own.v_proj, HEADS)))  # fmt: skip
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        found.append((q[0], k[0].repeat_interleave(GROUP, 0), v[0].repeat_interleave(GROUP, 0)))
    return found


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The whole matrix of causal attention weights [Hq, T, T]."""
    logits = q @ k.mT / DIM**0.5
    return logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def only(table, **wanted):
    """The lines of a table whose columns have the `wanted` values, as dictionaries; what is empty is None."""
    lines = table.astype(object).where(table.notna(), None).to_dict("records")
    whole = [{name: int(x) if name != "value" and isinstance(x, float) and x.is_integer() else x
              for name, x in one.items()} for one in lines]  # fmt: skip
    return [one for one in whole if all(one.get(name) == value for name, value in wanted.items())]
