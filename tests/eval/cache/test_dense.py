"""Rows side by side, in a compressed cache and in a dense one."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from leank import kernels
from leank.eval.cache import Sizes
from leank.eval.cache.attention import batched, dense
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.softmax import PLAIN, Softmax, written_out
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import Store
from leank.eval.methods.bits.pca import Coordinates
from leank.eval.methods.bits.spark import Records
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from leank.eval.methods.tokens.lethe import Lethe, Rounds
from leank.eval.methods.tokens.rkv import RKV, Redundant
from leank.eval.methods.tokens.tova import LastQuery
from tests.helpers.poisoned import poisoned_memory  # noqa: F401
from tests.oracles import cache_attention as naive
from tests.oracles.attention import attention, causal

HEADS, DIM, GROUP = 3, 8, 2
SIZES = Sizes(2, 5, 3)
CHOICES = {
    "all": {},
    "bits": {"bits": Packing(4, 8)},
    "quest": {"reads": Quest(16, 3, 0)},
    "quest of bits": {"reads": Quest(16, 3, 0), "bits": Packing(2, 4)},
    "h2o": {"eviction": HeavyHitters(9)},
    "tova": {"eviction": LastQuery(9)},
    "rkv": {"eviction": Redundant(9, RKV(kernel=3, queries=3, mix=0.4, threshold=0.2))},
    "pca": {"bits": Coordinates(torch.linalg.qr(torch.randn(3, 8, 3, generator=torch.manual_seed(0)))[0])},
    "lethe": {"eviction": Rounds(Lethe(3.0, 0.2, 5, 0.9, evict_at=14, limit=40))},
}


def random_like(generator, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=dtype)


def both(make):
    return make(), make()


def check(stores, generator, new, real, softmax=PLAIN):
    """One call with `new` query tokens over each store, by each implementation."""
    one, other = stores
    batch = len(one.seen)
    k, v = (random_like(generator, batch, HEADS, new, DIM) for _ in range(2))
    q = random_like(generator, batch, HEADS * GROUP, new, DIM) * 2
    position, _ = (store.append(k, v, real) for store in stores)
    out = batched.attend(one, q, position, 0.5, softmax)
    torch.testing.assert_close(out, naive.attend(other, q, position, 0.5, softmax))
    if one.eviction is not None:
        assert np.array_equal(one.eviction.held, other.eviction.held)
        for row, head in np.ndindex(batch, HEADS):
            torch.testing.assert_close(*(naive.scores_of(store.eviction, row, head) for store in stores))
    for store in stores:
        store.flush()
        assert store.eviction is None or not store.eviction.scores.isnan().any()
    for part in ("prompt", "tail"):
        assert np.array_equal(getattr(one, part).length, getattr(other, part).length)


@settings(max_examples=45, derandomize=True)
@given(
    choice=st.sampled_from([*CHOICES, "labels", "spark"]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    channels=st.sampled_from(["all", "some", "by row"]),
    values=st.booleans(),
    chosen=st.booleans(),
    joins=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    seed=st.integers(0, 9999),
)
def test_it_is_the_reference(choice, lengths, channels, values, chosen, joins, softcap, sinks, steps, seed):
    """Ragged in tokens, in channels of K and V; padding in the prompt and among new tokens; flushes, evictions and
    another order of the rows in between."""
    generator, batch, width = torch.Generator().manual_seed(seed), len(lengths), max(lengths)

    def some(*shape, share):
        return torch.rand(*shape, generator=generator) < share

    keep = None
    if choice in ("quest of bits", "pca", "spark"):  # pages of one channel's few numbers tie; records need all
        channels = "all"
    if channels != "all":
        keep = some(*([batch] if channels == "by row" else []), HEADS, DIM, share=0.6)
        keep[..., 1, :] &= some(DIM, share=0.3)
    chooses = dict(CHOICES.get(choice, {}))
    if choice == "labels":
        label = some(HEADS, DIM, share=0.7)
        assume(keep is None or ((keep & label).any(-1) | ~keep.any(-1)).all())  # else all tokens tie
        assume(label.any(-1).all())
        chooses["reads"] = Labels(label, 16, 4 if seed % 2 else 16)
    if choice == "spark":
        chooses["bits"] = Records(torch.rand(batch, HEADS, DIM, generator=generator), 3, 6, torch.int64, True)
    if values and "bits" not in chooses:
        chooses["values"] = some(HEADS, DIM, share=0.5)
    if joins:
        chooses["joins"] = torch.tensor([True, False, True])
    middle = Middle(channels=keep, **chooses)
    sizes = Sizes(2, 5, 8) if "bits" in chooses else SIZES
    k, v = (random_like(generator, batch, HEADS, width, DIM) for _ in range(2))
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    tokens = some(batch, HEADS, width, share=0.7) if chosen else None
    scores = torch.rand(batch, HEADS, width, generator=generator)
    stores = both(lambda: Store(k, v, real, middle, sizes, tokens, scores))
    softmax = Softmax(softcap, random_like(generator, HEADS * GROUP) if sinks else None)
    for number, new in enumerate(steps):
        padding = torch.randint(0, new + 1, (batch,), generator=generator)
        padded = torch.arange(new) >= padding[:, None] if number % 3 == 2 else None
        check(stores, generator, new, padded, softmax)
        if number == 4:
            for store in stores:
                store.select(torch.tensor([batch - 1, *range(batch)]))
            batch += 1


@pytest.mark.parametrize("choice", ["quest", "labels", "h2o", "lethe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_precision_of_the_reference(choice, dtype):
    """Products and sums in float32, whatever the cache is stored in."""
    chooses = CHOICES.get(choice) or {"reads": Labels(torch.ones(HEADS, DIM, dtype=torch.bool), 16)}
    generator = torch.Generator().manual_seed(0)
    k, v = (random_like(generator, 2, HEADS, 60, DIM, dtype=dtype) for _ in range(2))
    stores = both(lambda: Store(k, v, None, Middle(**chooses), SIZES))
    q, position = random_like(generator, 2, HEADS * GROUP, 1, DIM, dtype=dtype), torch.tensor([[59], [59]])
    found, want = (
        attend(store, q, position, 0.3) for attend, store in zip((batched.attend, naive.attend), stores, strict=True)
    )
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # of a result that has been rounded once
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


VIEWS = {"view", "_unsafe_view", "_reshape_alias", "expand", "slice", "select", "split_with_sizes", "transpose",
         "permute", "squeeze", "unsqueeze", "alias", "unbind", "t", "detach", "promote_types"}  # fmt: skip


class Operators(TorchDispatchMode):
    """How many operators reach the dispatcher, views aside: on a GPU, about as many launches."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))


