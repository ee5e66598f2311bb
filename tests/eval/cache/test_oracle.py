"""The cache against dense attention over what it should hold, step by step, and keys about their mean."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import PromptLayer, prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method
from leank.eval.methods.axes import Channels, PromptPass, Tokens
from leank.eval.run.replay import Replay, Settings
from tests.helpers.cache_oracle import (
    DIM,
    FAMILIES,
    HEADS,
    LAYERS,
    SEEDS,
    left_padded,
    oracle_cache,
    random_keep,
    run,
    tiny_model,
)
from tests.helpers.replay_tools import Letters, rows

SIZES = st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(1, 6))
LENGTHS = st.lists(st.integers(1, 45), min_size=1, max_size=3)


def cache_of(model, keep, *sizes):
    return compressed_cache(model, keep, *sizes, backend="torch")


def compare(got, want):
    assert torch.equal(got[0], want[0])
    if want[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=1e-8, atol=1e-8)


@settings(max_examples=16, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, SIZES, st.integers(1, 25), SEEDS)
@example("llama", [40], (4, 8, 4), 25, 0)
@example("llama", [12, 13, 40], (4, 8, 4), 5, 1)  # one row just short of a middle, one just past, one long
@example("qwen2", [1], (3, 2, 2), 12, 2)  # starts in the sink
def test_generate_is_the_dense_oracles(family, lengths, sizes, new_tokens, seed):
    model, keep = tiny_model(family), random_keep(seed)
    ids, mask = left_padded(lengths, seed)
    want = run(model, oracle_cache(keep, *sizes), ids, mask, new_tokens, "oracle")
    cache = cache_of(model, keep, *sizes)
    compare(run(model, cache, ids, mask, new_tokens, ATTENTION), want)
    assert cache.get_seq_length() == ids.shape[1] + new_tokens - 1


def test_the_oracle_can_tell_pruned_from_dense():
    model, keep = tiny_model("llama"), random_keep(3)
    ids, mask = left_padded([40], 3)
    pruned = run(model, oracle_cache(keep, 2, 4, 2), ids, mask, 20, "oracle")
    dense = run(model, oracle_cache(torch.ones_like(keep), 2, 4, 2), ids, mask, 20, "oracle")
    assert not torch.equal(pruned[0], dense[0])


@settings(max_examples=10, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, st.lists(st.integers(1, 20), min_size=3, max_size=3), SIZES, SEEDS)
def test_second_turn(family, first, second, sizes, seed):
    """A second prompt, itself left-padded, over the compressed first one: several queries at once, then more tokens."""
    model, keep, second = tiny_model(family), random_keep(seed), second[: len(first)]
    ids, mask = left_padded(first, seed)
    more_ids, more_mask = left_padded(second, seed + 1)
    results = []
    for attention in ("oracle", ATTENTION):
        cache = oracle_cache(keep, *sizes) if attention == "oracle" else cache_of(model, keep, *sizes)
        turn = run(model, cache, ids, mask, 6, attention)[0]
        answer = torch.ones(len(first), 6, dtype=mask.dtype)
        full, full_mask = torch.cat([turn, more_ids], 1), torch.cat([mask, answer, more_mask], 1)
        results.append(run(model, cache, full, full_mask, 9, attention))
    compare(results[1], results[0])


@settings(max_examples=8, derandomize=True)
@given(LENGTHS, SIZES, st.integers(1, 20), SEEDS)
def test_chunked_prefill(lengths, sizes, chunk, seed):
    """A prompt announced with expect() and fed in chunks is sealed as a whole."""
    model, keep = tiny_model("llama"), random_keep(seed)
    ids, mask = left_padded(lengths, seed)
    want = run(model, oracle_cache(keep, *sizes), ids, mask, 8, "oracle")
    cache = cache_of(model, keep, *sizes)
    cache.expect(ids.shape[1])
    compare(run(model, cache, ids, mask, 8, ATTENTION, prefill_chunk_size=chunk), want)


@pytest.mark.parametrize("lengths", [[30], [30, 7]])
def test_beam_search(lengths):
    model, keep, sizes = tiny_model("llama"), random_keep(5), (2, 5, 3)
    ids, mask = left_padded(lengths, 5)
    options = {"num_beams": 3, "num_return_sequences": 2}
    want = run(model, oracle_cache(keep, *sizes), ids, mask, 14, "oracle", **options)
    cache = cache_of(model, keep, *sizes)
    assert torch.equal(run(model, cache, ids, mask, 14, ATTENTION, **options)[0], want[0])


def test_a_long_generation_grows_the_middle_several_times():
    model, keep, sizes = tiny_model("llama"), random_keep(9, empty=0), (4, 16, 16)
    ids, mask = left_padded([50, 20], 9)
    cache = cache_of(model, keep, *sizes)
    run(model, cache, ids, mask, 300, ATTENTION)
    oracle = run(model, oracle_cache(keep, *sizes), ids, mask, 60, "oracle")[0]
    again = cache_of(model, keep, *sizes)
    assert torch.equal(run(model, again, ids, mask, 60, ATTENTION)[0], oracle)
    tail = cache.compressed[0].store.tail
    assert tail.length.max() > 250
    assert (tail.capacity[tail.capacity > 0] - tail.length[tail.capacity > 0]).max() <= 128 + 64


# Heads that keep their own tokens, and channels of K and V


@dataclass(frozen=True)
class GivenTokens(Tokens):
    """tokens [L, B, H, T]; joining [L, H]."""

    tokens: Tensor
    joining: Tensor | None = None

    def keep_mask(self, prefill, config, sizes):
        return list(self.tokens)

    def joins(self, config):
        return self.joining


@dataclass(frozen=True)
class GivenChannels(Channels):
    """keys, values: [L, H, D]."""

    keys: Tensor
    values: Tensor | None = None

    def keep_mask(self, prefill, config):
        return self.keys

    def keep_value_mask(self, prefill, config):
        return self.values


class Case:
    """Random choices for random prompts, the method that makes them and the oracle that shares no code with it."""

    def __init__(self, family, lengths, sizes, seed, values=False, empty=0.3):
        generator = torch.Generator().manual_seed(seed)
        ids, mask = left_padded(lengths, seed)
        more = torch.randint(2, 89, (len(ids), 1 + seed % 4), generator=generator)
        share = torch.rand(LAYERS, 1, HEADS, 1, generator=generator) * 1.3 - 0.15  # of tokens kept: some heads 0 or all
        self.model, self.sizes, self.prompt = tiny_model(family), sizes, ids.shape[1]
        self.ids, self.mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
        self.keep = random_keep(seed, empty)
        self.tokens = torch.rand(LAYERS, len(ids), HEADS, ids.shape[1], generator=generator) < share
        self.joins = torch.rand(LAYERS, HEADS, generator=generator) < 0.6
        self.pruned = torch.rand(LAYERS, HEADS, DIM, generator=generator) < 0.6 if values else None

    def method(self, tokens):
        names = dict(zip(("sink", "window", "flush"), self.sizes, strict=True))
        return Method("m", GivenChannels(self.keep, self.pruned), GivenTokens(tokens, self.joins), **names)

    def cache(self):
        """The method's cache with the prompts in it."""
        ids, real = self.ids[:, : self.prompt], self.mask[:, : self.prompt].bool()
        return self.method(self.tokens).cache(self.model, prefill(self.model, ids, real, 0))

    def oracle(self, *sizes):
        """The oracle with the prompts in it; sizes: None = those of the case."""
        by_layer = {"tokens": self.tokens, "joins": self.joins}
        if self.pruned is not None:
            by_layer["values"] = self.pruned
        cache = oracle_cache(self.keep, *(sizes or self.sizes), self.prompt, **by_layer)
        self.model.set_attn_implementation("oracle")
        mask = self.mask[:, : self.prompt]
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            self.model(self.ids[:, : self.prompt], attention_mask=mask, position_ids=positions, past_key_values=cache)
        return cache

    def answers(self, new_tokens):
        """What the oracle and the cache generate, and the cache."""
        want = run(self.model, self.oracle(), self.ids, self.mask, new_tokens, "oracle")
        cache = self.cache()
        return want, run(self.model, cache, self.ids, self.mask, new_tokens, ATTENTION), cache


