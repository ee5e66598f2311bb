"""Passes that drop tokens on their way up (GemFilter, FastKV, PyramidInfer, ASL), against passes layer by layer."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, DynamicCache

from leank.eval.__main__ import run as run_eval
from leank.eval.inference.decode import decode
from leank.eval.inference.prefill import pad_left, prefill
from leank.eval.methods import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.think import ThinK
from leank.eval.methods.common.slicing import layer_at, slicing
from leank.eval.methods.prefill import asl
from leank.eval.methods.prefill.asl import ASL, DEEP, few_layers
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.methods.prefill.pyramid_infer import PyramidInfer
from leank.eval.methods.registry import choice
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.report.summary import summarise
from leank.eval.rows import read
from leank.mask import ChannelMask
from tests.conftest import ARCHITECTURES, tiny_model
from tests.helpers.cache_oracle import VOCAB
from tests.helpers.composed import evaluation
from tests.helpers.replay_tools import SIZES, prompts
from tests.helpers.thinned import thinned

LAYERS, LENGTH, NEW = 6, 60, 5
SEEN = []  # (queries, keys, attention) of the layers run by hand


def _exact(module, query, key, value, attention_mask, scaling=None, **kwargs):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.mT * scaling
    attention = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
    SEEN.append((query[0], key[0], attention[0]))
    return (attention @ value).transpose(1, 2), None


AttentionInterface.register("by_hand", _exact)


@functools.cache
def model_of(family="llama"):
    return tiny_model(family, num_hidden_layers=LAYERS, vocab_size=VOCAB)


class ByHand:
    """A prompt [T], layer by layer; select(layer, queries, keys, attention [Hq, T', T']) -> columns that go on."""

    def __init__(self, model, prompt, select=lambda *seen: None):
        model.set_attn_implementation("by_hand")
        self.model, self.length, self.cache, self.positions = model, len(prompt), DynamicCache(), []
        positions, hidden = torch.arange(len(prompt)), model.model.embed_tokens(torch.tensor([prompt]))
        for index, layer in enumerate(model.model.layers):
            mask = torch.full((hidden.shape[1], hidden.shape[1]), -math.inf).triu(1)
            hidden = self.through(layer, hidden, positions, mask)
            self.positions.append(positions)
            chosen = select(index, *SEEN.pop())
            if chosen is not None:
                hidden, positions = hidden[:, chosen], positions[chosen]
        self.logits = model.lm_head(model.model.norm(hidden))[:, -1]

    def through(self, layer, hidden, positions, mask):
        rotary = self.model.model.rotary_emb(hidden, positions[None])
        mask = None if mask is None else mask.to(hidden.dtype)[None, None]
        return layer(hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=self.cache)

    def decode(self, steps):
        """Greedy tokens at the positions that follow the whole prompt."""
        tokens, logits = [], self.logits
        for step in range(steps):
            tokens.append(int(logits.argmax()))
            hidden = self.model.model.embed_tokens(torch.tensor([tokens[-1:]]))
            for layer in self.model.model.layers:
                hidden = self.through(layer, hidden, torch.tensor([self.length + step]), None)
            logits = self.model.lm_head(self.model.model.norm(hidden))[:, -1]
        SEEN.clear()
        return tokens


def smooth(scores, kernel, pooling="avg"):
    """Mean or maximum of the `kernel` around each score; beyond the ends there are zeros."""
    half = kernel // 2
    padded = [0.0] * half + list(scores) + [0.0] * half
    around = [padded[i : i + kernel] for i in range(len(scores))]
    return [max(near) if pooling == "max" else sum(near) / kernel for near in around]


def highest(scores, count):
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])


def window_attention(attention, window, kernel, pooling="avg"):
    """Of each token before the window: what all heads of the last `window` queries give it, pooled by head."""
    of_heads = attention[:, -window:, :-window].sum(1).tolist()
    return [sum(of_token) for of_token in zip(*(smooth(head, kernel, pooling) for head in of_heads), strict=True)]


def slow_fastkv(method, layer):
    def select(index, queries, keys, attention):
        if index == layer:
            scores = window_attention(attention, method.window, method.kernel, method.pooling)
            tokens = attention.shape[-1]
            budget = method.budget if method.budget >= 1 else int(method.budget * tokens)
            best = highest(scores, budget - method.window)
            return torch.tensor(best + list(range(tokens - method.window, tokens)))
        return None

    return select


def slow_asl(method):
    """Algorithm 2 in dictionaries: the ranks of all layers are kept, the variance is taken token by token."""
    rank_of, state = {}, {}

    def select(index, queries, keys, attention):
        if "done" in state or (index == LAYERS - 1 and not method.two_pass):
            return None
        scores = window_attention(attention, method.window, method.kernel)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        rank_of[index] = {token: place + 1 for place, token in enumerate(order)}
        if index < method.first:
            return None
        latest = [rank_of[i] for i in range(max(0, index - method.observed + 1), index + 1)]
        first = method.budget - method.window
        union = {token for ranks in latest for token, rank in ranks.items() if rank <= first}
        variance = np.mean([np.var([ranks[token] for ranks in latest]) for token in union])
        state.setdefault("initial", variance)
        if variance / state["initial"] >= method.threshold:
            return None
        state["done"] = index
        return torch.tensor(sorted(order[:first]) + list(range(len(scores), len(scores) + method.window)))

    select.state = state
    return select


def slow_pyramid(method, length):
    recent = int(length * method.recent) + 1

    def select(index, queries, keys, attention):
        before = attention.shape[-1] - recent
        angle = math.cos(math.pi * index / LAYERS)
        keep = math.floor(before * ((1 - method.decay) * (angle + 1) / 2 + method.decay))
        if keep <= method.least or keep == before:
            return None
        rows = attention.mean(0)[-recent:, :before]
        weights = [1 + (method.newest - 1) * i / (recent - 1) for i in range(recent)]
        scores = sum(w * row for w, row in zip(weights, rows, strict=True)).tolist()
        kept = highest([math.inf] * method.sink + scores[method.sink :], keep)
        return torch.tensor(kept + list(range(before, before + recent)))

    return select


CASES = {
    "fastkv": (FastKV(20, 2, 4, 3), lambda m: slow_fastkv(m, 2)),
    "fastkv, a share, max": (FastKV(0.4, 2, 4, 5, "max"), lambda m: slow_fastkv(m, 2)),
    "asl": (ASL(24, 0.95, 4, 3, 2, 2), slow_asl),
    "pyramid": (PyramidInfer(0.2, 0.6, least=8, sink=2, newest=9.0), lambda m: slow_pyramid(m, LENGTH)),
}


def run(method, model, ids, real=None, room=NEW, obs=0):
    return method.run(model, ids, real, room, obs, None)


@pytest.mark.parametrize(
    ("of_32", "layers", "wanted"), [(15, 32, 15), (13, 32, 13), (15, 28, 13), (15, 7, 3), (16, 64, 32)]
)
def test_a_layer_that_is_not_set_is_as_deep_as_in_a_model_of_32(of_32, layers, wanted):
    config = SimpleNamespace(num_hidden_layers=layers)
    assert layer_at(None, of_32, config) == wanted
    assert layer_at(0, of_32, config) == 0
    with pytest.raises(ValueError, match=f"layer={layers - 1} must be from 0 to {layers - 2}"):
        layer_at(layers - 1, of_32, config)


def decoded(model, found):
    """Greedy tokens of each row from a pass."""
    steps = [NEW] * len(found.logits)
    return decode(model, found.fork(), found.logits, found.real, found.lengths, [], steps, steps)[0]


def answers(model, method, ids, real=None):
    """Greedy tokens of each row from the method's cache."""
    found = method.prefill.run(model, ids, real, NEW, method.obs_queries, None)
    steps = [NEW] * len(ids)
    cache = method.cache(model, found)
    return decode(model, cache, found.logits, found.real, found.lengths, [], steps, steps)[0]


