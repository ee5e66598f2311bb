"""R-KV's and Lethe's kernels against plain PyTorch: in Triton's interpreter on a CPU, on the device with `-m gpu`."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, poison

from leank.eval.cache.storage.middle import Middle  # isort: skip  (Triton, which the line above asks for)
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.kernels import rkv as kernels
from leank.eval.methods.tokens import rkv
from leank.eval.methods.tokens.lethe import Lethe, Rounds
from leank.eval.methods.tokens.rkv import RKV, Redundant, redundancy

SMALL = kernels.Tiles(block=16, tile=16, span=32, warps=4)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def random_keys(batch, heads, tokens, dim, repeats, seed):
    """Keys of which some are alike, two are the same and one is zero; numbers of one head are not side by side."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(batch, heads, 1, dim, generator=generator)
    keys = torch.randn(batch, tokens, heads, dim, generator=generator).transpose(1, 2)
    keys += common * (torch.rand(batch, heads, tokens, 1, generator=generator) < repeats) * 2
    keys[0, 0, tokens // 2] = keys[0, 0, 0]
    keys[-1, -1, -1] = 0
    return keys.to(DEVICE, DTYPE)


def compare(keys, there, threshold, tiles):
    found, want = kernels.redundancy(keys, there, threshold, tiles), redundancy(keys, there, threshold)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-8)
    assert not found[~there].any()


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 90),
    st.sampled_from([16, 64]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.sampled_from([0, 5, 10**6]),
    st.integers(0, 99),
)
@example(1, 1, 3, 16, 0.0, 1.0, 0, 1)  # the cosine of two equal keys is rounded to more than 1
def test_redundancy_in_a_prompt_is_that_of_the_slow_form(batch, heads, tokens, dim, repeats, threshold, padding, seed):
    """Any share of tokens that are alike, so that the search ends early, late or never; padded rows, and empty ones."""
    keys = random_keys(batch, heads, tokens, dim, repeats, seed)
    there = torch.ones(keys.shape[:3], dtype=torch.bool, device=DEVICE)
    there[0, :, :padding] = False
    compare(keys, there, threshold, SMALL)


def test_a_prompt_uses_the_kernel_where_triton_runs(monkeypatch):
    keys, choice = random_keys(2, 2, 40, 64, 0.5, 0), RKV(10, 4)
    layer = PromptLayer(40)
    layer.take(keys, keys)
    layer.queries = torch.randn_like(keys[:, :, -4:]).repeat_interleave(2, 1)
    want = choice.scores(layer, None, None)
    calls, slow = [], kernels.redundancy
    monkeypatch.setattr(rkv, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "redundancy", lambda *given: calls.append(1) or slow(*given, tiles=SMALL))
    torch.testing.assert_close(choice.scores(layer, None, None), want)
    assert calls == [1]


def rank(counts, lengths, sizes, options, seed, tiles):
    """The middles of a padded batch, in pages of unequally many channels; what is past a token is NaN."""
    generator = torch.Generator().manual_seed(seed)
    heads, most = len(counts), max(lengths)
    k, v = (random_keys(len(lengths), heads, most, 64, 0.5, seed + i) for i in range(2))
    real = torch.arange(most) >= most - torch.tensor(lengths)[:, None]
    keep = torch.zeros(heads, 64, dtype=torch.bool)
    for head, count in enumerate(counts):
        keep[head, torch.randperm(64, generator=generator)[:count]] = True
    scores = torch.rand(len(lengths), heads, most, generator=generator).to(DEVICE)
    policy = Redundant(3, options)
    store = Store(k, v, real.to(DEVICE), Middle(keep, eviction=Redundant(10**6, options)), sizes, scores=scores)
    policy = store.eviction
    policy.heavy = 0
    policy.reserve(policy.scores.shape[-1] + 7)
    poison(store)
    length, first = store.tail.length, int(store.ends()[0].max())
    tokens = int(length.max())
    if not tokens:
        return
    want = policy.ranking(store.prompt, store.tail, first)[..., first : first + tokens]
    given = policy.scores, store.tail, first, tokens, options
    found = kernels.ranking(*given, tiles)
    for row, head in np.ndindex(*length.shape):
        n = int(length[row, head])
        torch.testing.assert_close(found[row, head, :n], want[row, head, :n], rtol=1e-5, atol=1e-8)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=2),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.tuples(st.integers(0, 6), st.integers(0, 20)),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 99),
)
def test_scores_of_a_round_are_those_of_the_slow_form(counts, lengths, ends, kernel, mix, threshold, seed):
    options = RKV(kernel=kernel, mix=mix, threshold=threshold)
    rank(counts, lengths, Sizes(*ends, 4), options, seed, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [kernels.DEFAULT, kernels.Tiles(tile=128, warps=8)])