@settings(max_examples=14, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, SIZES, SEEDS, st.booleans(), st.integers(1, 14))
@example("llama", (36,), (2, 4, 3), 3, False, 20)  # several moves out of the window
@example("llama", (36, 3), (0, 0, 2), 4, False, 12)  # nothing stays whole but what waits for a flush
@example("qwen2", (9, 36, 10), (4, 5, 2), 5, True, 6)  # one row just short of a middle
def test_tokens_channels_and_values_of_every_head(family, lengths, sizes, seed, values, new_tokens):
    """The prompt is sealed; a question of 1-4 tokens and then the answer are read through the cache."""
    case = Case(family, lengths, sizes, seed, values)
    want, got, cache = case.answers(new_tokens)
    compare(got, want)
    assert cache.get_seq_length() == case.ids.shape[1] + new_tokens - 1


def test_the_oracle_can_tell_the_choices_apart():
    """Else the comparison above would not notice a choice that is ignored."""
    case = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
    tokens = [run(case.model, case.oracle(), case.ids, case.mask, 16, "oracle")[0]]
    for name in ("tokens", "joins", "pruned"):
        other = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
        setattr(other, name, torch.ones_like(getattr(other, name)))
        tokens.append(run(other.model, other.oracle(), other.ids, other.mask, 16, "oracle")[0])
    assert not any(torch.equal(tokens[0], other) for other in tokens[1:])


