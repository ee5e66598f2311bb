"""Methods that keep some tokens of the prompt, against slow forms of their papers."""

import functools
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.base import Method
from leank.eval.methods.prefill.repeat import Repeat, Words
from leank.eval.methods.tokens import rkv
from leank.eval.methods.tokens.adakv import AdaKV
from leank.eval.methods.tokens.duo_attention import DuoAttention, high_frequency_ratio
from leank.eval.methods.tokens.expected_attention import ExpectedAttention, frequencies
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.keydiff import KeyDiff
from leank.eval.methods.tokens.kvzip import KVzip
from leank.eval.methods.tokens.pyramidkv import PyramidKV, pyramid
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.streaming_llm import StreamingLLM
from leank.eval.methods.tokens.tova import TOVA
from tests import DATA
from tests.helpers import kvpress
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model
from tests.oracles.attention import weights


def observed(lengths, seed=0, family="llama", model=None, **changes):
    """(model, a dense pass over prompts of these lengths) with all that the methods here may want to see."""
    model = model or tiny_model(family, **changes)
    ids, mask = left_padded(lengths, seed)
    return model, prefill(model, ids % model.config.vocab_size, mask.bool(), 0, obs_queries=8, column_sums=True)


def alone(model, lengths, row, seed=0):
    """As `observed`, of one of the prompts without padding."""
    ids, _ = left_padded(lengths, seed)
    return prefill(model, ids[row : row + 1, -lengths[row] :], None, 0, obs_queries=8, column_sums=True)


def attention(queries, keys):
    """Softmax rows [Hq, n, T] of the last n queries, each over what it sees."""
    return weights(queries[None], keys[None])[0]


def kept_of(keep, row, length):
    """Kept tokens of each KV head of a padded row, numbered without its padding; None = all."""
    if keep is None:
        return [list(range(length))] * HEADS
    assert not keep[row, :, : keep.shape[2] - length].any()
    return [head[keep.shape[2] - length :].nonzero()[:, 0].tolist() for head in keep[row]]


def duo(folder, gates, ratio=0.5):
    """DuoAttention with these gates [L, H], written to a file in `folder` as the authors do."""
    path = folder / "full_attention_heads.tsv"
    path.write_text("\n".join("\t".join(f"{gate:.18e}" for gate in row) for row in gates))
    return DuoAttention(str(path), ratio)


KVPRESS = DATA / "kvpress_tokens.json"
SIZES = Sizes(2, 6, 4)
LENGTHS = st.lists(st.integers(3, 36), min_size=1, max_size=3)


def highest(scores, length, sizes, budget):
    """Kept tokens of each head by its scores [H][T]: sink, window, and the best between; the earlier of equals."""
    ends = {j for j in range(length) if j < sizes.sink or j >= length - sizes.window}
    room = max(0, budget - sizes.sink - sizes.window)
    others = [sorted(set(range(length)) - ends, key=lambda j, s=s: (-s[j], j))[:room] for s in scores]
    return [sorted(ends | set(head)) for head in others]


def tova_by_hand(layer, choice, config):
    of_last = attention(layer.queries[0, :, -1:], layer.keys[0])[:, 0]  # [Hq, T]
    return [of_last.mean(0).tolist()] * HEADS


def h2o_by_hand(layer, choice, config):
    sums = attention(layer.queries[0], layer.keys[0]).sum(1)  # [Hq, T]
    return sums.unflatten(0, (HEADS, -1)).sum(1).tolist()


def snapkv_by_hand(layer, choice, config):
    keys, queries = layer.keys[0], layer.queries[0, :, -choice.queries :]
    length, group, reach = keys.shape[1], queries.shape[0] // HEADS, choice.kernel // 2
    before = max(0, length - choice.queries)  # what is observed stays whatever its score
    weights, found = attention(queries, keys).sum(1)[:, :before], []
    for head in range(HEADS):
        found.append([0.0] * length)
        for j in range(before):
            members = [weights[m, max(0, j - reach) : j + reach + 1] for m in range(head * group, (head + 1) * group)]
            of_members = [float(near.max() if choice.pooling == "max" else near.sum() / choice.kernel)
                          for near in members]  # fmt: skip
            found[-1][j] = max(of_members) if choice.group == "max" else sum(of_members) / group
    return found


