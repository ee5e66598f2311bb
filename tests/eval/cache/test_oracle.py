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
from leank.mask import ChannelMask
from leank.versions import CACHE
from tests.helpers.cache_oracle import (
    DIM,
    FAMILIES,
    HEADS,
    LAYERS,
    SEEDS,
    compare,
    left_padded,
    oracle_cache,
    random_keep,
    run,
    tiny_model,
)
from tests.helpers.replay_tools import Letters, rows

SIZES = st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(1, 6))
LENGTHS = st.lists(st.integers(1, 45), min_size=1, max_size=3)


@settings(max_examples=9, derandomize=True)
@given(
    st.sampled_from(sorted(FAMILIES)), LENGTHS, st.lists(st.integers(1, 20), min_size=3, max_size=3), SIZES,
    st.none() | st.integers(1, 20), st.booleans(), st.integers(1, 25), SEEDS,
)  # fmt: skip
@example("llama", [40], [1] * 3, (4, 8, 4), None, False, 25, 0)
@example("llama", [12, 13, 40], [5, 1, 2], (4, 8, 4), None, True, 5, 1)  # just short of a middle, just past, long
@example("qwen2", [1], [7] * 3, (3, 2, 2), None, False, 12, 2)  # starts in the sink
def test_turns_are_the_dense_oracles(family, first, second, sizes, chunk, means, new_tokens, seed):
    """A padded prompt, whole or announced by expect() and fed in chunks, its reply, and a padded turn over both, which
    is several queries at once; pruned channels are zero or their mean."""
    model, keep, second = tiny_model(family), random_keep(seed), second[: len(first)]
    (ids, mask), (more, more_mask) = left_padded(first, seed), left_padded(second, seed + 1)
    mean, by_layer = None, {}
    if means:
        mean = torch.randn(keep.shape, generator=torch.Generator().manual_seed(seed))
        by_layer["center"] = mean.double()
    cache = compressed_cache(model, ChannelMask(keep, mean_keys=mean), *sizes, backend="torch")
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    if chunk is not None:
        cache.expect(ids.shape[1])
    turns = []
    for attention, one, own in (("oracle", oracle_cache(keep, *sizes, **by_layer), {}), (ATTENTION, cache, options)):
        reply = run(model, one, ids, mask, new_tokens, attention, **own)
        whole = torch.cat([reply[0], more], 1)
        whole_mask = torch.cat([mask, mask.new_ones(len(first), new_tokens), more_mask], 1)
        turns.append([reply, run(model, one, whole, whole_mask, 5, attention)])
    for got, want in zip(turns[1], turns[0], strict=True):
        compare(got, want)
    assert cache.get_seq_length() == whole.shape[1] + 5 - 1


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
            self.model(self.ids[:, : self.prompt], attention_mask=mask, position_ids=positions, **{CACHE: cache})
        return cache

    def answers(self, new_tokens):
        """What the oracle and the cache generate, and the cache."""
        want = run(self.model, self.oracle(), self.ids, self.mask, new_tokens, "oracle")
        cache = self.cache()
        return want, run(self.model, cache, self.ids, self.mask, new_tokens, ATTENTION), cache


@settings(max_examples=9, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, SIZES, SEEDS, st.booleans(), st.integers(1, 14))
@example("llama", (36,), (2, 4, 3), 3, False, 20)  # several moves out of the window
@example("llama", (36, 3), (0, 0, 2), 4, False, 12)  # nothing stays whole but what waits for a flush
@example("qwen2", (9, 36, 10), (4, 5, 2), 5, True, 6)  # one row just short of a middle
def test_tokens_channels_and_values_of_every_head(family, lengths, sizes, seed, values, new_tokens):
    """The prompt is compressed; a question of 1-4 tokens and then the answer are read through the cache."""
    case = Case(family, lengths, sizes, seed, values)
    want, got, cache = case.answers(new_tokens)
    compare(got, want)
    assert cache.get_seq_length() == case.ids.shape[1] + new_tokens - 1


def test_the_oracle_can_tell_the_choices_apart():
    """Else the comparison above would not notice a choice that is ignored."""
    case = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
    tokens = [run(case.model, case.oracle(), case.ids, case.mask, 16, "oracle")[0]]
    for name in ("keep", "tokens", "joins", "pruned"):
        other = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
        setattr(other, name, torch.ones_like(getattr(other, name)))
        tokens.append(run(other.model, other.oracle(), other.ids, other.mask, 16, "oracle")[0])
    assert not any(torch.equal(tokens[0], other) for other in tokens[1:])


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
    """With every channel kept, a compressed layer and the pass's own both go on from the tokens that are held."""
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


def test_a_softmax_that_is_not_plain_is_refused():
    layer = CompressedLayer(Middle(center=torch.zeros(HEADS, DIM)), Sizes(2, 5, 3), choose_backend("torch"))
    layer.update(*torch.randn(2, 1, HEADS, 9, DIM))
    with pytest.raises(ValueError, match="mean_keys"):
        layer.attend(torch.randn(1, 2 * HEADS, 9, DIM), softmax=Softmax(softcap=30.0))
