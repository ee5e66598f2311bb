"""Random decoders, masks and uses of a cache, held to a plain forward over each sequence alone."""

import random

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from leank.eval.cache import compressed_cache
from leank.mask import ChannelMask
from leank.shape import kv_shape
from tests.helpers.families import build
from tests.helpers.random_families import FAMILIES, TOLERANCE, check, check_trained, decoder, hold, random_case

TRAINED = ("gemma3_text", "gemma4_text", "gpt_oss")


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cache_is_a_plain_forward_with_channels_zeroed(kind):
    assert max(check(kind, seed).pruned for seed in (0, 2)) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_three_hundred_cases(kind):
    """`python -m tests.helpers.random_families 300` says more of them."""
    assert sum(check(kind, seed).pruned > 10 * TOLERANCE for seed in range(300)) > 90


class Stopped(BaseException):
    """As Ctrl-C raises."""


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "lfm2", "jamba"])
def test_a_pass_that_broke_off_between_layers_is_not_gone_on_from(kind):
    model = decoder(kind, random.Random(0))
    ids, more = torch.arange(2, 22)[None], torch.tensor([[2]])
    cache = compressed_cache(model, None, sink=2, window=4, flush=2)

    def stop(*_):
        raise Stopped

    for layer in model.model.layers[:-1]:
        for before in ([], [ids]):  # the prompt breaks off, or a step
            cache.reset()
            want = [model(x, past_key_values=cache).logits for x in (ids, more)]
            cache.reset()
            for whole in before:
                model(whole, past_key_values=cache)
            broken = more if before else ids
            hook = layer.register_forward_hook(stop)
            with pytest.raises(Stopped):
                model(broken, past_key_values=cache)
            hook.remove()
            with pytest.raises((RuntimeError, ValueError), match=r"call (cache\.)?reset\(\)"):
                model(broken, past_key_values=cache)
            cache.reset()
            assert all(map(torch.equal, want, [model(x, past_key_values=cache).logits for x in (ids, more)]))


@pytest.mark.parametrize("kind", TRAINED)
def test_a_cache_reads_what_the_student_read(kind):
    for seed in range(2):
        check_trained(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_cache_reads_what_a_hundred_students_read(kind):
    for seed in range(100):
        check_trained(kind, seed)


def test_the_oracle_can_tell():
    """A cache that is off by one token, channel or head is further from the oracle than the tolerance."""
    case = random_case("gpt_oss", 0)._replace(
        sizes={"sink": 2, "window": 4, "flush": 3}, lengths=[30, 23], chunk=0, steps=7, rows=[0, 1], generated=False
    )
    keep = torch.rand(case.mask.keep.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[0, 0] = False
    case = case._replace(mask=ChannelMask(keep))
    assert hold(case).difference < TOLERANCE
    for name in case.sizes:
        other = case._replace(sizes={**case.sizes, name: case.sizes[name] + 1})
        assert hold(case, other).difference > 10 * TOLERANCE, name
    one = keep.clone()
    one[0, -1, 0] ^= True
    some = keep.clone()
    some[0, 0, 0] = True  # no empty head any more
    for other in (one, some):
        assert hold(case, case._replace(mask=ChannelMask(other))).difference > 10 * TOLERANCE


# What cannot be right


@torch.no_grad()
def go(model, cache, mask, passes):
    """Give the cache these numbers of columns of the batch, one pass after the other."""
    first = cache.get_seq_length()
    for new in passes:
        ids, seen = torch.ones(len(mask), new, dtype=torch.long), mask[:, : first + new]
        model(ids, attention_mask=seen, past_key_values=cache)
        first += new


@pytest.mark.parametrize(
    ("columns", "before", "then"),
    [
        ([6], [], 10),  # a hole in the prompt
        ([8, 9], [10], 1),  # a prompt that is padded on the right
        ([8, 9], [10], 2),
        ([11], [10, 1], 3),  # a turn that is padded on the left
        ([], [], 1),  # a chunk of padding alone
    ],
)
def test_padding_that_a_state_would_take_for_a_token_is_refused(columns, before, then):
    model, mask = build("qwen3_next"), torch.ones(2, 14, dtype=torch.long)
    mask[1, [0, 1, 2, 3, *columns]] = 0
    cache = compressed_cache(model, None, 2, 3, 2)
    cache.expect(10)
    go(model, cache, mask, before)
    with pytest.raises(ValueError, match="takes padding for a token"):
        go(model, cache, mask, [then])
    with pytest.raises((ValueError, RuntimeError), match=r"call (cache\.)?reset\(\)"):  # the states are wrong by now
        go(model, cache, mask, [1])
    cache.reset()
    cache.expect(10)
    mask[1, 4:] = 1
    go(model, cache, mask, [4, 6, 1, 1])


def test_states_that_cannot_go_on_with_several_tokens_are_refused():
    """Before any layer has run: the same cache goes on with single tokens."""
    model, mask = build("jamba"), torch.ones(1, 14, dtype=torch.long)
    cache, other = (compressed_cache(model, None, 2, 3, 2) for _ in range(2))
    for one in (cache, other):
        go(model, one, mask, [10])
    with pytest.raises(ValueError, match="linear attention of jamba forgets what it has read"):
        go(model, cache, mask, [2])
    states = [torch.cat([x.flatten() for x in one.layers[0].states]) for one in (cache, other)]
    assert torch.equal(*states)
    go(model, cache, mask, [1, 1])
    with pytest.raises(ValueError, match="give the prompt in one pass"):
        model.generate(mask, past_key_values=cache, max_new_tokens=2)


GEMMA4 = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        ("gemma4_text", {**GEMMA4, "global_head_dim": 32}, "layers of different shapes"),
        (
            "gemma4_text",
            {**GEMMA4, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            "layers of different shapes",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "global_head_dim": 16, "num_kv_shared_layers": 1},
            "layers that read keys of others",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attention that is not causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention that is not causal"),
        (
            "llama",
            {"num_key_value_heads": 10**9},
            "num_key_value_heads=1000000000, which does not divide num_attention",
        ),
        ("moshi", {}, "has a sliding window in its cache, but none in its attention"),
        ("recurrent_gemma", {}, "holds its states in the model itself"),
    ],
)
def test_decoders_that_no_mask_can_be_right_for_are_refused(kind, settings, line):
    with pytest.raises(ValueError, match=f"model={kind} .*{line}"):
        kv_shape(CONFIG_MAPPING[kind](**settings))
