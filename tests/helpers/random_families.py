"""Random decoders of families with layers of several kinds, random masks and random uses of a cache, held to a plain
forward over each sequence alone (`tests/oracles/plain_forward.py`), which has no cache and no padding.

`python -m tests.helpers.random_families 300` tries as many cases of every family and says what it found.
"""

import random
import sys
import time
import traceback
from collections import Counter
from typing import NamedTuple

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.mask import ChannelMask
from leank.shape import kv_shape
from tests.helpers.cache_oracle import left_padded
from tests.helpers.walk import build
from tests.oracles.plain_forward import Form, plain

VOCAB = 89  # of `left_padded`
TOLERANCE = 1e-4  # of logits; layers of linear attention compute in float32
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LINEAR_SIZES = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def kinds(draw, *others, most=4):
    """The kinds of 1 to `most` layers, one of them full attention."""
    found = draw.choices((FULL, *others), k=draw.randint(1, most))
    found[draw.randrange(len(found))] = FULL
    return found


def sliding(draw):
    return {"layer_types": kinds(draw, SLIDING), "sliding_window": draw.randint(2, 20)}


def linear(draw):
    return {"layer_types": kinds(draw, LINEAR), "linear_num_value_heads": draw.choice((2, 4)), **LINEAR_SIZES}