@pytest.mark.parametrize(
    ("case", "family"),  # every case, and every family, which differ in the queries and keys that layers make
    thinned([(case, family) for case in CASES for family in sorted(ARCHITECTURES)], keep=(0, 5, 7, 10, 12, 15)),
)
@torch.no_grad()
def test_equals_a_pass_by_hand(case, family):
    method, select = CASES[case]
    model, (prompt,) = model_of(family), prompts([LENGTH], seed=5)
    slow = ByHand(model, prompt, select(method))
    tokens = slow.decode(NEW)
    found = run(method, model, torch.tensor([prompt]))
    assert len({len(p) for p in slow.positions}) > 1, "the case must drop something"
    for layer, positions, expected in zip(found.layers, slow.positions, slow.cache.layers, strict=True):
        held = layer.keys.shape[2]
        assert layer.get_seq_length() == LENGTH
        assert (layer.kept is None) == (held == LENGTH)
        if layer.kept is not None:
            assert layer.kept.tolist() == [positions.tolist()]
        torch.testing.assert_close(layer.keys, expected.keys[:, :, :held])
        torch.testing.assert_close(layer.values, expected.values[:, :, :held])
    torch.testing.assert_close(found.logits, slow.logits)
    assert decoded(model, found) == [tokens]


@pytest.mark.parametrize("family", thinned(sorted(ARCHITECTURES)))
@torch.no_grad()
def test_gemfilter_reads_what_the_last_query_picks(family):
    method, model, (prompt,) = GemFilter(16, 2, 5), model_of(family), prompts([LENGTH], seed=5)
    slow = {}

    def select(index, queries, keys, attention):
        if index == 2:
            products = [float(queries[:, -1].flatten() @ keys[:, t].flatten()) for t in range(LENGTH)]
            slow["picked"] = highest(smooth(products, 5), 16)

    ByHand(model, prompt, select)
    again = ByHand(model, [prompt[i] for i in slow["picked"]])
    tokens = again.decode(NEW)
    found = run(method, model, torch.tensor([prompt]))
    assert (found.columns, found.lengths.tolist(), found.layers[0].get_seq_length()) == (16, [16], 16)
    torch.testing.assert_close(found.logits, again.logits)
    assert decoded(model, found) == [tokens]