def keydiff_by_hand(layer, choice, config):
    found = []
    for keys in layer.keys[0]:
        anchor = sum(k / k.norm() for k in keys) / len(keys)
        found.append([-float(k @ anchor / k.norm() / anchor.norm()) for k in keys])
    return found


def rotation(position, frequency):
    """RoPE's matrix at a position: pair p of D / 2 turns channels p and p + D / 2."""
    matrix, half = torch.zeros(DIM, DIM, dtype=torch.float64), DIM // 2
    for p, w in enumerate(frequency.tolist()):
        c, s = math.cos(position * w), math.sin(position * w)
        matrix[p, p], matrix[p, p + half], matrix[p + half, p], matrix[p + half, p + half] = c, -s, s, c
    return matrix


def expected_by_hand(layer, choice, config):
    keys, values, queries = layer.keys[0], layer.values[0], layer.queries[0, :, -choice.queries :]
    frequency, length, seen = frequencies(config), keys.shape[1], queries.shape[1]
    turn = sum(rotation(length + n, frequency) for n in range(choice.future)) / choice.future
    scores = [[0.0] * length for _ in range(HEADS)]
    group = queries.shape[0] // HEADS
    for head in range(queries.shape[0]):
        plain = [rotation(t, frequency).T @ queries[head, t - length + seen]
                 for t in range(max(choice.skip, length - seen), length)]  # fmt: skip
        if not plain:
            continue
        mean = turn @ (sum(plain) / len(plain))
        covariance = turn @ torch.tensor(np.cov(torch.stack(plain).T, bias=True)) @ turn.T
        k = keys[head // group]
        logits = [float(mean @ x / DIM**0.5 + choice.covariance * x @ covariance @ x / DIM / 2) for x in k]
        total = sum(math.exp(x) for x in logits[choice.skip :])
        for j in range(choice.skip, length):
            scores[head // group][j] += math.exp(logits[j]) / total / group
    return [
        [(a + choice.epsilon) * float(v.norm()) for a, v in zip(s, of_head, strict=True)]
        for s, of_head in zip(scores, values, strict=True)
    ]


def whole(lengths, row=None):
    """(model, a pass over prompts, or over one of them alone, that keeps all queries)."""
    model = tiny_model("llama")
    ids, mask = left_padded(lengths, 0)
    ids, real = (ids, mask.bool()) if row is None else (ids[row : row + 1, -lengths[row] :], None)
    return model, prefill(model, ids % model.config.vocab_size, real, 0, obs_queries=64, column_sums=True)


SCORED = {  # budget -> the choice; its scores by hand; last tokens that it always keeps
    "tova": (lambda n: TOVA(n, evict=False), tova_by_hand, 0),
    "h2o": (lambda n: H2O(n, evict=False), h2o_by_hand, 0),
    "snapkv": (lambda n: SnapKV(n, 3), snapkv_by_hand, 3),
    "snapkv, max": (lambda n: SnapKV(n, 8, 3, "max", "max"), snapkv_by_hand, 8),
    "snapkv, one": (lambda n: SnapKV(n, 1, 1, "avg", "max"), snapkv_by_hand, 1),
    "keydiff": (KeyDiff, keydiff_by_hand, 0),
    "expected": (lambda n: ExpectedAttention(n, future=5, skip=1), expected_by_hand, 0),
    "no covariance": (lambda n: ExpectedAttention(n, 40, 3, 0, False, 0.02), expected_by_hand, 0),
    "few queries": (lambda n: ExpectedAttention(n, 5, 7, 2), expected_by_hand, 0),
}


@pytest.mark.parametrize("name", SCORED)
@settings(deadline=None, max_examples=5)
@given(lengths=LENGTHS, budget=st.integers(8, 24), sink=st.integers(0, 4), window=st.integers(0, 8))
def test_they_keep_what_loops_over_each_prompt_alone_keep(name, lengths, budget, sink, window):
    make, by_hand, last = SCORED[name]
    certain = Sizes(sink, max(window, last), 4)
    budget = max(budget, sink + certain.window)
    choice, (model, found) = make(budget), whole(lengths)
    keeps = choice.keep_mask(found, model.config, Sizes(sink, window, 4))
    for row, length in enumerate(lengths):
        for layer, keep in zip(whole(lengths, row)[1].layers, keeps, strict=True):
            expected = highest(by_hand(layer, choice, model.config), length, certain, budget)
            assert kept_of(keep, row, length) == expected


@settings(deadline=None, max_examples=20)
@example(lengths=[3, 20], budget=8, safeguard=0.0, name="snapkv")  # one prompt of observed queries alone
@example(lengths=[36, 30], budget=16, safeguard=0.9, name="snapkv")  # without the safeguard others would stay
@given(
    lengths=LENGTHS, budget=st.integers(8, 24), safeguard=st.sampled_from([0.0, 0.2, 0.7, 0.9]),
    name=st.sampled_from(["keydiff", "h2o", "snapkv"]),
)  # fmt: skip
def test_adakv_shares_one_budget_among_the_heads(lengths, budget, safeguard, name):
    model, found = observed(lengths)
    inner = {"name": name, **({"queries": 3} if name == "snapkv" else {})}
    choice = AdaKV(budget, inner, safeguard)
    keeps = choice.keep_mask(found, model.config, SIZES)
    for row, length in enumerate(lengths):
        for layer, keep in zip(alone(model, lengths, row).layers, keeps, strict=True):
            scores = choice.inner.scores(layer, None, model.config)[0].tolist()
            ends = {j for j in range(length) if j < SIZES.sink or j >= length - SIZES.window}
            others = sorted(set(range(length)) - ends)
            room = min(len(others), budget - SIZES.sink - SIZES.window)
            certain = max(0, int(budget * safeguard) - SIZES.sink - SIZES.window)
            sure = {(h, j) for h in range(HEADS) for j in sorted(others, key=lambda j: (-scores[h][j], j))[:certain]}
            rest = sorted(((h, j) for h in range(HEADS) for j in others if (h, j) not in sure),
                          key=lambda at: (-scores[at[0]][at[1]], at))  # fmt: skip
            kept = sure | set(rest[: HEADS * room - len(sure)]) if len(others) > room else {*sure, *rest}
            want = [sorted(ends | {j for h, j in kept if h == head}) for head in range(HEADS)]
            assert kept_of(keep, row, length) == want


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
def test_pyramidkv_can_round_the_step_between_layers_down_as_its_authors_do(mean, layers):
    """For prompts that are long enough; the layers then hold a little more."""
    low = mean // 20
    step = (2 * (mean - low)) // (layers - 1)
    authors = PyramidKV(100, rounding="authors").shares(mean, 10**6, layers)
    assert authors == [2 * mean - low - index * step for index in range(layers)]
    assert all(
        0 <= more - share < layers for more, share in zip(authors, pyramid(mean, 10**6, layers, 20), strict=True)
    )


@pytest.mark.parametrize("beta", [1, 3, 20])
def test_pyramidkv_is_snapkv_with_each_layers_budget(beta):
    lengths = (60, 25, 9, 36)
    model, found = observed(lengths, model=kvpress.random_model(layers=4))
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
    model = kvpress.random_model(layers=4)
    found = prefill(model, kvpress.prompt(kvpress.LENGTH), None, 0, obs_queries=kvpress.LENGTH)
    window, recorded = Sizes(0, kvpress.WINDOW), json.loads(KVPRESS.read_text())
    choices = {
        "snapkv": (SnapKV(32, kvpress.WINDOW, 5), window),
        "snapkv_wide": (SnapKV(64, kvpress.WINDOW, 7), window),
        "pyramidkv": (PyramidKV(32, kvpress.WINDOW, 5, beta=3), window),  # 8 + 24 / 3 = 32 / 2
        "streaming_llm": (StreamingLLM(), Sizes(4, 28)),
        "tova": (TOVA(32, evict=False), Sizes(0, 1)),
        "keydiff": (KeyDiff(32), Sizes(0, 0)),
        "expected": (ExpectedAttention(32, future=32), Sizes(4, 0)),
        "expected_mean": (ExpectedAttention(64, covariance=False, epsilon=0.02), Sizes(4, 0)),
        "adakv": (AdaKV(32, {"name": "snapkv", "queries": kvpress.WINDOW, "kernel": 5}), window),
        "adakv_loose": (AdaKV(64, {"name": "snapkv", "queries": kvpress.WINDOW}, 0.0), window),
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


def test_duo_attention_can_count_as_its_authors_do(tmp_path):
    for ratio, nearest, authors in ((0.0, 0, 0), (0.5, 3, 3), (0.6, 4, 3), (1.0, 6, 5)):
        choice = duo(tmp_path, [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], ratio)
        assert choice.streaming().sum() == nearest
        assert replace(choice, count="authors").streaming().sum() == authors
    assert DuoAttention(count="authors").identity() == {**DuoAttention().identity(), "count": "authors"}


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


def test_a_budget_may_be_a_share_of_each_prompt():
    model, found = observed((33, 7, 21))
    keep = SnapKV(0.4, 3).keep_mask(found, model.config, Sizes(1, 3, 4))[0]
    assert keep.sum(-1).tolist() == [[13, 13], [4, 4], [8, 8]]  # of 33, 7 and 21; sink and window are four


def test_many_keys_are_compared_block_by_block(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys, there = torch.randn(2, 3, 37, 8, generator=generator), torch.rand(2, 3, 37, generator=generator) < 0.9
    want = rkv.redundancy(keys, there, 0.3)
    monkeypatch.setattr(rkv, "BLOCK", 5)
    torch.testing.assert_close(rkv.redundancy(keys, there, 0.3), want)
    torch.testing.assert_close(want.sum(-1), torch.ones(2, 3))
    assert not want[~there].any()


def test_bad_patterns_are_named(tmp_path):
    config = tiny_model("llama").config
    with pytest.raises(ValueError, match="of 3 layers x 2 KV heads, the model of 2 x 2"):
        duo(tmp_path, [[1, 1]] * 3).check(config, None)
    with pytest.raises(ValueError, match="must not contain infs or NaNs"):
        duo(tmp_path, [[1, float("nan")]] * 2).check(config, None)
    (tmp_path / "words.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"words\.tsv: could not convert"):
        DuoAttention(str(tmp_path / "words.tsv")).check(config, None)


CHOICES = [TOVA(12, evict=False), KeyDiff(12), ExpectedAttention(12), AdaKV(12, {"name": "keydiff"}), SnapKV(12, 4),
           PyramidKV(12, 4), StreamingLLM()]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_layers_that_slide_or_hold_part_of_the_prompt(choice):
    model, found = observed((30,), family="mistral", sliding_window=16)
    assert choice.keep_mask(found, model.config, SIZES) == [None, None]
    model, found = observed((30,))
    kept = torch.tensor([[-1, 3, *range(10, 30)]])
    part = PromptLayer(30)
    part.hold(kept, 30)
    part.update(found.layers[1].keys[:, :, kept[0]], found.layers[1].values[:, :, kept[0]])
    part.queries = found.layers[1].queries
    whole, of_part = choice.keep_mask(replace(found, layers=[found.layers[0], part]), model.config, SIZES)
    assert whole.shape[2] == 30
    assert of_part.shape[2] == 22
    assert not of_part[:, :, 0].any()


WORDS = Words([5, 6, 7], [8, 9], [10, 11])
model_of = functools.cache(tiny_model)


def asking(**given):
    """The pass with short requests, whose tokens every small vocabulary has."""
    found = Repeat(**given)
    found._words["words"] = WORDS
    return found


def by_hand(model, prompt, piece, first):
    """Scores [L][H, T] of one prompt [T]: every piece in a dense pass of its own over prompt, request and piece."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    found = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, len(prompt), dtype=torch.float64)
    for start in range(0, len(prompt), piece):
        end = min(start + piece, len(prompt))
        asked = WORDS.part + prompt[max(0, start - 8) : start] if start else WORDS.whole
        said = asked + WORDS.reply + prompt[start:end]
        whole = prefill(model, torch.tensor([prompt + said]), None, 0, len(said))
        columns = [*range(min(first, start)), *range(start, end), *range(len(prompt), len(prompt) + len(said))]
        for index, layer in enumerate(whole.layers):
            for head in range(config.num_attention_heads):
                for t, query in enumerate(layer.queries[0, head]):
                    sees = [j for j in columns if j <= len(prompt) + t]
                    logits = layer.keys[0, head // group, sees] @ query * layer.scaling
                    for j, weight in zip(sees, logits.softmax(-1).tolist(), strict=True):
                        if start <= j < end:
                            found[index, head // group, j] = max(found[index, head // group, j].item(), weight)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(3, 24), min_size=1, max_size=2), piece=st.integers(4, 30), first=st.integers(0, 5))
@torch.no_grad()
def test_scores_are_the_largest_attention_while_the_prompt_is_repeated(family, lengths, piece, first):
    """In pieces, behind the whole prompt, and in a padded batch; the pass itself is the dense one."""
    model, (ids, mask) = model_of(family), left_padded(lengths, seed=1)
    found = asking(piece=piece, first=first).run(model, ids, mask.bool(), 3, 2, None)
    dense = prefill(model, ids, mask.bool(), 3, 2)
    torch.testing.assert_close(found.logits, dense.logits)
    for row, length in enumerate(lengths):
        expected = by_hand(model, ids[row, -length:].tolist(), piece, first)
        for layer, scores, one in zip(found.layers, expected, dense.layers, strict=True):
            torch.testing.assert_close(layer.repeated[row, :, -length:], scores)
            torch.testing.assert_close(layer.keys[row, :, -length:], one.keys[row, :, -length:])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=3), budget=st.integers(8, 40), seed=st.integers(0, 99))
def test_all_heads_of_all_layers_share_one_budget(lengths, budget, seed):
    _, mask = left_padded(lengths, seed)
    generator, width, layers = torch.Generator().manual_seed(seed), max(lengths), []
    for _ in range(3):
        layers.append(PromptLayer(width))
        layers[-1].update(*[torch.zeros(len(lengths), 2, width, 4)] * 2)
        layers[-1].repeated = torch.randint(0, 9, (len(lengths), 2, width), generator=generator) / 8
    found = KVzip(budget=budget).keep_mask(
        Prefill(layers, mask.bool(), torch.zeros(len(lengths), 1), width), None, SIZES
    )
    for row, length in enumerate(lengths):
        pad = width - length
        middle = range(pad + SIZES.sink, max(pad + SIZES.sink, width - SIZES.window))
        places = [(layer, h, j) for layer in range(3) for h in range(2) for j in middle]
        places.sort(key=lambda at: (-layers[at[0]].repeated[row, at[1], at[2]].item(), at))
        best = set(places[: (budget - SIZES.sink - SIZES.window) * 6])
        for layer, kept in enumerate(found):
            for h in range(2):
                expected = {j for j in range(pad, width) if j not in middle or (layer, h, j) in best}
                if kept is None:
                    assert expected == set(range(pad, width))
                else:
                    assert set(kept[row, h].nonzero().flatten().tolist()) == expected


def test_without_words_or_the_pass_it_is_refused():
    model, (ids, _) = model_of("llama"), left_padded([30], seed=1)
    with pytest.raises(RuntimeError, match="calibrate it with a tokenizer"):
        Repeat().run(model, ids, None, 3, 0, None)
    alone = Method("alone", tokens=KVzip(budget=12), sink=2, window=6)
    with pytest.raises(ValueError, match="add prefill="):
        alone.compressed(model, alone.run_prefill(model, ids, None, 3))


def test_requests_are_asked_in_the_tokenizer_s_own_words():
    config, tokenizer = load_config(ModelConfig())
    choice = Repeat(piece=20)
    choice.calibrate(None, tokenizer, config)
    prompt = torch.arange(50, 80)[None]
    (start, end, said), (_, last, later) = choice.pieces(prompt)
    assert (start, end, last) == (0, 20, 30)
    assert tokenizer.decode(said[0, :-20]).startswith("\n\nRepeat the previous context exactly.")
    assert said[0, -20:].tolist() == [*range(50, 70)]
    assert later[0, -10:].tolist() == [*range(70, 80)]
    assert str([*range(62, 70)])[1:-1] in str(later[0].tolist())