@pytest.mark.parametrize("what", ["tokens", "keep"])
def test_an_empty_middle_holds_nothing(what):
    case = Case("llama", (30, 12), (2, 4, 3), 2)
    setattr(case, what, torch.zeros_like(getattr(case, what)))
    case.joins = torch.zeros_like(case.joins)
    want, got, cache = case.answers(10)
    assert torch.equal(got[0], want[0])
    assert cache.memory().middle_k == cache.memory().middle_v == 0
    assert all(layer.store.prompt.k.numel() == layer.store.tail.v.numel() == 0 for layer in cache.compressed)


def test_channels_see_which_tokens_are_kept():
    case = Case("llama", (30, 12), (2, 4, 3), 2)
    seen = []

    class Looks(GivenChannels):
        def keep_mask(self, prefill, config):
            seen.extend(prefill.selected)
            return self.keys

    dense = prefill(case.model, case.ids[:, :30], case.mask[:, :30].bool(), 0)
    Method("m", Looks(case.keep), GivenTokens(case.tokens), sink=2, window=4, flush=3).cache(case.model, dense)
    assert dense.selected is None  # the pass is shared by methods
    for layer in range(LAYERS):
        for row, length in enumerate((30, 12)):
            want = case.tokens[layer, row].clone()
            want[:, 30 - length : 30 - length + 2] = want[:, -4:] = True
            want[:, : 30 - length] = False
            assert torch.equal(seen[layer][row], want)


class Thinned(PromptPass):
    """A dense pass whose second layer then forgets every third column of the prompt but the last."""

    def run(self, model, ids, real, room, obs_queries, chunk):
        whole = prefill(model, ids, real, room, obs_queries, chunk)
        kept = [c for c in range(ids.shape[1]) if c % 3 or c == ids.shape[1] - 1]
        columns = torch.tensor(kept).expand(len(ids), -1)
        if real is not None:
            columns = torch.where(real[:, kept], columns, -1)
        layer, old = PromptLayer(ids.shape[1] + room, obs_queries), whole.layers[1]
        layer.hold(columns, ids.shape[1])
        layer.update(old.keys[:, :, kept], old.values[:, :, kept])
        whole.layers[1] = layer
        return whole


def thinned_oracle(case):
    """The same as an oracle: no window, no sink, the forgotten columns masked out from the prompt on."""
    case.tokens, case.keep, case.joins = (torch.ones_like(x) for x in (case.tokens, case.keep, case.joins))
    case.tokens[1, :, :, torch.arange(case.prompt) % 3 == 0] = False
    case.tokens[1, :, :, -1] = True
    return case.oracle(0, 1, 10**6)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("lengths", [(31,), (31, 14)])
def test_layers_may_hold_fewer_tokens_than_the_prompt_has(lengths, compressed):
    """With every channel kept, a sealed layer and the pass's own both go on from the tokens that are held."""
    case = Case("llama", lengths, (2, 4, 3), 12)
    want = run(case.model, thinned_oracle(case), case.ids, case.mask, 9, "oracle")[0]
    method = Method(
        "m", GivenChannels(torch.ones_like(case.keep)) if compressed else None, prefill=Thinned(), sink=2, window=4
    )
    ids, real = case.ids[:, : case.prompt], case.mask[:, : case.prompt].bool()
    cache = method.cache(case.model, Thinned().run(case.model, ids, None if real.all() else real, 12, 0, None))
    assert cache.get_seq_length() == case.prompt
    if compressed:
        assert cache.layers[1].store.seen.max() < cache.layers[0].store.seen.max()
    assert torch.equal(run(case.model, cache, case.ids, case.mask, 9, ATTENTION)[0], want)


