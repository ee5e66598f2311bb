"""Tokens that leave the window: the kernel against plain PyTorch, in Triton's interpreter on a CPU, on the device with
`-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, check_moves, poisoned_memory  # noqa: F401

from leank.eval.cache.attention.launch import Kernel  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=3),
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 40)),
    st.lists(st.integers(1, 70), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_on_random_shapes(counts, lengths, sizes, appends, per_row, seed):
    check_moves(counts, 64, lengths, Sizes(*sizes), torch.float16, appends, seed, per_row=per_row)


def test_a_tail_that_grows_several_times():
    """Rows of unequal length move at different steps; a head without channels and one that takes no tokens."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    joins = torch.tensor([True, True, False, True])
    moves, store = check_moves(
        [40, 0, 17, 128], 128, [300, 170, 9], Sizes(4, 60, 24), dtype, [13] * 40, 1, joins, per_row=True
    )
    assert moves > 20
    assert store.version > 2
    assert store.tail.length[:, 0].min() > 400
    assert not store.tail.length[:, 1:3].any()


def test_a_step_that_brings_nothing_due_touches_no_store(monkeypatch):
    """advance() moves exactly when decoding step by step would, and asks nothing of a store in between."""
    from leank.eval.cache.attention.batched import Plain
    from leank.eval.cache.layer import CompressedLayer
    from leank.eval.cache.storage.store import Store

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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_layer_decodes_with_the_kernel_what_it_does_without(monkeypatch):
    """Through CompressedLayer, whose backend moves by the kernel once a first query has chosen it."""
    from leank.eval.cache.attention.backend import choose_backend
    from leank.eval.cache.layer import CompressedLayer

    dtype, launches, move = torch.bfloat16 if ON_GPU else torch.float16, [], Kernel.move
    monkeypatch.setattr(Kernel, "move", lambda self, store, due: (launches.append(due.max()), move(self, store, due)))
    keep = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)) < 0.4
    layers = [
        CompressedLayer(Middle(keep), Sizes(4, 20, 8), backend)
        for backend in (choose_backend("triton", programs=4), choose_backend("torch"))
    ]
    k, v = torch.randn(2, 2, 2, 90, 64).to(DEVICE, dtype)
    for layer in layers:
        layer.seal(k, v)
    for _ in range(20):
        k, v, q = torch.randn(3, 2, 4, 1, 64).to(DEVICE, dtype)
        got, want = (layer.update(k[:, :2], v[:, :2]) and layer.attend(q) for layer in layers)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert launches == [8, 8]
    assert layers[0].store.tail.length.tolist() == [[16, 16]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("counts", "dim"), [([0, 32, 64, 96], 128), ([77, 128, 1], 128), ([0, 17, 64], 64)])
def test_on_the_device(counts, dim, per_row):
    appends, dtype = [31, 1, 1, 40, 500, 33], torch.bfloat16
    moves, _ = check_moves(counts, dim, [3000, 1700, 700], Sizes(128, 256, 32), dtype, appends, 0, per_row=per_row)
    assert moves == 4
