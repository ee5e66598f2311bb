"""Choices of tokens against obvious loops over each prompt alone, against kvpress, and end to end."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.inference.decode import greedy
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.tokens.adakv import AdaKV
from leank.eval.methods.tokens.duo_attention import DuoAttention, high_frequency_ratio
from leank.eval.methods.tokens.expected_attention import ExpectedAttention
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.keydiff import KeyDiff
from leank.eval.methods.tokens.pyramidkv import PyramidKV, pyramid
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.streaming_llm import StreamingLLM
from leank.eval.methods.tokens.tova import TOVA
from tests import DATA
from tests.helpers import kvpress_tokens
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, oracle_cache, run, tiny_model
from tests.helpers.token_choices import alone, attention, duo, kept_of, observed

KVPRESS = DATA / "kvpress_tokens.json"
SIZES = Sizes(2, 6, 4)
ALL = torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool)


def snapkv_by_hand(layer, choice, sizes, budget):
    """Kept tokens of each KV head: sorted lists, by loops over one unpadded prompt."""
    keys, queries = layer.keys[0], layer.queries[0, :, -choice.queries :]
    length, group = keys.shape[1], queries.shape[0] // keys.shape[0]
    first_observed = max(0, length - choice.queries)
    weights = attention(queries, keys).sum(1)[:, :first_observed]  # [Hq, tokens before]
    kept, reach = [], choice.kernel // 2
    for head in range(keys.shape[0]):
        scores = []
        for j in range(first_observed):
            by_query_head = []
            for member in range(head * group, (head + 1) * group):
                near = weights[member, max(0, j - reach) : j + reach + 1]
                by_query_head.append(near.max() if choice.pooling == "max" else near.sum() / choice.kernel)
            scores.append(max(by_query_head) if choice.group == "max" else sum(by_query_head) / group)
        last = max(sizes.window, choice.queries)
        stays = {j for j in range(length) if j < sizes.sink or j >= length - last}
        others = sorted((j for j in range(length) if j not in stays), key=lambda j: (-scores[j].item(), j))
        kept.append(sorted(stays | set(others[: max(0, budget - sizes.sink - last)])))
    return kept


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=3),
    budget=st.integers(12, 30),
    queries=st.integers(1, 8),
    kernel=st.sampled_from([1, 3, 7]),
    pooling=st.sampled_from(["avg", "max"]),
    group=st.sampled_from(["mean", "max"]),
    sink=st.integers(0, 4),
    window=st.integers(1, 8),
)
def test_snapkv_keeps_what_loops_over_each_prompt_alone_keep(
    lengths, budget, queries, kernel, pooling, group, sink, window
):
    choice, sizes = SnapKV(budget, queries, kernel, pooling, group), Sizes(sink, window, 4)
    model, found = observed(lengths)
    keeps = choice.keep_mask(found, model.config, sizes)
    for row, length in enumerate(lengths):
        for layer, keep in zip(alone(model, lengths, row).layers, keeps, strict=True):
            kept = kept_of(keep, row, length)
            assert kept == snapkv_by_hand(layer, choice, sizes, budget)
            assert {len(head) for head in kept} == {min(length, budget)}


@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3), budget=st.integers(8, 20))
def test_h2o_keeps_the_largest_column_sums(lengths, budget):
    model, found = observed(lengths)
    keeps = H2O(budget).keep_mask(found, model.config, SIZES)
    for row, length in enumerate(lengths):
        ids, _ = left_padded(lengths, 0)
        seen = prefill(model, ids[row : row + 1, -length:], None, 0, obs_queries=length)
        for layer, keep in zip(seen.layers, keeps, strict=True):
            sums = attention(layer.queries[0], layer.keys[0]).sum(1).unflatten(0, (HEADS, -1)).sum(1)  # [H, T]
            for head, kept in enumerate(kept_of(keep, row, length)):
                stays = {j for j in range(length) if j < SIZES.sink or j >= length - SIZES.window}
                others = sorted((j for j in range(length) if j not in stays), key=lambda j: -sums[head, j].item())
                heavy = others[: budget - SIZES.sink - SIZES.window]
                assert kept == sorted(stays | set(heavy))


@given(mean=st.integers(0, 300), available=st.integers(0, 900), layers=st.integers(2, 40), beta=st.integers(1, 30))
def test_pyramid_is_a_line_with_an_exact_total(mean, available, layers, beta):
    shares = pyramid(mean, available, layers, beta)
    if available <= mean:
        assert min(shares) >= available  # every layer keeps all there is
        return
    assert sum(shares) == layers * mean
    assert shares == sorted(shares, reverse=True)
    assert shares[0] <= available
    most = min(2 * mean - mean // beta, available)
    for index, share in enumerate(shares):
        line = most + (2 * mean - 2 * most) * Fraction(index, layers - 1)
        assert abs(share - line) < 1
    if beta == 1:
        assert set(shares) == {mean}


@given(mean=st.integers(20, 4000), layers=st.integers(2, 80))
def test_pyramid_is_the_authors_but_for_their_rounding(mean, layers):
    """Their shares, for prompts that are long enough: the step between layers is rounded down."""
    low = mean // 20
    step = (2 * (mean - low)) // (layers - 1)
    for index, share in enumerate(pyramid(mean, 10**6, layers, 20)):
        assert 0 <= (2 * mean - low - index * step) - share < layers


@pytest.mark.parametrize("beta", [1, 3, 20])
def test_pyramidkv_is_snapkv_with_each_layers_budget(beta):
    lengths = (60, 25, 9, 36)
    model, found = observed(lengths, model=kvpress_tokens.random_model())
    choice = PyramidKV(16, 4, 3, beta=beta)
    keeps = choice.keep_mask(found, model.config, SIZES)
    for row, length in enumerate(lengths):
        middle = max(0, length - SIZES.sink - SIZES.window)
        for index, share in enumerate(pyramid(8, middle, 4, beta)):
            same = SnapKV(share + 8, 4, 3).keep_mask(found, model.config, SIZES)[index]
            assert kept_of(keeps[index], row, length) == kept_of(same, row, length)
    for length in (*lengths, 3):
        middle = max(0, length - SIZES.sink - SIZES.window)
        assert choice.kept_counts(model.config, [length], SIZES)[:, 0].tolist() == pyramid(8, middle, 4, beta)
    if beta == 1:
        same = SnapKV(16, 4, 3).keep_mask(found, model.config, SIZES)
        assert all(torch.equal(a, b) for a, b in zip(keeps, same, strict=True))


def test_kvpress_keeps_the_same_tokens():
    """Where settings coincide: no sink (StreamingLLM: 4), the window observed; its pyramid's top counts the window."""
    model = kvpress_tokens.random_model()
    found = prefill(model, kvpress_tokens.prompt(), None, 0, obs_queries=kvpress_tokens.LENGTH)
    window, recorded = Sizes(0, kvpress_tokens.WINDOW), json.loads(KVPRESS.read_text())
    choices = {
        "snapkv": (SnapKV(32, kvpress_tokens.WINDOW, 5), window),
        "snapkv_wide": (SnapKV(64, kvpress_tokens.WINDOW, 7), window),
        "pyramidkv": (PyramidKV(32, kvpress_tokens.WINDOW, 5, beta=3), window),  # 8 + 24 / 3 = 32 / 2
        "streaming_llm": (StreamingLLM(), Sizes(4, 28)),
        "tova": (TOVA(32, evict=False), Sizes(0, 1)),
        "keydiff": (KeyDiff(32), Sizes(0, 0)),
        "expected": (ExpectedAttention(32, future=32), Sizes(4, 0)),
        "expected_mean": (ExpectedAttention(64, covariance=False, epsilon=0.02), Sizes(4, 0)),
        "adakv": (AdaKV(32, {"name": "snapkv", "queries": kvpress_tokens.WINDOW, "kernel": 5}), window),
        "adakv_loose": (AdaKV(64, {"name": "snapkv", "queries": kvpress_tokens.WINDOW}, 0.0), window),
        "adakv_expected": (AdaKV(32, {"name": "expected_attention", "future": 32}, 0.5), Sizes(4, 0)),
    }
    assert set(recorded) == set(choices)
    for name, (choice, sizes) in choices.items():
        for keep, layer, expected in zip(
            choice.keep_mask(found, model.config, sizes), found.layers, recorded[name], strict=True
        ):
            if name == "streaming_llm":  # sink and window stay whatever it says
                keep = keep | (torch.arange(layer.keys.shape[2]) < 4) | (torch.arange(layer.keys.shape[2]) >= 100)
            assert [head.nonzero()[:, 0].tolist() for head in keep[0]] == expected, name


