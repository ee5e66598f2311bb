"""Tokens that leave the window, and whole layers past such moves: the kernels against plain PyTorch, in Triton's
interpreter on a CPU, on the device with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, check_moves, poisoned_memory  # noqa: F401

from leank.eval.cache.attention.backend import choose_backend  # isort: skip  (Triton, which the line above asks for)
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
STEPS, PROGRAMS = (1000, {}) if ON_GPU else (32, {"programs": 2})  # the interpreter is slow
PACKINGS = [Packing(b, g) for b in (2, 4, 8) for g in (32, 64)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(ON_GPU, reason="the same on the device below")


@interpreted
@settings(max_examples=16, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 40)),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 99),
)
def test_interpreted_on_random_shapes(channels, pruned, lengths, sizes, appends, per_row, seed):
    """V whole and pruned."""
    counts, widths = zip(*channels, strict=True)
    widths = widths if pruned else None
    check_moves(counts, 64, lengths, Sizes(*sizes), DTYPE, appends, seed, per_row=per_row, widths=widths)


@interpreted
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize(("counts", "dim", "dtype"), [([0, 5, 64], 64, torch.float16), ([77, 128], 128, torch.float32)])
def test_tokens_are_packed_as_in_plain_pytorch(counts, dim, dtype, packing):
    """Lines in part, and several times."""
    sizes, appends = Sizes(3, 20, packing.group), [packing.group, 70, 3, 70]
    assert check_moves(counts, dim, [90, 40], sizes, dtype, appends, 0, bits=packing)[0] > 2


def test_a_tail_that_grows_several_times():
    """Rows of unequal length move at different steps; a head without channels and one that takes no tokens."""
    joins, sizes = torch.tensor([True, True, False, True]), Sizes(4, 60, 24)
    moves, store = check_moves([40, 0, 17, 64], 64, [300, 170, 9], sizes, DTYPE, [26] * 16, 1, joins, per_row=True)
    assert moves > 12
    assert store.version > 2
    assert store.tail.length[:, 0].min() > 300
    assert not store.tail.length[:, 1:3].any()


def test_a_step_that_brings_nothing_due_touches_no_store(monkeypatch):
    """advance() moves exactly when decoding step by step would, and asks nothing of a store in between."""
    layer = CompressedLayer(Middle(torch.ones(2, 64).bool()), Sizes(4, 20, 8), Plain())
    k, v = torch.randn(2, 2, 2, 50, 64)
    layer.seal(k, v)
    calls, flush = [], Store.flush
    monkeypatch.setattr(Store, "flush", lambda self, *move: (calls.append(len(lengths)), flush(self, *move)))
    lengths = []
    for _ in range(40):
        layer.store.write(*torch.randn(2, 2, 2, 1, 64))  # what a replayed step does, seen by the device alone
        layer.advance(1)
        lengths.append(int(layer.store.tail.length.max()))
    assert lengths == [n // 8 * 8 for n in range(1, 41)]
    assert calls == [0, 7, 15, 23, 31, 39]
    assert layer.store.seen_dev.tolist() == layer.store.seen.tolist() == [90, 90]
    assert layer.get_seq_length() == 90


def near(got, want, step):
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=lambda said: f"step {step}: {said}")


def decode(layers, steps, generator, heads, group, dim):
    """Decode in two layers, one by the kernel and one in plain PyTorch; each step's outputs are compared."""
    rows = layers[0].store.ring_k.shape[0]
    for step in range(steps):
        new = torch.randn(rows, heads * group + 2 * heads, 1, dim, generator=generator).to(DEVICE, DTYPE)
        q, k, v = new.split([heads * group, heads, heads], 1)
        near(*(layer.update(k, v) and layer.attend(q) for layer in layers), step)


def pair(middle, sizes):
    """Two layers alike, by the kernel and in plain PyTorch."""
    return [CompressedLayer(middle, sizes, c) for c in (choose_backend("triton", **PROGRAMS), choose_backend("torch"))]


@pytest.mark.parametrize("pruned", [False, True])
def test_many_steps_with_padding_and_flushes(pruned):
    """Rows of unequal length, each with channels of its own: all that leaves the window goes through the kernels."""
    generator = torch.Generator().manual_seed(0)
    keep, values = (torch.rand(2, 1, 64, generator=generator) < share for share in (0.6, 0.4))
    layers = pair(Middle(keep, values if pruned else None), Sizes(4, 20, 8))
    k, v = torch.randn(2, 2, 1, 90, 64, generator=generator).to(DEVICE, DTYPE)
    real = (torch.arange(90) >= torch.tensor([0, 37])[:, None]).to(DEVICE)
    for layer in layers:
        layer.seal(k, v, real)
    decode(layers, STEPS, generator, 1, 2, 64)
    assert layers[0].backend.captures
    assert layers[0].store.tail.length.tolist() == [[STEPS // 8 * 8]] * 2
    for name, kept in layers[1].store.tail.tensors().items():
        if name in ("k", "v", "length"):
            held = layers[0].store.tail.tensors()[name]
            torch.testing.assert_close(held, kept, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "dim", "form"),
    [
        *((*case, {"per_row": per_row}) for per_row in (False, True)
          for case in (([0, 32, 64, 96], 128), ([77, 128, 1], 128), ([0, 17, 64], 64))),
        *((*case, {"widths": w}) for *case, w in (
            ([32, 96], 128, [77, 128]), ([77, 1], 128, [0, 19]), ([9], 64, [64]))),
    ],
    ids=str,
)  # fmt: skip
def test_on_the_device(counts, dim, form):
    appends = [31, 1, 1, 40, 500, 33]
    moves, _ = check_moves(counts, dim, [3000, 1700, 700], Sizes(128, 256, 32), DTYPE, appends, 0, **form)
    assert moves == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize(("counts", "dim"), [([0, 32, 64, 96], 128), ([77, 128, 1], 128), ([0, 17, 64], 64)])
def test_packing_on_the_device(counts, dim, packing, dtype):
    lengths, appends = [3000, 1700, 700], [31, 1, 64, 40, 500, 33]
    assert check_moves(counts, dim, lengths, Sizes(128, 256, 64), dtype, appends, 0, bits=packing)[0] > 2