def operators(attend, middle, batch, steps, asked=None):
    """Operators of a decoding step, its append and its share of the flushes between, mean of `steps`.

    asked: real tokens of each row's question [batch], which comes first, so that windows are full at different steps
    """
    generator = torch.Generator().manual_seed(0)
    k, v = (random_like(generator, batch, HEADS, 200, DIM, dtype=torch.bfloat16) for _ in range(2))
    store = Store(k, v, None, middle, Sizes(4, 40, 32))
    if asked is not None:
        new = int(asked.max())
        k, v = (random_like(generator, batch, HEADS, new, DIM, dtype=torch.bfloat16) for _ in range(2))
        q = random_like(generator, batch, HEADS * GROUP, new, DIM, dtype=torch.bfloat16)
        attend(store, q, store.append(k, v, torch.arange(new) >= new - asked[:, None]), 0.3)
        store.flush()
    with Operators() as seen:
        for _ in range(steps):
            k, v = (random_like(generator, batch, HEADS, 1, DIM, dtype=torch.bfloat16) for _ in range(2))
            q = random_like(generator, batch, HEADS * GROUP, 1, DIM, dtype=torch.bfloat16)
            attend(store, q, store.append(k, v), 0.3)
            store.flush()
    return seen.count / steps - 3  # randn