def test_duo_attention_streams_the_lowest_gates(tmp_path):
    model, found = observed((20, 15))
    choice = duo(tmp_path, [[0.3, 1.2], [-0.1, 0.4]], 0.5)
    assert torch.equal(choice.streaming(), torch.tensor([[True, False], [True, False]]))
    assert torch.equal(choice.joins(model.config), ~choice.streaming())
    for keep in choice.keep_mask(found, model.config, SIZES):
        assert not keep[:, 0].any()
        assert torch.equal(keep[:, 1], found.real)
    one = duo(tmp_path, [[0.5, 0.0], [1.0, 1.0]], 0.25)
    assert one.streaming().nonzero().tolist() == [[0, 1]]
    assert one.keep_mask(found, model.config, SIZES)[1] is None
    assert duo(tmp_path, [[1.0, 2.0], [1.5, 1.0]], 0.5).streaming().nonzero().tolist() == [[0, 0], [0, 1]]  # clipped
    assert choice.identity() != one.identity()


def test_duo_attention_streams_in_another_order(tmp_path):
    """The controls of LeanK's figure 8: the highest gates are the lowest w_hf; at random, another choice by seed."""
    choice = duo(tmp_path, [[0.3, 0.9], [0.1, 0.4]], 0.25)
    assert replace(choice, order="lowest").streaming().nonzero().tolist() == [[0, 1]]
    drawn = {tuple(replace(choice, order="random", seed=s).streaming().flatten().tolist()) for s in range(20)}
    assert {sum(streams) for streams in drawn} == {1}
    assert len(drawn) == 4
    identities = {str(replace(choice, order="random", seed=s).identity()) for s in (1, 2)}
    assert len({*identities, str(replace(choice, order="lowest").identity())}) == 3


