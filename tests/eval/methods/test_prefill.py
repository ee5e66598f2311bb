"""Passes that drop tokens on their way up, against a pass that runs layer by layer by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import pad_left, prefill
from leank.eval.methods import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.think import ThinK
from leank.eval.methods.common.slicing import layer_at, slicing
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.methods.prefill.pyramid_infer import PyramidInfer
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.mask import ChannelMask
from tests.conftest import ARCHITECTURES, tiny_model
from tests.helpers.passes_by_hand import CASES, LAYERS, LENGTH, NEW, ByHand, highest, model_of, run, smooth
from tests.helpers.replay_tools import SIZES, prompts


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
    return greedy(model, found.fork(), found.logits, found.real, found.lengths, [], steps, steps)[0]


def answers(model, method, ids, real=None):
    """Greedy tokens of each row from the method's cache."""
    found = method.prefill.run(model, ids, real, NEW, method.obs_queries, None)
    steps = [NEW] * len(ids)
    cache = method.cache(model, found)
    return greedy(model, cache, found.logits, found.real, found.lengths, [], steps, steps)[0]


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
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


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("lengths", [(60, 41, 12), (60, 60), (2, 60)])  # of 2: fewer than are observed
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