def test_redundancy_on_the_device(tiles):
    for tokens, repeats, threshold in ((3000, 0.3, 0.5), (1144, 0.0, 0.5), (70, 1.0, 0.0), (4096, 0.0, 0.9)):
        keys = random_keys(2, 4, tokens, 128, repeats, 0)
        there = torch.ones(keys.shape[:3], dtype=torch.bool, device=DEVICE)
        there[0, :, : tokens // 3] = False
        compare(keys, there, threshold, tiles)
    rank([64, 37, 0, 64], [1144, 300], Sizes(3, 8), RKV(), 0, tiles)


def check_round(options, lengths, heads, different, sink, window, seed):
    """Rows of `lengths` tokens between sink and window, the last of which is not due; one head has no middle."""
    generator = torch.Generator().manual_seed(seed)
    middle = np.repeat(np.array(lengths)[:, None], heads, 1)
    middle[:, 1:2] = 0
    held = sink + np.array(lengths) + window
    scores = torch.randint(1, different + 1, (len(lengths), heads, int(held.max()) + 9), generator=generator) / 64
    scores[..., 0] *= 50  # so that there is something to break at
    for row, end in enumerate(held):
        scores[row, :, end:] = 0
    due = np.arange(max(1, len(lengths) - 1))
    slow, fast = (Rounds(options).begin(scores.to(DEVICE), held[:, None].repeat(heads, 1)) for _ in range(2))
    at = held[due], np.full(len(due), sink), np.full(len(due), window)
    stay, stays = slow._chosen(due, middle, *at)
    length = torch.tensor(middle, device=DEVICE)
    found = fast._launched(due, length, int(middle.max()), *at)
    own = torch.arange(stay.shape[-1], device=DEVICE) < length[..., None]
    assert torch.equal(found[0] & own, stay & own)
    assert found[1].tolist() == stays.tolist()
    assert fast.evict_at.tolist() == slow.evict_at.tolist()


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([1.2, 3.0, 40.0]),
    st.sampled_from([0.0, 0.3, 0.8]),
    st.integers(2, 4),
    st.sampled_from(["text", "printed"]),
    st.sampled_from([0, 20, 45]),
    st.sampled_from([0.0, 0.3]),
    st.lists(st.integers(1, 60), min_size=1, max_size=2),
    st.integers(1, 3),
    st.sampled_from([1, 5, 10**6]),
    st.tuples(st.integers(0, 5), st.integers(1, 12)),
    st.integers(0, 99),
)
def test_rounds_of_any_settings_are_those_of_the_slow_form(
    tau, ratio, segments, reading, limit, least, lengths, heads, different, ends, seed
):
    options = Lethe(tau, ratio, segments, 0.9, evict_at=18, reading=reading, limit=limit, min_sparsity=least)
    check_round(options, lengths, heads, different, *ends, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0, 1024])
@pytest.mark.parametrize("tau", [3.0, 400.0])
def test_rounds_on_the_device(limit, tau):
    check_round(Lethe(tau, 0.3, limit=limit), [1100, 1500, 40], 8, 1000, 4, 32, 0)
    check_round(Lethe(tau, 0.3, limit=limit), [20_000], 8, 1000, 4, 32, 0)
