"""Layers that evict, and what R-KV and Lethe rank by, in kernels and in plain PyTorch: in Triton's interpreter on a
CPU, on the device with `-m gpu`."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, make_store, poison, poisoned_memory  # noqa: F401

from leank.eval.cache.attention.backend import choose_backend  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache import graph
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.launch import Kernel
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.inference.decode import decode
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods import Method
from leank.eval.methods.kernels import rkv as kernels
from leank.eval.methods.tokens import rkv
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.lethe import Lethe, Rounds
from leank.eval.methods.tokens.rkv import RKV, Redundant, redundancy
from leank.eval.methods.tokens.tova import TOVA, LastQuery
from leank.eval.methods.tokens.triattention import Attractive, TriAttention
from tests.helpers.cache_oracle import left_padded
from tests.helpers.drawn import calibrated, centres
from tests.helpers.thinned import at_length, thinned

POLICIES = {
    "h2o": lambda: HeavyHitters(23),
    "tova": lambda: LastQuery(23),
    "rkv": lambda: Redundant(23, RKV(kernel=3, queries=3, mix=0.4, threshold=0.2)),
    "lethe": lambda: Rounds(Lethe(3.0, 0.2, 5, 0.9, evict_at=45, limit=70)),
    "lethe, printed": lambda: Rounds(Lethe(3.0, 0.2, 5, 0.9, evict_at=45, reading="printed")),
}
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = {"rtol": 3e-2, "atol": 3e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}


class Pair:
    """One layer twice, by the kernel and by plain PyTorch, from the same prompt."""

    def __init__(self, policy, lengths, counts, sizes, dim, group, seed, dtype=DTYPE):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.shape, self.group = (len(lengths), len(counts), dim), group
        self.fast, self.slow = (make_store(counts, dim, lengths, sizes, dtype, seed, eviction=policy) for _ in range(2))
        self.kernel = Kernel(programs=5)
        if isinstance(self.fast.eviction, Redundant):
            self.hand_over()

    def hand_over(self):
        """The slow layer takes over what its tokens are ranked by, too, once both agree."""
        fast, slow, found = self.fast.eviction, self.slow.eviction, []
        launched, ranking = fast.launched, slow.ranking

        def launch(*given):
            found[:] = [launched(*given)]
            return found[0]

        def rank(prompt, tail, sink):
            ranks, middle = ranking(prompt, tail, sink), prompt.length + tail.length
            for row, head in np.argwhere(middle > slow.heavy):
                n = middle[row, head]
                mine, other = found[0][row, head, :n], ranks[row, head, sink : sink + n]
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
                other.copy_(mine)
            return ranks

        fast.launched, slow.ranking = launch, rank

    def random(self, heads, tokens):
        batch, _, dim = self.shape
        return torch.randn(batch, heads, tokens, dim, generator=self.generator).to(DEVICE, self.dtype)

    def step(self, new, real=None, bits=True):
        """Append, attend and flush; the slow layer takes over the scores, so that rounding leaves no other tokens."""
        heads, fast, slow = self.shape[1], self.fast, self.slow
        k, v, q = self.random(heads, new), self.random(heads, new), self.random(heads * self.group, new) * 2
        position = fast.append(k, v, real, self.kernel.write)
        assert torch.equal(slow.append(k, v, real), position)
        out = self.kernel.attend(fast, q, position, 0.3)
        torch.testing.assert_close(out, Plain().attend(slow, q, position, 0.3), **TOLERANCE)
        self.check_scores()
        fast.flush(self.kernel.move, self.kernel.evict)
        slow.flush()
        assert fast.held().tolist() == slow.held().tolist()
        assert fast.quiet == slow.quiet
        if isinstance(fast.eviction, Rounds):
            assert fast.eviction.evict_at.tolist() == slow.eviction.evict_at.tolist()
        self.check_scores()
        if bits:
            self.check_tokens()

    def check_scores(self):
        fast, slow, held = self.fast.eviction, self.slow.eviction, int(self.slow.held().max())
        mine, other = fast.scores[..., :held], slow.scores[..., :held]
        torch.testing.assert_close(mine, other, **TOLERANCE)
        assert not fast.scores[..., held:].any()
        other.copy_(mine)

    def check_tokens(self):
        """Both hold the same bits, and no token's bits have been left behind in the fast one's counts."""
        fast, slow = self.fast, self.slow
        assert fast.tail.length_dev.tolist() == fast.tail.length.tolist()
        assert not fast.prompt.length.any()
        for row, head in np.ndindex(*self.shape[:2]):
            mine, parts = fast.tail.read(row, head), [p.read(row, head) for p in (slow.prompt, slow.tail)]
            for one, pieces in zip(mine, zip(*parts, strict=True), strict=True):
                assert torch.equal(one, torch.cat(pieces))
        assert not self.kernel._done.any()
        poison(fast)
        self.kernel.weights._scratch.fill_(torch.nan)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=5, derandomize=True)
@given(
    st.sampled_from(list(POLICIES)),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.lists(st.integers(0, 64), min_size=1, max_size=2),
    st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 9)),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
    st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_on_random_shapes(policy, lengths, counts, sizes, group, steps, seed):
    made = POLICIES[policy]()
    pair = Pair(made, lengths, counts, Sizes(*sizes), 64, group, seed)
    for new in steps:
        pair.step(1 if made.every_step else new)


test_interpreted_on_many_random_shapes = at_length(test_interpreted_on_random_shapes, 50)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize(
    ("policy", "dim"),
    thinned([*((one, 64) for one in POLICIES), ("tova", 192), ("rkv", 256)], keep=(0, 3, 5, 6)),  # every kernel
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_many_steps_interpreted(policy, dim):
    """Rows of unequal length, one without a token now and then; a head of few channels and one of none."""
    pair = Pair(POLICIES[policy](), [52, 31], [dim, 0], Sizes(3, 8, 4), dim, 2, 1)
    pages = set()
    for step in range(8):
        real = torch.tensor([[True], [step % 7 != 3]], device=DEVICE)
        pair.step(1, None if real.all() else real, bits=step % 4 == 3)
        pages.add(pair.fast.tail.k.data_ptr())
    assert len(pages) < 4  # tokens leave in place, and the tail seldom moves


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_distances_count_from_the_next_token_of_each_row_interpreted():
    pair = Pair(Attractive(23, centres(2, 2, 64, 40)), [52, 31], [64, 20], Sizes(3, 8, 4), 64, 2, 1)
    for step in range(8):
        pair.step(1, torch.tensor([[True], [step % 3 != 1]]))
    assert pair.fast.eviction.seen.tolist() == [60, 36]


@pytest.mark.gpu
def test_distances_count_from_the_next_token_of_each_row_on_the_device():
    pair = Pair(Attractive(23, centres(2, 2, 128, 40)), [300, 41], [128, 33], Sizes(4, 32, 16), 128, 2, 1)
    for step in range(200):
        pair.step(1, torch.tensor([[True], [step % 7 != 3]], device=DEVICE), bits=step % 20 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "dim"), [*((one, 128) for one in POLICIES), ("h2o", 256), ("rkv", 192), ("rkv", 256)]
)
def test_a_thousand_steps_on_the_device(policy, dim):
    pair = Pair(POLICIES[policy](), [300, 41, 170], [dim, 0, 33, 96], Sizes(4, 32, 16), dim, 4, 1)
    for step in range(1000):
        real = torch.tensor([[True], [step % 7 != 3], [True]], device=DEVICE)
        pair.step(1, None if real.all() else real, bits=step % 20 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("heavy", [1000, 9000])
def test_large_budgets_on_the_device(heavy):
    pair = Pair(HeavyHitters(heavy), [10_000, 7_000], [128, 64], Sizes(4, 64, 32), 128, 4, 1)
    for step in range(100):
        pair.step(1, bits=step % 20 == 0)


CHOICES = {
    "h2o": H2O(budget=100),
    "tova": TOVA(budget=100),
    "rkv": RKV(budget=100),
    "triattention": TriAttention(budget=100),
    "lethe": Lethe(3.0, evict_at=120),
    "lethe, printed": Lethe(evict_at=120, reading="printed", limit=300),
}


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES)
def test_a_captured_step_decodes_what_single_steps_do(choice, captures, monkeypatch):
    """Many tokens of two rows, one of them padded, through evictions and a tail that moves."""
    model = load_model(ModelConfig())
    method = Method("m", tokens=CHOICES[choice], sink=4, window=32, flush=8, backend="triton")
    calibrated(method, model.config)
    ids, mask = left_padded((400, 250), 5)
    ids, real, new = ids.to(model.device), mask.bool().to(model.device), 1000 if choice in ("h2o", "lethe") else 250
    found = []
    for least in (10**6, graph.CAPTURE_FOR):  # never captured, captured
        monkeypatch.setattr("leank.eval.inference.decode.CAPTURE_FOR", least)
        prompt = method.run_prefill(model, ids, real, new)
        cache = method.cache(model, prompt)
        tokens, _, _ = decode(model, cache, prompt.logits, real, prompt.lengths, [], [new] * 2, [new] * 2)
        found.append((tokens, [layer.store.held().tolist() for layer in cache.layers]))
    assert captures == [1]
    assert found[0] == found[1]
    assert np.array(found[0][1]).max() < 600


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_auto_takes_the_kernel_for_a_layer_that_evicts(monkeypatch):
    monkeypatch.setattr("leank.eval.cache.attention.backend.why_not", lambda *_: None)
    layer = CompressedLayer(Middle(eviction=HeavyHitters(20)), Sizes(2, 9, 4), choose_backend("auto", programs=4))
    plain = CompressedLayer(Middle(eviction=HeavyHitters(20)), Sizes(2, 9, 4), choose_backend("torch"))
    k, v = torch.randn(2, 1, 2, 70, 64).to(DEVICE, DTYPE)
    for one in (layer, plain):
        one.compress(k, v, scores=torch.rand(1, 2, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE))
    for _ in range(9):
        k, v, q = torch.randn(3, 1, 4, 1, 64).to(DEVICE, DTYPE)
        got, want = (one.update(k[:, :2], v[:, :2]) and one.attend(q) for one in (layer, plain))
        torch.testing.assert_close(got, want, **TOLERANCE)
    assert isinstance(layer.backend, Kernel)
    assert layer.backend.captures
    assert layer.store.tail.length.tolist() == [[20, 20]]


# R-KV's and Lethe's kernels


SMALL = kernels.Tiles(block=16, tile=16, span=32, warps=4)


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
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 90),
    st.sampled_from([16, 64, 192]),
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


test_redundancy_in_many_prompts = at_length(test_redundancy_in_a_prompt_is_that_of_the_slow_form, 60)


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
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=2),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.tuples(st.integers(0, 6), st.integers(0, 20)),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from(["all", "earlier"]),
    st.integers(0, 99),
)
def test_scores_of_a_round_are_those_of_the_slow_form(counts, lengths, ends, kernel, mix, threshold, pooled, seed):
    options = RKV(kernel=kernel, mix=mix, threshold=threshold, pooled=pooled)
    rank(counts, lengths, Sizes(*ends, 4), options, seed, SMALL)


test_scores_of_many_rounds = at_length(test_scores_of_a_round_are_those_of_the_slow_form, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [kernels.tiles_of(128), kernels.Tiles(tile=128, warps=8)])
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
    found = fast._launched(length, due, middle, *at)
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