@pytest.mark.parametrize("method", [ASL(20, 0.9, 4), FastKV(20, 2, 4), PyramidInfer(0.2, 0.6, least=8)], ids=repr)
@torch.no_grad()
def test_as_many_queries_are_kept_as_the_other_axes_ask_for(method):
    """More than the pass itself observes; in the layers that read the whole prompt, those of the dense pass."""
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    ids = torch.tensor([prompt])
    dense, found = prefill(model, ids, None, NEW, 9), run(method, model, ids, obs=9)
    for one, other in zip(dense.layers, found.layers, strict=True):
        assert other.queries.shape == one.queries.shape
        if other.kept is None:
            assert torch.equal(one.queries, other.queries)


@pytest.mark.parametrize("method", [ASL(LENGTH, 0.9, 4), ASL(LENGTH, 0.9, 4, two_pass=True), FastKV(LENGTH, 2, 4),
                                    GemFilter(LENGTH, 2), PyramidInfer(least=LENGTH), PyramidInfer(decay=1.0),
                                    ASL(20, 1e-9, 4)], ids=repr)  # fmt: skip
@torch.no_grad()
def test_with_room_for_all_or_nothing_settled_it_is_the_dense_pass(method):
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    ids = torch.tensor([prompt])
    dense, found = prefill(model, ids, None, NEW), run(method, model, ids)
    assert list(method.kept_counts(model.config, 9)[1]) == [9] * LAYERS
    assert torch.equal(dense.logits, found.logits)
    for one, other in zip(dense.layers, found.layers, strict=True):
        assert other.kept is None
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FastKV(20, 2, 4), [[LENGTH] * 3 + [20] * 3]),
        (FastKV(0.4, 2, 4), [[LENGTH] * 3 + [24] * 3]),
        (FastKV(0.05, 2, 4), [[LENGTH] * 3 + [5] * 3]),  # a share of three tokens; the window and one go on
        (GemFilter(16, 1), [[LENGTH] * 2 + [1] * 4, [16] * 6]),
        (GemFilter(16), [[LENGTH] * 3 + [1] * 3, [16] * 6]),
        # 13 recent; the 47 before them times shares of 1, .973, .9, .8, .7 give 47, 45, 40, 32, 22
        (PyramidInfer(0.2, 0.6, least=8), [[60, 60, 58, 53, 45, 35]]),
        # 1, .933, .867, .8, .733: 47, 43, 37, 29, 21
        (PyramidInfer(0.2, 0.6, "linear", least=8), [[60, 60, 56, 50, 42, 34]]),
        # 1, .9, .7, in every other layer: 47, 42, 29
        (PyramidInfer(0.2, 0.6, least=8, every=2), [[60, 60, 60, 55, 55, 42]]),
    ],
    ids=repr,
)
@torch.no_grad()
def test_tokens_that_each_layer_computes(method, expected):
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    counts = []
    hooks = [
        layer.mlp.register_forward_hook(lambda m, args, out: counts.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    run(method, model, torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    assert list(method.kept_counts(model.config, LENGTH)[0]) == expected[-1]
    assert [counts[i : i + LAYERS] for i in range(0, len(counts), LAYERS)] == expected


METHODS = [*(method for method, _ in CASES.values()), GemFilter(16, 2), ASL(24, 0.95, 4, 3, 2, two_pass=True)]


@pytest.mark.parametrize(
    ("method", "lengths"),  # of 2: fewer than are observed
    thinned([(method, some) for some in ((60, 41, 12), (60, 60), (2, 60)) for method in METHODS],
            keep=(0, 2, 3, 4, 5, 6, 13, 14, 16)),
    ids=repr,
)  # fmt: skip
@torch.no_grad()
def test_a_row_of_a_batch_is_what_it_is_alone(method, lengths):
    model, rows = model_of("qwen3"), prompts(lengths, seed=5)
    ids, real = pad_left(rows, 0, "cpu")
    together = run(method, model, ids, real, obs=3)
    answers = decoded(model, together)
    for b, prompt in enumerate(rows):
        alone = run(method, model, torch.tensor([prompt]), obs=3)
        assert int(together.lengths[b]) == alone.columns
        torch.testing.assert_close(together.logits[b], alone.logits[0])
        for layer, expected in zip(together.layers, alone.layers, strict=True):
            there = layer.real(together.real)
            there = torch.ones(layer.keys.shape[2], dtype=torch.bool) if there is None else there[b]
            kept = expected.kept if expected.kept is not None else torch.arange(alone.columns)[None]
            if layer.kept is not None:
                assert (layer.kept[b][there] - (together.columns - alone.columns)).tolist() == kept[0].tolist()
            torch.testing.assert_close(layer.keys[b, :, there], expected.keys[0])
            torch.testing.assert_close(layer.values[b, :, there], expected.values[0])
            last = min(3, len(prompt))
            torch.testing.assert_close(layer.queries[b, :, -last:], expected.queries[0, :, -last:])
        assert answers[b] == decoded(model, alone)[0]


@torch.no_grad()
def test_hooks_go_whatever_happens():
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)

    def fails(index, layer):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), slicing(model, fails):
        prefill(model, torch.tensor([prompt]), None, 0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("prefills", METHODS, ids=repr)
@torch.no_grad()
def test_other_axes_choose_among_the_tokens_held(prefills):
    """A cache that keeps all answers as the pass does; with SnapKV and ThinK a padded row as it does alone."""
    model, rows = model_of("qwen3"), prompts((60, 41, 12), seed=5)
    ids, real = pad_left(rows, 0, "cpu")
    everything = LeanK(ChannelMask(torch.ones(LAYERS, 2, 8, dtype=torch.bool)))
    whole = Method("all", everything, prefill=prefills, **SIZES)
    assert answers(model, whole, ids, real) == decoded(model, run(prefills, model, ids, real))
    less = Method("less", ThinK(0.5, 4), SnapKV(11, 4, 3), prefill=prefills, **SIZES)
    assert answers(model, less, ids, real) == [answers(model, less, torch.tensor([p]))[0] for p in rows]
    for layer in less.cache(model, run(prefills, model, ids, real, obs=4)).layers:
        ends = np.minimum(layer.store.seen, SIZES["sink"] + SIZES["window"])  # of each row
        assert (layer.store.prompt.length + ends[:, None] <= 11).all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_sliding_window_is_refused(method):
    method.check(model_of().config, None)
    sliding = tiny_model("mistral", num_hidden_layers=LAYERS, sliding_window=8).config
    with pytest.raises(ValueError, match=r"layer 0 of mistral uses DynamicSlidingWindowLayer.*leave out `prefill`"):
        method.check(sliding, None)


@torch.no_grad()
def test_asl_two_pass_reads_what_one_pass_selects():
    one, two = ASL(24, 0.95, 4, 3, 2, 2), ASL(24, 0.95, 4, 3, 2, 2, two_pass=True)
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    selected = run(one, model, torch.tensor([prompt])).layers[-1].kept[0]
    again = ByHand(model, [prompt[i] for i in selected])
    found = run(two, model, torch.tensor([prompt]))
    assert found.columns == len(selected) == 24
    torch.testing.assert_close(found.logits, again.logits)


@torch.no_grad()
def test_asl_in_two_passes_reads_the_last_layers_choice_if_the_ranks_never_settle():
    method, model, (prompt,) = ASL(20, 1e-9, 4, 3, two_pass=True), model_of(), prompts([LENGTH], seed=5)
    kept = {}

    def select(index, queries, keys, attention):
        scores = window_attention(attention, 4, 3)
        kept[index] = highest(scores, 16) + list(range(LENGTH - 4, LENGTH))

    ByHand(model, prompt, select)
    again = ByHand(model, [prompt[i] for i in kept[LAYERS - 1]])
    found = run(method, model, torch.tensor([prompt]))
    assert (found.columns, found.selected_at) == (20, [-1])
    torch.testing.assert_close(found.logits, again.logits)


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 2])
@torch.no_grad()
def test_asl_selects_at_the_layer_that_it_is_given(layer):
    """Which is then FastKV's choice at that layer."""
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    ids = torch.tensor([prompt])
    asl, fastkv = ASL(20, None, 4, 3, layer=layer), FastKV(20, layer, 4, 3)
    found, expected = run(asl, model, ids), run(fastkv, model, ids)
    assert found.selected_at == [layer]
    assert torch.equal(found.logits, expected.logits)
    assert asl.kept_counts(model.config, LENGTH) == fastkv.kept_counts(model.config, LENGTH)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(2, (1, 2, 0.95)), (3, (1, 2, 0.95)), (7, (3, 2, 0.95)), (24, (8, 8, 0.3)), (28, (9, 8, 0.3)), (32, (10, 8, 0.3)),
     (80, (26, 8, 0.3))],
)  # fmt: skip
def test_asl_has_the_papers_settings_for_models_that_are_deep_enough(layers, expected):
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    assert ASL().rule(config) == expected
    own = ASL(first=1, observed=3, threshold=0.5)
    assert own.rule(config) == (1, 3, 0.5)