@pytest.mark.parametrize("order", ["highest", "lowest", "random"])
def test_heads_of_layers_with_a_sliding_window_never_stream(order):
    for seed in range(8 if order == "random" else 1):
        choice = DuoAttention(ratio=0.5, order=order, seed=seed)
        choice._ratios[choice.calibrated_on] = torch.tensor([[0.3, 0.9], [-math.inf, -math.inf]])
        assert choice.streaming().sum(1).tolist() == [1, 0]


def test_high_frequency_ratio():
    """Every product by itself; RoPE's pair p rotates channels p and p + D / 2, the lower p the faster."""
    _, found = observed((20,))
    high = torch.zeros(LAYERS, HEADS, DIM, dtype=torch.bool)
    high[..., [0, 1, 4, 5]] = True
    ratios = high_frequency_ratio(found, high, 3)
    for layer, row in zip(found.layers, ratios, strict=True):
        for head in range(HEADS):
            squares = torch.zeros(2, dtype=torch.float64)
            for member in (2 * head, 2 * head + 1):
                for q in layer.queries[0, member, -3:]:
                    for k in layer.keys[0, head]:
                        squares += torch.stack([sum(q[c] * k[c] for c in (0, 1, 4, 5)), sum(q * k)]) ** 2
            assert row[head].item() == pytest.approx((squares[0] / squares[1]).sqrt().item(), rel=1e-5)


def test_duo_attention_without_a_pattern_streams_the_highest_ratio():
    model, found = observed((20,))
    choice = DuoAttention(length=1024, queries=8)
    with pytest.raises(RuntimeError, match="must be calibrated"):
        choice.streaming()
    samples, (_, tokenizer) = [], load_config(ModelConfig())
    choice.calibrate(lambda sample, queries: samples.append((sample, queries)) or found, tokenizer, model.config)
    choice.calibrate(None, None, None)  # once is enough
    ((sample, queries),) = samples
    assert (sample.task, queries) == ("vt", 8)
    high = torch.zeros(LAYERS, HEADS, DIM, dtype=torch.bool)
    high[..., [0, 1, 4, 5]] = True
    ratios = high_frequency_ratio(found, high, 8)
    streams = choice.streaming()
    assert streams.sum() == 2
    assert ratios[streams].min() >= ratios[~streams].max()


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "streaming_llm", "duo_attention", "h2o"])
def test_answers_are_those_of_a_dense_cache_that_does_not_see_the_others(name, tmp_path):
    """A padded batch against generate() of each prompt alone with the oracle, past moves out of the window."""
    setting = {
        "snapkv": {"budget": 14, "queries": 3},
        "pyramidkv": {"budget": 14, "queries": 3},
        "h2o": {"budget": 14, "evict": False},
        "duo_attention": {"pattern": duo(tmp_path, [[0.1, 0.9], [0.8, 0.2]]).pattern},
        "streaming_llm": {},
    }[name]
    sizes = {"sink": SIZES.sink, "window": SIZES.window, "flush": SIZES.flush}
    chosen = build_method(name, {"tokens": {"name": name, **setting}, **sizes})
    model, lengths, new = tiny_model("llama"), (34, 19, 26), 14
    ids, mask = left_padded(lengths, 5)
    found = prefill(model, ids, mask.bool(), new, chosen.obs_queries, column_sums=chosen.column_sums)
    cache = chosen.cache(model, found)
    tokens, _, _ = greedy(model, cache, found.logits, found.real, found.lengths, [], [new] * 3, [new] * 3, None)
    dense, joins = 0, chosen.tokens.joins(model.config)
    for row, length in enumerate(lengths):
        one = prefill(model, ids[row : row + 1, -length:], None, new, 8, column_sums=True)
        keeps = chosen.tokens.keep_mask(one, model.config, SIZES)
        full = torch.ones(1, HEADS, length, dtype=torch.bool)
        by_layer = {"tokens": [full if keep is None else keep for keep in keeps]}
        if joins is not None:
            by_layer["joins"] = joins
        expected, _ = run(
            model, oracle_cache(ALL, *sizes.values(), **by_layer), ids[row : row + 1, -length:], None, new, "oracle"
        )
        assert tokens[row] == expected[0, length:].tolist()
        plain, _ = run(model, None, ids[row : row + 1, -length:], None, new, "eager")
        dense += tokens[row] == plain[0, length:].tolist()
    assert dense < len(lengths)  # what was dropped mattered


