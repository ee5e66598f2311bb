"""Random decoders of families with layers of several kinds, random masks and random uses of a cache, held to a plain
forward over each sequence alone (`tests/oracles/plain_forward.py`), which has no cache and no padding.

`python -m tests.helpers.random_families 300` tries as many cases of every family and says what it found.
"""

import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from leank.eval.cache import CompressedCache, compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.versions import CACHE
from leank_train.forward.branching import branch, prefill, student
from tests.helpers.branches import pad as side_by_side
from tests.helpers.branches import tokens
from tests.helpers.cache_oracle import left_padded
from tests.helpers.walk import build
from tests.oracles.plain_forward import Form, plain

VOCAB = 89  # of `left_padded`
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
TOLERANCE = 1e-3  # of a logit: scans of linear attention compute in float32, and many layers make more of it
ONE_PASS = ("jamba",)  # several tokens after the first pass are refused
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
    }  # fmt: skip


def nemotron_h(draw):
    return {
        "layers_block_type": kinds(draw, LINEAR, "moe", "mlp"), "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": draw.choice((1, 2)), "conv_kernel": draw.randint(2, 4),
        "chunk_size": draw.choice((4, 32)), "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
        "time_step_min": 1e-9,  # transformers clamps by it in a scan and not in a decoding step
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


def decoder(kind, draw, **more):
    """A random model of a family; more: settings."""
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
    return build(CONFIG_MAPPING[kind](**{**settings, **more})).requires_grad_(False)


def layer_kinds(model):
    return getattr(model.config, "layer_types", None) or [FULL] * model.config.num_hidden_layers


def has_states(model):
    return not {SLIDING, FULL}.issuperset(layer_kinds(model))


def plain_softmax(model):
    """Whether its keys may be pruned towards their means."""
    return model.config.model_type != "gpt_oss" and getattr(model.config, "attn_logit_softcapping", None) is None


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
    rows: of the batch that go on after the prompt
    used: the cache has served another batch
    saved: the cache goes through a file before the turn
    generated: by generate(), else tokens are fed
    """

    model: object
    mask: ChannelMask
    sizes: dict
    lengths: list
    chunk: int
    steps: int
    turn: int
    rows: list
    used: bool
    saved: bool
    generated: bool
    seed: int


def random_case(kind, seed):
    draw, generator = random.Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    model = decoder(kind, draw)
    longest, rows, one_pass = draw.choice((3, 12, 40)), draw.randint(1, 3), kind in ONE_PASS
    lengths = [draw.randint(1, longest)] * rows if draw.random() < 0.3 else draw.choices(range(1, longest + 1), k=rows)
    return Case(
        model,
        random_mask(kv_shape(model.config), draw, generator, means=plain_softmax(model) and draw.random() < 0.25),
        {"sink": draw.randint(0, 5), "window": draw.randint(0, 10), "flush": draw.randint(1, 5)},
        lengths,
        chunk=0 if one_pass or draw.random() < 0.7 else draw.randint(2 if has_states(model) else 1, longest),
        steps=draw.randint(1, 12),
        turn=0 if one_pass or draw.random() < 0.6 else draw.randint(1, 12),
        rows=list(range(rows)) if draw.random() < 0.7 else draw.choices(range(rows), k=draw.randint(1, 4)),
        used=draw.random() < 0.2,
        saved=draw.random() < 0.3,
        generated=draw.random() < 0.4,
        seed=seed,
    )


def words(case, rows, columns, salt):
    """Random ids of a turn."""
    return torch.randint(2, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(1000 * case.seed + salt))


def through_file(case, cache):
    """The cache that a file of it gives; the same cache where states cannot be saved."""
    if not case.saved or has_states(case.model):
        return cache
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache.safetensors")
        return CompressedCache.load(Path(folder) / "cache.safetensors", case.model)


def fed(case, cache, ids, mask):
    """(ids, mask, logits) of all columns, by passes that are fed tokens."""
    columns, chunk, found = ids.shape[1], case.chunk or ids.shape[1], []
    prompt = [min(chunk, columns - start) for start in range(0, columns, chunk)]
    later = [1] * case.steps + ([case.turn, 1, 1] if case.turn else [])
    for number, new in enumerate(prompt + later):
        if number == len(prompt):  # some rows go on, some of them twice
            cache.reorder_cache(torch.tensor(case.rows))
            ids, mask, found = ids[case.rows], mask[case.rows], [x[case.rows] for x in found]
        if number == len(prompt) + case.steps:
            cache = through_file(case, cache)
        first = sum(x.shape[1] for x in found)
        if number >= len(prompt):
            ids, mask = torch.cat([ids, words(case, len(ids), new, number)], 1), pad(mask, (0, new), value=1)
        position = mask.cumsum(-1).sub(1).clamp(min=0)[:, first : first + new]
        now = ids[:, first : first + new]
        seen = mask[:, : first + new]
        found.append(case.model(now, attention_mask=seen, position_ids=position, **{CACHE: cache}).logits)
    return ids, mask, torch.cat(found, 1)


def generated(case, cache, ids, mask):
    """The same by generate(), whose logits are those of new tokens; zero elsewhere, and so is the mask."""
    known, logits, options = torch.zeros_like(mask[:, :-1]), torch.zeros(len(ids), ids.shape[1] - 1, VOCAB), {}
    if case.chunk:
        options["prefill_chunk_size"] = case.chunk
    for turn, steps in enumerate((case.steps, 2) if case.turn else (case.steps,)):
        if turn:
            cache, options = through_file(case, cache), {}
            ids, mask = torch.cat([ids, words(case, len(ids), case.turn, 0)], 1), pad(mask, (0, case.turn), value=1)
            known, logits = pad(known, (0, case.turn)), pad(logits, (0, 0, 0, case.turn))
        out = case.model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=steps, min_new_tokens=steps,
            do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **options,
        )  # fmt: skip
        ids, mask = out.sequences, pad(mask, (0, steps), value=1)
        known, logits = pad(known, (0, steps), value=1), torch.cat([logits, *(x[:, None] for x in out.logits)], 1)
    return ids[:, :-1], mask[:, :-1], logits, known.bool()


def of_cache(model, mask):
    """The channels [L, H, D] that a cache keeps, which leaves layers with a sliding window as they are."""
    sliding = torch.tensor([kind == SLIDING for kind in layer_kinds(model)])
    return mask.keep | sliding[:, None, None]


def oracle(case, ids, context, keep):
    """Logits [tokens, vocabulary] of one sequence, by one forward."""
    means = None if case.mask.mean_keys is None else case.mask.mean_keys.double()
    with plain(case.model, Form(context, keep.double(), **case.sizes, empty_heads="drop", mean=means)):
        return case.model(ids[None], use_cache=False).logits[0]


class Found(NamedTuple):
    difference: float  # the largest of a logit, from the oracle
    pruned: float  # of the oracle with the mask, from one without


@torch.no_grad()
def hold(case, other=None):
    """Run the case; how far its logits are from those of its oracle, or of another case's."""
    other = other or case
    keep = of_cache(other.model, other.mask)
    ids, mask = left_padded(case.lengths, case.seed)
    cache = compressed_cache(case.model, case.mask, **case.sizes)
    if case.used:
        case.model(ids[:1], attention_mask=mask[:1], **{CACHE: cache})
        cache.reset()
    if case.chunk:
        cache.expect(ids.shape[1])
    if case.generated:
        ids, mask, got, known = generated(case, cache, ids, mask)
        lengths = case.lengths
    else:
        ids, mask, got = fed(case, cache, ids, mask)
        known, lengths = mask.bool(), [case.lengths[row] for row in case.rows]
    found = []
    for row, length in enumerate(lengths):
        real = mask[row].bool()
        want, whole = (oracle(other, ids[row, real], length, kept) for kept in (keep, torch.ones_like(keep)))
        compared = known[row, real]
        difference = (got[row, real] - want)[compared].abs()
        assert difference.isfinite().all()
        found.append((float(difference.max()), float((whole - want)[compared].abs().max())))
    assert case.model.config._attn_implementation == ATTENTION
    return Found(*map(max, zip(*found, strict=True)))


def check(kind, seed):
    """Raise AssertionError unless the cache's logits are the oracle's."""
    found = hold(random_case(kind, seed))
    assert found.difference < TOLERANCE, f"{kind} {seed}: {found}"
    return found


@torch.no_grad()
def check_trained(kind, seed):
    """The student's hidden states in training are those of the cache; texts are shorter than sliding windows."""
    draw, generator = random.Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    model = decoder(kind, draw, sliding_window=64)
    mask = random_mask(kv_shape(model.config), draw, generator, means=plain_softmax(model) and draw.random() < 0.5)
    mask = ChannelMask(of_cache(model, mask), mean_keys=mask.mean_keys)
    lengths = [[draw.randint(1, most) for _ in range(n)] for most, n in ((24, 2), (6, 4), (8, 4))]
    documents, questions, answers = (tokens(some, 3 * seed + i) for i, some in enumerate(lengths))
    sizes = {"sink": draw.randint(0, 5), "window": draw.randint(1, 9)}
    prefix = prefill(model, side_by_side(documents), lengths[0])
    question = branch(model, prefix, side_by_side(questions), lengths[1])
    if mask.mean_keys is not None:
        prefix = prefix.center_(mask.mean_keys)
    alpha, hands = mask.keep.double(), {**sizes, "empty_heads": "drop"}
    want = student(model, prefix, question, side_by_side(answers), lengths[2], alpha, **hands)
    sizes = {"sink": sizes["sink"], "window": sizes["window"] - 1, "flush": 1}  # Eq. 1 counts the row, a cache does not
    for row, answer in enumerate(answers):
        cache, passes = compressed_cache(model, mask, **sizes), [torch.cat([documents[row // 2], questions[row]])]
        got = [model.base_model(x[None], **{CACHE: cache}).last_hidden_state for x in (*passes, *answer[:, None])]
        torch.testing.assert_close(torch.cat(got[1:], 1)[0], want[row, : len(answer)], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    cases, all_passed = int(sys.argv[1]), True
    for kind in sys.argv[2:] or FAMILIES:
        began, found = time.time(), []
        for seed in range(cases):
            try:
                found.append(check(kind, seed))
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                print(f"{kind} {seed}: {error!r:.300} ({at.filename}:{at.lineno})", flush=True)
        differ, pruned = (max((x[i] for x in found), default=0.0) for i in (0, 1))
        matters = sum(x.pruned > 10 * TOLERANCE for x in found)
        print(
            f"{kind}: {len(found)} of {cases} cases pass; the largest difference of a logit is {differ:.1e}; the mask "
            f"changes one by more than {10 * TOLERANCE} in {matters} cases; {time.time() - began:.0f} s",
            flush=True,
        )
        all_passed &= len(found) == cases
    sys.exit(not all_passed)