@pytest.mark.parametrize("preset", ["asl", "asl_two_pass", "papers/asl", "papers/asl_full", "papers/asl_two_pass"])
@pytest.mark.parametrize("layers", [28, 32])
def test_presets_have_the_papers_settings_for_its_models(preset, layers):
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    ((label, found),) = evaluation(f"method={preset}")["method"].items()
    asl = choice("prefill", found["prefill"], label)
    assert asl.rule(config) == (layers // 3, 8, 0.3)
    assert asl.budget == 2048


@pytest.mark.parametrize(("layers", "first"), [(2, None), (3, None), (4, 2), (4, 3), (7, None)])
def test_the_least_that_layers_get_is_said_of_every_layer(layers, first):
    """Below the first layer that can select, and where none can, all layers get the whole prompt."""
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    selects = (few_layers(layers).first if first is None else first) + 1  # the first layer that can
    least, most = ASL(budget=64, first=first).kept_counts(config, 100)
    assert least == [100 if layer <= selects else 64 for layer in range(layers)]
    assert most == [100] * layers


@given(st.integers(2, DEEP - 1))
def test_the_rule_for_few_layers(layers):
    first, observed, threshold = few_layers(layers)
    assert 1 <= first < layers
    assert 2 <= observed <= 8
    assert 0.3 < threshold < 1
    if layers > 3:
        assert first + 1 >= observed, "all ranks that are compared at L_min are there"
        assert first + 1 <= layers - 2, "a layer above L_min can select, and has a layer above it"
    if layers > 2:
        assert threshold <= few_layers(layers - 1).threshold


def test_rows_of_another_rule_have_another_identity(monkeypatch):
    unset, forced = ASL(), ASL(layer=3)
    complete = ASL(first=2, observed=3, threshold=0.5)
    before = [choice.identity() for choice in (unset, forced, complete)]
    monkeypatch.setattr(asl, "few_layers", lambda layers: few_layers(layers)._replace(first=1))
    after = [choice.identity() for choice in (unset, forced, complete)]
    assert before[0] != after[0]
    assert before[1:] == after[1:]  # nothing of theirs follows from the rule


def test_it_selects_on_the_reference_model_and_rows_say_where(tmp_path):
    """At layer 4 or 5 of 7, by the ranks; the paper's own settings find none."""
    paper = "{name: asl, budget: 256, first: 2, observed: 8, threshold: 0.3}"
    settled = evaluation(
        "+experiment=reference_ruler", "method=[dense,asl,asl_two_pass]",
        f"+method.asl_paper.prefill={paper}", "+method.asl_paper.window=32", "match=0.43", "max_new_tokens=2",
        "benchmark.lengths=[1024]", "benchmark.tasks=[vt]", "benchmark.samples=1",
    )  # fmt: skip
    run_eval(settled, tmp_path)
    rows, found = list(read(tmp_path)), {}
    for row in rows:
        found.setdefault(row["method"], []).append(row["selected_layer"])
    assert set(found["asl"]) <= {4, 5}
    assert found == {"dense": [None], "asl": found["asl"], "asl_two_pass": found["asl"], "asl_paper": [-1]}
    (report,) = summarise(rows)["runs"]
    marked = {cell["method"]: cell["not_selected"] for cell in report["overall"]}
    assert marked == {label: int(label == "asl_paper") for label in found}


@torch.no_grad()
def test_a_pass_says_for_each_row_where_it_selected():
    method, model, rows = CASES["asl"][0], model_of("qwen3"), prompts((60, 41, 12), seed=5)
    ids, real = pad_left(rows, 0, "cpu")
    slow = [slow_asl(method) for _ in rows]
    for prompt, select in zip(rows[:2], slow, strict=False):
        ByHand(model, prompt, select)
    wanted = [select.state.get("done", -1) for select in slow]
    assert run(method, model, ids, real).selected_at == wanted
    assert len(set(wanted)) > 1


@torch.no_grad()
def test_one_pass_does_not_say_that_the_last_layer_selected():
    """No layer is above it, so nothing is dropped: such a row is as if the ranks had never settled."""
    model, ids = model_of(), torch.tensor(prompts([LENGTH] * 8, seed=5))
    one, two = (ASL(24, 0.99, 4, 3, 2, LAYERS - 2, two_pass=passes == 2) for passes in (1, 2))
    assert LAYERS - 1 in run(two, model, ids).selected_at
    assert run(one, model, ids).selected_at == [-1] * 8