def test_h2o_holds_its_budget_while_decoding():
    chosen = build_method("h2o", {"tokens": {"name": "h2o", "budget": 14}, "sink": 2, "window": 6, "flush": 4})
    model = tiny_model("llama")
    ids, mask = left_padded((34, 19), 5)
    found = prefill(model, ids, mask.bool(), 40, column_sums=True)
    cache = chosen.cache(model, found)
    model.set_attn_implementation("leank")
    for step in range(1, 31):
        new = torch.full((2, 1), step)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        model(new, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache)
        for layer in cache.layers:
            held = layer.store.prompt.length + layer.store.tail.length
            assert (held == 6).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokens": {"name": "snapkv", "budget": 100}},
            r"method.x: budget=100 is less than sink=128 and window=1024",
        ),
        ({"tokens": {"name": "snapkv", "budget": 30}, "sink": 0, "window": 8}, "less than sink=0 and window=32"),
        ({"tokens": {"name": "h2o", "budget": 7}, "sink": 4, "window": 4}, "raise it to at least 8"),
        (
            {"tokens": {"name": "pyramidkv", "budget": "many"}},
            "method.x.tokens.budget='many' must be",
        ),
        ({"tokens": {"name": "streaming_llm", "budget": 9}}, "method.x.tokens.budget is no setting"),
        ({"tokens": {"name": "snap"}}, "method.x.tokens.name='snap' is unknown; choose one of adakv, duo_attention"),
    ],
)
def test_bad_sizes_are_named_when_a_method_is_made(given, message):
    with pytest.raises(ValueError, match=message):
        build_method("x", given)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (lambda: SnapKV(kernel=4), "kernel=4 must be odd"),
        (lambda: SnapKV(queries=0), "queries=0 must be"),
        (lambda: SnapKV(pooling="sum"), "pooling='sum' must be"),
        (lambda: SnapKV(group="median"), "group='median' must be"),
        (lambda: PyramidKV(beta=0), "beta=0 must be"),
        (lambda: DuoAttention(ratio=1.5), r"ratio=1.5 must be"),
        (lambda: DuoAttention("none.tsv"), "pattern=none.tsv does not exist"),
        (lambda: DuoAttention(queries=0), "queries=0 must be"),
        (lambda: DuoAttention(task="vtt"), "'vtt' is unknown"),
    ],
)
def test_bad_settings_are_named(choice, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        choice().check(tiny_model("llama").config, None)


def test_bad_patterns_are_named(tmp_path):
    config = tiny_model("llama").config
    with pytest.raises(ValueError, match="of 3 layers x 2 KV heads, the model of 2 x 2"):
        duo(tmp_path, [[1, 1]] * 3).check(config, None)
    with pytest.raises(ValueError, match="not finite"):
        duo(tmp_path, [[1, float("nan")]] * 2).check(config, None)
    (tmp_path / "words.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="no table of numbers"):
        DuoAttention(str(tmp_path / "words.tsv")).check(config, None)


def test_a_share_of_the_prompt_is_rounded_down():
    sizes = Sizes(1, 2, 4)
    assert [SnapKV(budget=0.38, queries=2).between(length, sizes) for length in (7, 10, 11, 100)] == [0, 0, 1, 35]


@pytest.mark.parametrize(
    ("count", "ratio", "heads", "wanted"),
    [
        ("nearest", 0.5, 5, 3),
        ("nearest", 0.25, 4, 1),
        ("nearest", 0.3, 4, 1),
        ("authors", 0.5, 5, 2),
        ("authors", 0.3, 4, 1),
    ],
)
def test_a_share_of_the_heads_streams(count, ratio, heads, wanted):
    assert DuoAttention(ratio=ratio, count=count).how_many(heads) == wanted