def test_the_replay_runs_a_methods_own_pass():
    case = Case("llama", (31, 14), (2, 4, 3), 12)
    prompts = [case.ids[row, case.mask[row].bool()].tolist() for row in range(2)]
    methods = [
        Method("dense"),
        Method("thin", prefill=Thinned()),
        Method("both", GivenChannels(torch.ones_like(case.keep)), prefill=Thinned(), sink=2, window=4),
    ]
    engine = Replay(case.model, Letters(), Settings())
    made = {m.label: a for m, a in engine.answers([Prompt(p, 5) for p in prompts], rows(2, 9), methods)}
    alone = {m.label: a for m, a in engine.answers([Prompt(p, 5) for p in prompts], rows(2, 9), methods[1:])}
    tokens = {label: [answer.tokens for answer in answers] for label, answers in made.items()}
    assert tokens["thin"] == tokens["both"] != tokens["dense"]
    assert tokens["thin"] == [answer.tokens for answer in alone["thin"]]
    assert made["thin"][0].compressed
    assert made["thin"][0].seconds["prefill"] != made["dense"][0].seconds["prefill"]


GROUP, SPANS = 2, Sizes(sink=2, window=5, flush=3)


def rebuilt(q, k, v, keep, mean, in_middle):
    """Attention of one query per row [B, Hq, D]: pruned channels of middle keys are their mean, empty heads drop it."""
    k_middle = torch.where(keep[:, None], k, mean[:, None])
    k = torch.where(in_middle[None, None, :, None], k_middle, k).repeat_interleave(GROUP, 1)
    logits = torch.einsum("bhd,bhtd->bht", q, k) / DIM**0.5
    dropped = (~keep.any(-1))[:, None] & in_middle
    logits = logits.masked_fill(dropped.repeat_interleave(GROUP, 0), -torch.inf)
    return torch.einsum("bht,bhtd->bhd", logits.softmax(-1), v.repeat_interleave(GROUP, 1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunks", [(30,), (7, 23)])
def test_a_pruned_channel_is_its_mean(seed, chunks):
    g = torch.Generator().manual_seed(seed)
    keep, mean = torch.rand(HEADS, DIM, generator=g) > 0.6, torch.randn(HEADS, DIM, generator=g) * 3
    keep[1] = False
    layer = CompressedLayer(Middle(keep, center=mean), SPANS, choose_backend("torch"))
    layer.expect(sum(chunks))
    total = sum(chunks) + 12
    k, v = torch.randn(2, 2, HEADS, total, DIM, generator=g, dtype=torch.float64)
    q = torch.randn(2, HEADS * GROUP, total, DIM, generator=g, dtype=torch.float64)
    at = 0
    for n in (*chunks, 1, 1, 1, 4, 1, 1, 3):
        new = slice(at, at + n)
        layer.update(k[:, :, new], v[:, :, new])
        start = None if layer.store is None else layer.store.start.copy()
        out = layer.attend(q[:, :, new])
        if start is not None and n == 1:
            tokens = torch.arange(at + 1)
            in_middle = (tokens >= SPANS.sink) & (tokens < int(start[0]))
            assert in_middle.any()
            expected = rebuilt(q[:, :, at], k[:, :, : at + 1], v[:, :, : at + 1], keep, mean.double(), in_middle)
            torch.testing.assert_close(out[:, 0], expected, rtol=1e-5, atol=1e-5)
        at += n


def test_a_softmax_that_is_not_plain_is_refused():
    layer = CompressedLayer(Middle(center=torch.zeros(HEADS, DIM)), SPANS, choose_backend("torch"))
    layer.update(*torch.randn(2, 1, HEADS, 9, DIM))
    with pytest.raises(ValueError, match="mean_keys"):
        layer.attend(torch.randn(1, HEADS * GROUP, 9, DIM), softmax=Softmax(softcap=30.0))