STEPS = {
    "quest": {"reads": Quest(100, 16, 0)},
    "labels": {"reads": Labels(torch.ones(HEADS, DIM, dtype=torch.bool), 100)},
    "lethe": {"eviction": Rounds(Lethe(evict_at=150))},
    "h2o": {"eviction": HeavyHitters(60)},
}


@pytest.mark.parametrize("choice", STEPS)
def test_a_step_takes_few_operators_whatever_the_batch(choice):
    few, many = (operators(Plain().attend, Middle(**STEPS[choice]), batch, 64) for batch in (2, 8))
    assert many <= 70
    assert many <= 1.2 * few


def test_rows_whose_windows_are_full_at_different_steps_take_few_operators_too():
    few, many = (
        operators(Plain().attend, Middle(**STEPS["h2o"]), batch, 32, torch.arange(batch) % 31 + 1) for batch in (31, 62)
    )
    assert many <= 400
    assert many <= 1.2 * few


@pytest.mark.parametrize("bits", [None, CHOICES["pca"]["bits"], Packing(8, 8)], ids=["none", "records", "packed"])
def test_who_reads_every_token_by_labels_reads_as_who_has_none(bits):
    """Whatever keys are stored as, and whether labels stand first there."""
    generator = torch.Generator().manual_seed(0)
    k, v = (random_like(generator, 2, HEADS, 60, DIM) for _ in range(2))
    label = torch.rand(HEADS, DIM, generator=generator) < 0.5
    q = random_like(generator, 2, HEADS * GROUP, 1, DIM)
    found = []
    for reads in (None, Labels(label, 100)):
        store = Store(k, v, None, Middle(bits=bits, reads=reads), Sizes(2, 5, 8))
        position = store.append(*(random_like(torch.Generator().manual_seed(1), 2, HEADS, 1, DIM) for _ in range(2)))
        found += [attend(store, q, position, 0.3) for attend in (naive.attend, batched.attend)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def by_rows(q, k, v, scaling, real, softmax=PLAIN):
    """[B, Q, Hq, D] of the last queries; zero where one is padding."""
    seen = causal(q.shape[2], k.shape[2], real)
    return attention(q, k, v, scaling, seen, *softmax).transpose(1, 2)


@settings(max_examples=30, derandomize=True)
@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    holes=st.booleans(),
    group=st.integers(1, 3),
    softcap=st.sampled_from([None, 0.5, 3.0]),
    sinks=st.booleans(),
    block=st.integers(1, 200),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_padded_rows_are_those_of_the_whole_matrix(starts, holes, group, softcap, sinks, block, seed, data):
    length = 12
    new = data.draw(st.integers(1, length))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(starts), 2 * group, new, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, len(starts), 2, length, 8, generator=generator, dtype=torch.float64)
    real = torch.arange(length) >= torch.tensor(starts)[:, None]
    if holes:
        real &= torch.rand(real.shape, generator=generator) < 0.7
    k[~real[:, None].expand(-1, 2, -1)] = torch.nan  # never read
    softmax = Softmax(softcap, torch.randn(2 * group, generator=generator, dtype=torch.float64) if sinks else None)
    want = by_rows(q, k, v, 0.4, real, softmax)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leank.eval.cache.attention.softmax.SCORES_AT_ONCE", {"cpu": block})
        torch.testing.assert_close(dense.attend(q, k, v, 0.4, real, softmax), want)