def qwen3_next(draw):
    return {**linear(draw), **EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": draw.randint(1, 2)}


def gemma3(draw):
    return {**sliding(draw), "query_pre_attn_scalar": 16, "attn_logit_softcapping": draw.choice((None, 2.0))}


def gemma4(draw, dim):
    """With one shape in all layers; the default, another one in full attention, is refused."""
    settings = sliding(draw)
    settings["layer_types"][-1] = FULL
    return {
        **settings, "global_head_dim": dim, "attention_k_eq_v": draw.random() < 0.5, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": draw.choice((0, 8)), "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": draw.random() < 0.5, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    }  # fmt: skip


def gpt_oss(draw):
    return {**sliding(draw), "num_local_experts": 4, "num_experts_per_tok": 2}


def lfm2(draw):
    return {
        "layer_types": kinds(draw, "conv"), "conv_L_cache": draw.randint(2, 4), "conv_bias": draw.random() < 0.5,
        "block_multiple_of": 16,
    }  # fmt: skip


def jamba(draw):
    period = draw.randint(1, 4)
    offset = draw.randrange(period)
    return {
        "num_hidden_layers": draw.randint(offset + 1, 4), "attn_layer_period": period, "attn_layer_offset": offset,
        "num_experts": draw.choice((1, 4)), "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_d_conv": draw.randint(2, 4),
        "use_mamba_kernels": False,
    }  # fmt: skip


def nemotron_h(draw):
    return {
        "layers_block_type": kinds(draw, LINEAR, "moe", "mlp"), "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": draw.choice((1, 2)), "conv_kernel": draw.randint(2, 4),
        "chunk_size": draw.choice((4, 32)), "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "use_mamba_kernels": False,
    }  # fmt: skip


FAMILIES = {
    "qwen3_5_text": linear,
    "qwen3_next": qwen3_next,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "lfm2": lfm2,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
}


def decoder(kind, draw):
    """A random model of a family."""
    dim, heads, group = draw.choice((8, 16, 64)), draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    settings = {
        "vocab_size": VOCAB, "hidden_size": dim * heads * group if kind in ("lfm2", "jamba") else 48,
        "intermediate_size": 32, "num_attention_heads": heads * group, "num_key_value_heads": heads, "head_dim": dim,
        "initializer_range": 0.2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None,
    }  # fmt: skip
    settings |= gemma4(draw, dim) if kind == "gemma4_text" else FAMILIES[kind](draw)
    if "layer_types" in settings:
        settings["num_hidden_layers"] = len(settings["layer_types"])
    return build(CONFIG_MAPPING[kind](**settings)).requires_grad_(False)


def random_mask(shape, draw, generator, means):
    """Blocks of channels that each head keeps: none, all or a number of its own."""
    layers, heads, dim = shape
    block = draw.choice((1, 2, 4, 8))
    keep = torch.zeros(shape, dtype=torch.bool)
    for layer in range(layers):
        for head in range(heads):
            count = draw.choice((0, dim // block, draw.randint(0, dim // block), draw.randint(0, dim // block)))
            kept = torch.randperm(dim // block, generator=generator)[:count]
            keep[layer, head].view(-1, block)[kept] = True
    return ChannelMask(keep, mean_keys=torch.randn(shape, generator=generator) if means else None)


class Case(NamedTuple):
    """A model, a mask, and how a cache is used.

    lengths: of the prompts, left-padded
    chunk: columns of the prompt that come at a time; 0 = the whole prompt
    turn: tokens of a later turn that come at once, after `steps` decoded ones
    generated: by generate(), else tokens are fed
    """

    model: object
    mask: ChannelMask
    sizes: dict
    lengths: list
    chunk: int
    steps: int
    turn: int
    generated: bool
    seed: int


def random_case(kind, seed):
    draw, generator = random.Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    model = decoder(kind, draw)
    shape = kv_shape(model.config)
    plain_softmax = kind != "gpt_oss" and getattr(model.config, "attn_logit_softcapping", None) is None
    longest = draw.choice((3, 12, 40))
    equal, rows = draw.random() < 0.3, draw.randint(1, 3)
    lengths = [draw.randint(1, longest)] * rows if equal else [draw.randint(1, longest) for _ in range(rows)]
    return Case(
        model,
        random_mask(shape, draw, generator, means=plain_softmax and draw.random() < 0.25),
        {"sink": draw.randint(0, 5), "window": draw.randint(0, 10), "flush": draw.randint(1, 5)},
        lengths,
        draw.choice((0, 0, 0, draw.randint(1, longest))),
        draw.randint(1, 12),
        draw.choice((0, 0, draw.randint(1, 12))),
        draw.random() < 0.4,
        seed,
    )


def pieces(case, columns):
    """How many columns each pass takes."""
    chunk = case.chunk or columns
    prompt = [min(chunk, columns - start) for start in range(0, columns, chunk)]
    return prompt + [1] * case.steps + ([case.turn, 1, 1] if case.turn else [])


def fed(case, cache, ids, mask):
    """(ids, mask, logits) of all columns, by passes that are fed tokens."""
    found, first = [], 0
    position = mask.cumsum(-1).sub(1).clamp(min=0)
    for piece in pieces(case, ids.shape[1]):
        if first + piece > ids.shape[1]:
            more = torch.randint(2, VOCAB, (len(ids), piece), generator=torch.Generator().manual_seed(case.seed + first))
            ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
            position = mask.cumsum(-1).sub(1).clamp(min=0)
        now = slice(first, first + piece)
        out = case.model(
            ids[:, now], attention_mask=mask[:, : now.stop], position_ids=position[:, now], past_key_values=cache
        )
        found.append(out.logits)
        first += piece
    return ids, mask, torch.cat(found, 1)


def generated(case, cache, ids, mask):
    """The same by generate(); logits of columns that it does not return are NaN."""
    found = []
    options = {"prefill_chunk_size": case.chunk} if case.chunk else {}
    for turn, steps in enumerate((case.steps, 2) if case.turn else (case.steps,)):
        if turn:
            more = torch.randint(2, VOCAB, (len(ids), case.turn), generator=torch.Generator().manual_seed(case.seed))
            ids, mask, options = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1), {}
        out = case.model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=steps, min_new_tokens=steps,
            do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **options,
        )  # fmt: skip
        unknown = ids.shape[1] - 1 - sum(x.shape[1] for x in found)
        found += [torch.full((len(ids), unknown, VOCAB), torch.nan), torch.stack(out.logits, 1)]
        ids, mask = out.sequences, torch.cat([mask, mask.new_ones(len(ids), steps)], 1)
    return ids[:, :-1], mask[:, :-1], torch.cat(found, 1)


def oracle(case, ids, context, keep):
    """Logits [tokens, vocabulary] of one sequence, by one forward."""
    means = None if case.mask.mean_keys is None else case.mask.mean_keys.double()
    with plain(case.model, Form(context, keep.double(), **case.sizes, empty_heads="drop", mean=means)):
        return case.model(ids[None], use_cache=False).logits[0]


class Found(NamedTuple):
    difference: float  # the largest of a logit, from the oracle
    pruned: float  # of the oracle with the mask, from one without
    middle: bool  # whether any token was read through the middle


@torch.no_grad()
def hold(case):
    """Run the case; how far its logits are from the oracle's."""
    kinds = getattr(case.model.config, "layer_types", None) or []
    keep = case.mask.keep.clone()
    for index, kind in enumerate(kinds):
        keep[index] |= kind == SLIDING  # a cache leaves these layers as they are
    ids, mask = left_padded(case.lengths, case.seed)
    cache = compressed_cache(case.model, case.mask, **case.sizes)
    if case.chunk:
        cache.expect(ids.shape[1])
    ids, mask, got = (generated if case.generated else fed)(case, cache, ids, mask)
    assert case.model.config._attn_implementation == ATTENTION
    found = []
    for row, length in enumerate(case.lengths):
        real = mask[row].bool()
        want, whole = (oracle(case, ids[row, real], length, kept) for kept in (keep, torch.ones_like(keep)))
        of_row = got[row, real]
        known = ~of_row.isnan().any(-1)
        assert known[-1]
        middle = Form(length, None, **case.sizes).middle(int(real.sum())).any()
        found.append(((of_row - want)[known].abs().max(), (whole - want).abs().max(), middle))
    difference, pruned, middle = zip(*found, strict=True)
    return Found(float(max(difference)), float(max(pruned)), bool(max(middle)))


def check(kind, seed):
    """Raise AssertionError unless the cache's logits are the oracle's."""
    found = hold(random_case(kind, seed))
    assert found.difference < TOLERANCE, f"{kind} {seed}: {found}"
    return found


if __name__ == "__main__":
    failed = 0
    for kind in sys.argv[2:] or FAMILIES:
        began, wrong, found = time.time(), Counter(), []
        for seed in range(int(sys.argv[1])):
            try:
                found.append(check(kind, seed))
            except Exception as error:
                line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                at = traceback.extract_tb(error.__traceback__)[-1]
                wrong[line[:60]] += 1
                print("  ", seed, line[:200], f"{at.filename}:{at.lineno}", flush=True)
        differ, pruned = (max((x[i] for x in found), default=0.0) for i in (0, 1))
        matters = sum(x.pruned > 100 * TOLERANCE for x in found)
        print(
            f"{kind}: {len(found)} of {sys.argv[1]} passed; largest difference {differ:.1e}; the mask changes a logit "
            f"by more than {100 * TOLERANCE} in {matters}, by up to {pruned:.1f}; {time.time() - began:.0f} s",
            flush=True,
        )
        failed += len(wrong)
    sys.exit(failed > 0)
