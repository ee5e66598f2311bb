"""TOVA, KeyDiff, Expected Attention, AdaKV and R-KV against obvious loops over each prompt alone, and end to end."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from leank.eval.cache import Sizes
from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.reads.double_sparsity import rounded
from leank.eval.methods.tokens import rkv
from leank.eval.methods.tokens.adakv import AdaKV
from leank.eval.methods.tokens.duo_attention import DuoAttention
from leank.eval.methods.tokens.expected_attention import ExpectedAttention, frequencies
from leank.eval.methods.tokens.keydiff import KeyDiff
from leank.eval.methods.tokens.pyramidkv import PyramidKV
from leank.eval.methods.tokens.rkv import RKV
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.tova import TOVA
from tests.helpers.cache_oracle import DIM, HEADS, left_padded, tiny_model
from tests.helpers.token_choices import alone, attention, kept_of, observed

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


@settings(deadline=None, max_examples=20)
@given(
    lengths=LENGTHS, budget=st.integers(8, 24), sink=st.integers(0, 4), window=st.integers(0, 8),
    name=st.sampled_from(["tova", "keydiff", "expected", "no_covariance", "few_queries"]),
)  # fmt: skip
def test_they_keep_what_loops_over_each_prompt_alone_keep(lengths, budget, sink, window, name):
    budget = max(budget, sink + window)
    choice, by_hand = {
        "tova": (TOVA(budget, evict=False), tova_by_hand),
        "keydiff": (KeyDiff(budget), keydiff_by_hand),
        "expected": (ExpectedAttention(budget, future=5, skip=1), expected_by_hand),
        "no_covariance": (ExpectedAttention(budget, 40, 3, 0, False, 0.02), expected_by_hand),
        "few_queries": (ExpectedAttention(budget, 5, 7, 2), expected_by_hand),
    }[name]
    model, found = whole(lengths)
    keeps = choice.keep_mask(found, model.config, Sizes(sink, window, 4))
    for row, length in enumerate(lengths):
        for layer, keep in zip(whole(lengths, row)[1].layers, keeps, strict=True):
            expected = highest(by_hand(layer, choice, model.config), length, Sizes(sink, window), budget)
            assert kept_of(keep, row, length) == expected


def whole(lengths, row=None):
    """(model, a pass over prompts, or over one of them alone, that keeps all queries)."""
    model = tiny_model("llama")
    ids, mask = left_padded(lengths, 0)
    ids, real = (ids, mask.bool()) if row is None else (ids[row : row + 1, -lengths[row] :], None)
    return model, prefill(model, ids % model.config.vocab_size, real, 0, obs_queries=64)


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


def test_adakv_refuses_what_has_no_scores():
    with pytest.raises(ValueError, match=r"adakv.scores_of.name=streaming_llm has no scores"):
        _ = AdaKV(scores_of={"name": "streaming_llm"}).inner
    with pytest.raises(ValueError, match=r"adakv.scores_of.budget=9 does not count; set adakv.budget"):
        _ = AdaKV(scores_of={"name": "snapkv", "budget": 9}).inner


def test_pyramidkv_can_round_as_its_authors_do():
    """The step between layers is rounded down, so the sum is larger."""
    choice = PyramidKV(100, rounding="authors")
    assert choice.shares(100, 10**6, 4) == [195, 132, 69, 6]  # 2 * 100 - 5, less 63 a layer
    assert sum(choice.shares(10, 10**6, 32)) > sum(PyramidKV(100).shares(10, 10**6, 32)) == 320


def test_duo_attention_can_count_as_its_authors_do(tmp_path):
    gates = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    path = tmp_path / "gates.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in gates))
    for ratio, nearest, authors in ((0.0, 0, 0), (0.5, 3, 3), (0.6, 4, 3), (1.0, 6, 5)):
        assert DuoAttention(str(path), ratio).streaming().sum() == nearest
        assert DuoAttention(str(path), ratio, count="authors").streaming().sum() == authors
    assert DuoAttention(count="authors").identity() == {**DuoAttention().identity(), "count": "authors"}


@settings(deadline=None, max_examples=20)
@given(bits=st.sampled_from([2, 4]), seed=st.integers(0, 99))
def test_labels_are_rounded_token_by_token(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, chosen = torch.randn(6, 5, generator=generator), torch.rand(6, 1, generator=generator) < 0.7
    found = rounded(keys, chosen, bits)
    for token in range(5):
        labels = [float(keys[c, token]) for c in range(6) if chosen[c]]
        for c in range(6):
            want = float(keys[c, token])
            if chosen[c]:
                step = (max(labels) - min(labels)) / (2**bits - 1) or 1.0
                want = min(labels) + round((want - min(labels)) / step) * step
            assert float(found[c, token]) == pytest.approx(want, abs=1e-5)


def test_a_budget_may_be_a_share_of_each_prompt():
    model, found = observed((33, 7, 21))
    keep = SnapKV(0.4, 3).keep_mask(found, model.config, Sizes(1, 3, 4))[0]
    assert keep.sum(-1).tolist() == [[13, 13], [4, 4], [8, 8]]  # of 33, 7 and 21; sink and window are four
    with pytest.raises(ValueError, match=r"budget=0\.4 is a share of the prompt; evict=true needs a number"):
        build_method("x", {"tokens": {"name": "h2o", "budget": 0.4}}, {"sink": 0, "window": 6})
    with pytest.raises(ValueError, match=r"budget=1\.5 must be"):
        build_method("x", {"tokens": {"name": "snapkv", "budget": 1.5}})


@torch.no_grad()
def test_tova_evicts_what_the_newest_query_attends_to_least():
    """Against a dense cache whose weights are cut by hand after every move out of the window."""
    chosen = build_method("tova", {"tokens": {"name": "tova", "budget": 16}}, {"sink": 2, "window": 6, "flush": 4})
    model, lengths, new = tiny_model("llama"), (34, 19), 15
    ids, mask = left_padded(lengths, 5)
    found = prefill(model, ids, mask.bool(), new, 1)
    cache = chosen.cache(model, found)
    tokens, _, _ = greedy(model, cache, found.logits, found.real, found.lengths, [], [new] * 2, [new] * 2, None)
    for row, length in enumerate(lengths):
        one = prefill(model, ids[row : row + 1, -length:], None, new, 1)
        assert tokens[row] == evicted_by_hand(model, one, chosen, new)
    for layer in cache.compressed:
        assert (layer.store.prompt.length + layer.store.tail.length == 8).all()


def evicted_by_hand(model, found, chosen, new):
    """Tokens of one prompt: before each step, every layer hides what it has evicted."""
    keeps = chosen.tokens.keep_mask(found, model.config, SIZES)
    length = found.columns
    held = [sorted(keep[0, 0].nonzero()[:, 0].tolist()) for keep in keeps]
    keys = [layer.keys[0].clone() for layer in found.layers]
    values = [layer.values[0].clone() for layer in found.layers]
    token, start, out, seen = int(found.logits.argmax()), length - SIZES.window, [], []
    for step in range(new):
        out.append(token)
        seen.clear()

        def attend(module, query, key, value, mask, scaling, **kwargs):
            index = module.layer_idx
            keys[index] = torch.cat([keys[index], key[0, :, -1:]], 1)
            values[index] = torch.cat([values[index], value[0, :, -1:]], 1)
            held[index].append(keys[index].shape[1] - 1)
            k, v = (x[index][:, held[index]].repeat_interleave(2, 0) for x in (keys, values))
            weight = (query[0] @ k.mT * scaling).softmax(-1)  # [Hq, 1, tokens]
            seen.append(weight.sum((0, 1)))
            return (weight @ v).transpose(0, 1)[None], None

        AttentionInterface.register("by_hand", attend)
        model.set_attn_implementation("by_hand")
        position = torch.tensor([[length + step]])
        token = int(model(torch.tensor([[token]]), position_ids=position, use_cache=False).logits[0, -1].argmax())
        if length + step + 1 - start >= SIZES.window + SIZES.flush:
            start += SIZES.flush
            for index, weights in enumerate(seen):
                middle = [n for n, j in enumerate(held[index]) if SIZES.sink <= j < start]
                best = sorted(middle, key=lambda n: -float(weights[n]))[:8]
                held[index] = [j for n, j in enumerate(held[index]) if n not in middle or n in best]
    return out


def rkv_by_hand(layer, choice, config):
    keys, count = layer.keys[0], layer.keys.shape[2]
    weights = attention(layer.queries[0, :, -choice.queries :], keys).mean(1).unflatten(0, (HEADS, -1)).mean(1)
    found, reach = [], choice.kernel // 2
    for of_head, head in zip(weights, keys, strict=True):
        alike = [[float(a @ b / a.norm() / b.norm()) if i != j else 0.0 for j, b in enumerate(head)]
                 for i, a in enumerate(head)]  # fmt: skip
        for line in alike:
            over = [j for j, value in enumerate(line) if value > choice.threshold]
            if over:
                line[over[-1]] = 0.0
        mean = [sum(line[j] for line in alike) / count for j in range(count)]
        total = sum(math.exp(x) for x in mean)
        found.append([
            choice.mix * float(of_head[max(0, j - reach) : j + reach + 1].max())
            - (1 - choice.mix) * math.exp(mean[j]) / total
            for j in range(count)
        ])  # fmt: skip
    return found


@settings(deadline=None, max_examples=15)
@given(lengths=LENGTHS, budget=st.integers(10, 24), mix=st.sampled_from([0.0, 0.1, 0.9]),
       threshold=st.sampled_from([0.0, 0.5]))  # fmt: skip
def test_rkv_keeps_what_is_important_and_not_redundant(lengths, budget, mix, threshold):
    choice = RKV(budget, 3, 5, mix, threshold)
    model, found = whole(lengths)
    keeps = choice.keep_mask(found, model.config, Sizes(1, 2, 4))
    for row, length in enumerate(lengths):
        for layer, keep in zip(whole(lengths, row)[1].layers, keeps, strict=True):
            scores = rkv_by_hand(layer, choice, model.config) if length >= 3 else []
            assert kept_of(keep, row, length) == highest(scores, length, Sizes(1, 3), budget)


def test_many_keys_are_compared_block_by_block(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys, there = torch.randn(2, 3, 37, 8, generator=generator), torch.rand(2, 3, 37, generator=generator) < 0.9
    want = rkv.redundancy(keys, there, 0.3)
    monkeypatch.setattr(rkv, "BLOCK", 5)
    torch.testing.assert_close(rkv.redundancy(keys, there, 0.3), want)
    torch.testing.assert_close(want.sum(-1), torch.ones(2, 3))
    assert not want[~there].any()


@torch.no_grad()
def test_rkv_holds_its_budget_through_a_long_reply():
    chosen = build_method(
        "rkv", {"tokens": {"name": "rkv", "budget": 20, "queries": 3}}, {"sink": 2, "window": 4, "flush": 6}
    )
    model, lengths, new = tiny_model("llama"), (34, 9), 60
    ids, mask = left_padded(lengths, 5)
    found = prefill(model, ids, mask.bool(), new, 3)
    cache = chosen.cache(model, found)
    greedy(model, cache, found.logits, found.real, found.lengths, [], [new] * 2, [new] * 2, None)
    for layer in cache.compressed:
        assert (layer.store.prompt.length + layer.store.tail.length == 14).all()
