"""A middle in which every KV head keeps its own tokens (and channels of K and V): generation is that of a dense cache
in which the others are masked out. `test_store` looks at what the stores hold."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.prefill import PromptLayer, prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method
from leank.eval.methods.axes import Channels, PromptPass, Tokens
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from tests.helpers.cache_oracle import (
    DIM,
    FAMILIES,
    HEADS,
    LAYERS,
    left_padded,
    oracle_cache,
    random_keep,
    run,
    tiny_model,
)
from tests.helpers.replay_tools import Letters, rows


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


@dataclass(frozen=True)
class Case:
    """Random choices for random prompts, the method that makes them and the oracle that shares no code with it."""

    family: str
    lengths: tuple[int, ...]
    sizes: tuple[int, int, int]
    seed: int
    values: bool = False
    empty: float = 0.3

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        ids, mask = left_padded(self.lengths, self.seed)
        more = torch.randint(2, 89, (len(ids), 1 + self.seed % 4), generator=generator)
        share = torch.rand(LAYERS, 1, HEADS, 1, generator=generator) * 1.3 - 0.15  # of tokens kept: some heads 0 or all
        made: dict[str, Any] = {
            "model": tiny_model(self.family),
            "ids": torch.cat([ids, more], 1),
            "mask": torch.cat([mask, torch.ones_like(more)], 1),
            "keep": random_keep(self.seed, self.empty),
            "tokens": torch.rand(LAYERS, len(ids), HEADS, ids.shape[1], generator=generator) < share,
            "joins": torch.rand(LAYERS, HEADS, generator=generator) < 0.6,
            "pruned": torch.rand(LAYERS, HEADS, DIM, generator=generator) < 0.6 if self.values else None,
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def prompt(self):
        return self.tokens.shape[-1]

    def method(self, tokens):
        names = dict(zip(("sink", "window", "flush"), self.sizes, strict=True))
        return Method("m", GivenChannels(self.keep, self.pruned), GivenTokens(tokens, self.joins), **names)

    def cache(self, row=None):
        """The method's cache with the prompts, or with one row of them alone, without its padding, in it."""
        ids, real, tokens = self.ids[:, : self.prompt], self.mask[:, : self.prompt].bool(), self.tokens
        if row is not None:
            ids, real = ids[row : row + 1, real[row]], None
            tokens = tokens[:, row : row + 1, :, -ids.shape[1] :]
        return self.method(tokens).cache(self.model, prefill(self.model, ids, real, 0))

    def oracle(self):
        by_layer = {"tokens": self.tokens, "joins": self.joins}
        if self.values:
            by_layer["values"] = self.pruned
        cache = oracle_cache(self.keep, *self.sizes, self.prompt, **by_layer)
        self.model.set_attn_implementation("oracle")
        mask = self.mask[:, : self.prompt]
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            self.model(self.ids[:, : self.prompt], attention_mask=mask, position_ids=positions, past_key_values=cache)
        return cache


SIZES = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 5))
LENGTHS = st.lists(st.integers(1, 36), min_size=1, max_size=3).map(tuple)


@settings(max_examples=14, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, SIZES, st.integers(0, 2**20), st.booleans(), st.integers(1, 14))
@example("llama", (36,), (2, 4, 3), 3, False, 20)  # several moves out of the window
@example("llama", (36, 3), (0, 0, 2), 4, False, 12)  # nothing stays whole but what waits for a flush
@example("qwen2", (9, 36, 10), (4, 5, 2), 5, True, 6)  # one row just short of a middle
def test_generation_is_the_dense_oracles(family, lengths, sizes, seed, values, new_tokens):
    """The prompt is sealed; a question of 1-4 tokens and then the answer are read through the cache."""
    case = Case(family, lengths, sizes, seed, values)
    want = run(case.model, case.oracle(), case.ids, case.mask, new_tokens, "oracle")
    cache = case.cache()
    got = run(case.model, cache, case.ids, case.mask, new_tokens, ATTENTION)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-8, atol=1e-8)
    assert cache.get_seq_length() == case.ids.shape[1] + new_tokens - 1


def test_the_oracle_can_tell_the_choices_apart():
    """Else the comparison above would not notice a choice that is ignored."""
    case = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
    tokens = [run(case.model, case.oracle(), case.ids, case.mask, 16, "oracle")[0]]
    for name in ("tokens", "joins", "pruned"):
        other = Case("llama", (36,), (2, 4, 3), 3, values=True, empty=0)
        object.__setattr__(other, name, torch.ones_like(getattr(other, name)))
        tokens.append(run(other.model, other.oracle(), other.ids, other.mask, 16, "oracle")[0])
    assert not any(torch.equal(tokens[0], other) for other in tokens[1:])


@pytest.mark.parametrize("what", ["tokens", "channels"])
def test_an_empty_middle_holds_nothing(what):
    case = Case("llama", (30, 12), (2, 4, 3), 2)
    zeros = torch.zeros_like(case.tokens if what == "tokens" else case.keep)
    object.__setattr__(case, "tokens" if what == "tokens" else "keep", zeros)
    object.__setattr__(case, "joins", torch.zeros_like(case.joins))
    want = run(case.model, case.oracle(), case.ids, case.mask, 10, "oracle")[0]
    cache = case.cache()
    assert torch.equal(run(case.model, cache, case.ids, case.mask, 10, ATTENTION)[0], want)
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
    stays = torch.ones_like(case.tokens)
    stays[1, :, :, torch.arange(case.prompt) % 3 == 0] = False
    stays[1, :, :, -1] = True
    keep, ones = torch.ones_like(case.keep), torch.ones_like(case.joins)
    object.__setattr__(case, "tokens", stays)
    cache = oracle_cache(keep, 0, 1, 10**6, case.prompt, tokens=stays, joins=ones)
    case.model.set_attn_implementation("oracle")
    mask = case.mask[:, : case.prompt]
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        case.model(case.ids[:, : case.prompt], attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache


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