@pytest.mark.parametrize("softmax", [PLAIN, Softmax(2.0), Softmax(None, torch.randn(4).double())])
@pytest.mark.parametrize("added", [False, True])
def test_a_mask_of_any_shape(softmax, added):
    """bool, or numbers that are added; a query that sees nothing gives zero, and a gradient that is finite."""
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    seen = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[1, 0, 2] = False
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf) if added else seen
    out = written_out(q, k, v, 0.4, softmax, mask)
    torch.testing.assert_close(out, attention(q, k, v, 0.4, seen, *softmax))
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "length"), [(300, 300), (40, 300), (1, 300)])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_beside_the_flash_kernel(new, length, padded, monkeypatch):
    monkeypatch.setattr(dense, "written_out", None)  # the flash kernel's log-sum-exp is enough
    q, k, v = (
        torch.randn(2, h, n, 64, dtype=torch.bfloat16, device="cuda") for h, n in ((8, new), (2, length), (2, length))
    )
    real = torch.arange(length, device="cuda") >= torch.tensor([0, 90 if padded else 0], device="cuda")[:, None]
    softmax = Softmax(None, torch.randn(8, device="cuda"))
    out = dense.attend(q, k, v, None, real, softmax)
    mask = torch.ones(new, length, dtype=torch.bool, device="cuda").tril(length - new) & real[:, None, None]
    want = written_out(*(x.double() for x in (q, k, v)), None, softmax, mask).transpose(1, 2)
    want[~real[:, length - new :]] = 0
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("length", [1, 5, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_the_latest_query(length, dtype, padded):
    q = torch.randn(3, 6, 1, 16, dtype=dtype)
    k, v = torch.randn(2, 3, 2, length, 16, dtype=dtype)
    real = torch.arange(length) >= torch.tensor([0, length // 2, length])[:, None]  # the last row: only padding
    out = dense.latest(q, k, v, 0.3, real if padded else None)
    real[:, -1] = True
    want = by_rows(*(x.double() for x in (q, k, v)), 0.3, real if padded else torch.ones_like(real))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.transpose(1, 2).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", range(1, 18))
def test_a_mask_needs_no_copy(length):
    """SDPA's memory-efficient kernel copies a mask whose strides are not multiples of 8."""
    bias = dense._bias(torch.ones(3, length, dtype=torch.bool), torch.bfloat16)
    assert bias.shape == (3, 1, 1, length)
    assert all(stride % dense.ALIGNED == 0 for stride in bias.stride()[:-1])
    assert bias.stride(-1) == 1


@pytest.mark.parametrize(("new", "length"), [(9, 9), (4, 9), (1, 9)])
def test_only_long_calls_may_plan(monkeypatch, new, length):
    asked = []

    def record(*args, **kwargs):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return inner(*args, **kwargs)

    inner = dense.scaled_dot_product_attention
    monkeypatch.setattr(dense, "scaled_dot_product_attention", record)
    q, (k, v) = torch.randn(2, 4, new, 8), torch.randn(2, 2, 2, length, 8)
    before, work = torch.backends.cuda.cudnn_sdp_enabled(), 2 * 2 * 4 * 8 * new * (2 * length - new)
    for limit in (work + 1, work):
        monkeypatch.setattr(kernels, "CUDNN_FROM", limit * dense.CALLS_PER_PLAN)
        dense.attend(q, k, v)
    assert asked == [False, before and new > 1]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_left_padded_rows_are_not_gathered(monkeypatch):
    """Neighbours of equal padding share a call, on views of K and V."""
    seen = []
    inner = dense._causal
    monkeypatch.setattr(dense, "_causal", lambda q, k, v, *rest: seen.append((q, k, v)) or inner(q, k, v, *rest))
    q, (k, v) = torch.randn(4, 4, 6, 8), torch.randn(2, 4, 2, 6, 8)
    real = torch.arange(6) >= torch.tensor([0, 2, 2, 6])[:, None]
    out = dense.attend(q, k, v, None, real)
    assert [len(call[0]) for call in seen] == [1, 2]
    whole = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert {x.untyped_storage().data_ptr() for call in seen for x in call} == whole
    assert not out[3].any()
