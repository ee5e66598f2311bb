"""Middles whose V is pruned, by the kernels: in Triton's interpreter on a CPU, on the device with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import (  # noqa: F401
    DEVICE,
    ON_GPU,
    check_decoding,
    check_moves,
    error,
    make_store,
    poison,
    poisoned_memory,
)

from leank.eval.cache.attention import work  # isort: skip  (needs Triton, which the lines above ask for)
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.attention.launch import Config, Kernel
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Addresses

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
STEPS, PROGRAMS = (1000, {}) if ON_GPU else (48, {"programs": 2})  # the interpreter is slow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize(
    ("counts", "widths", "dim", "group", "queries", "tile"),
    [
        ([77, 128, 33], [77, 90, 128], 128, 4, 1, 64),  # 77 = ThinK's 0.4; a head that keeps all of V
        ([17, 0, 64], [1, 64, 0], 64, 2, 3, 128),  # a head that keeps none of V, one without a middle
        ([40, 64], [16, 3], 64, 4, 18, 64),  # several chunks of query tokens
    ],
)
def test_interpreted(counts, widths, dim, group, queries, tile):
    sizes, config = Sizes(10, 70, 8), Config(tile)
    check_decoding(counts, dim, group, [300, 170], sizes, DTYPE, queries, 2, config, programs=5, widths=widths)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.lists(st.integers(1, 260), min_size=1, max_size=2),
    st.tuples(st.integers(0, 70), st.integers(0, 80), st.integers(1, 40)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_interpreted_on_random_shapes(channels, group, lengths, sizes, queries, programs, per_row, seed):
    (counts, widths), lengths = zip(*channels, strict=True), [max(n, sizes[0]) for n in lengths]
    pruned = {"widths": widths, "per_row": per_row}
    check_decoding(counts, 64, group, lengths, Sizes(*sizes), DTYPE, queries, 2, Config(), programs, seed, **pruned)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=3),
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 40)),
    st.lists(st.integers(1, 70), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 99),
)
def test_tokens_that_leave_the_window(channels, lengths, sizes, appends, per_row, seed):
    counts, widths = zip(*channels, strict=True)
    check_moves(counts, 64, lengths, Sizes(*sizes), DTYPE, appends, seed, per_row=per_row, widths=widths)


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


def test_many_steps_with_padding_and_flushes():
    """Rows of unequal length, each with channels of its own: all that leaves the window goes through the kernels."""
    generator = torch.Generator().manual_seed(0)
    keep, values = (torch.rand(2, 1, 64, generator=generator) < share for share in (0.6, 0.4))
    layers = pair(Middle(keep, values), Sizes(4, 20, 8))
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


def test_the_work_of_a_head_is_the_bytes_of_its_keys_and_values():
    """Two heads alike but for V: the one that keeps twice as many bytes in all gets twice as many spans."""
    store = make_store([32, 32], 64, [12000], Sizes(0, 0, 8), DTYPE, widths=[0, 32])
    parts = work.parts(store)
    middles = parts[parts[:, work.Part.KIND] == work.PROMPT]
    assert middles[:, [work.Part.CHANNELS, work.Part.WIDTH]].tolist() == [[32, 0], [32, 32]]
    table = work.cut(middles, 30, 64, per_tile=0)  # bytes alone
    heads, numbers = table[:, work.Column.HEAD], table[:, work.Column.NUMBER]
    spans = [len(set(numbers[heads == head].tolist())) for head in (0, 1)]
    assert spans[1] / spans[0] == pytest.approx(2, abs=0.3)


def test_places_of_kept_channels():
    keep = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    table = KeptChannels.of(keep, torch.zeros(2, 3, 1, 4))
    assert table.ranks()[1].tolist() == [[-1, 0, -1, 1], [-1] * 4, [0, 1, 2, 3]]
    assert table.ranks() is table.ranks()
    other = table.select(torch.tensor([1]))
    assert torch.equal(other.ranks(), table.ranks()[:1])
    of_rows = KeptChannels.of(torch.stack([keep, ~keep]), torch.zeros(2, 3, 1, 4))
    assert of_rows.ranks()[1].tolist() == [[0, -1, 1, -1], [0, 1, 2, 3], [-1] * 4]


def test_a_captured_step_finds_the_next_prompts_channels_where_it_reads_them():
    first, other = (make_store([20], 64, [200], Sizes(4, 20, 8), DTYPE, seed, widths=[30]) for seed in (0, 1))
    here, read = Addresses.of(first), first.values.ranks()
    want = other.values.ranks().clone()
    assert not torch.equal(read, want)
    here.take(other)
    assert other.values.ranks() is read
    assert torch.equal(read, want)
    assert Addresses.of(other).key() == here.key()
    wider = make_store([20], 64, [200], Sizes(4, 20, 8), DTYPE, widths=[40])  # a step is compiled for its widths
    assert Addresses.of(wider).key()[-2] != here.key()[-2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [Config(), Config(tile=128, stages=2)], ids=["tiles_of_64", "tiles_of_128"])
@pytest.mark.parametrize(
    ("counts", "widths", "dim", "group", "queries"),
    [
        ([77, 77, 77, 77], [77, 77, 77, 77], 128, 4, 1),
        ([32, 64, 96, 128], [128, 0, 17, 96], 128, 7, 1),
        ([64, 64], [64, 64], 128, 8, 1),
        ([0, 17, 64], [5, 33, 16], 64, 8, 1),
        ([96, 33], [90, 51], 128, 8, 40),
    ],
)
def test_on_the_device(counts, widths, dim, group, queries, config, dtype):
    lengths, sizes = [3000, 1700, 700], Sizes(128, 256, 32)
    check_decoding(counts, dim, group, lengths, sizes, dtype, queries, 3, config, 0, widths=widths, per_row=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "widths", "dim"), [([32, 96], [77, 128], 128), ([77, 1], [0, 19], 128), ([9], [64], 64)]
)
def test_moves_on_the_device(counts, widths, dim):
    appends = [31, 1, 1, 40, 500, 33]
    moves, _ = check_moves(counts, dim, [3000, 1700, 700], Sizes(128, 256, 32), DTYPE, appends, 0, widths=widths)
    assert moves == 4


@pytest.mark.gpu
def test_a_captured_step_on_the_device():
    """A thousand replays of one step, past some thirty moves, give what plain PyTorch gives."""
    generator = torch.Generator().manual_seed(0)
    keep, values = (torch.rand(4, 128, generator=generator) < share for share in (0.6, 0.5))
    layers = pair(Middle(keep, values), Sizes(16, 128, 32))
    k, v = torch.randn(2, 2, 4, 700, 128, generator=generator).to(DEVICE, DTYPE)
    for layer in layers:
        layer.seal(k, v)
    decode(layers, 3, generator, 4, 4, 128)
    static = torch.randn(2, 24, 1, 128, generator=generator).to(DEVICE, DTYPE)

    def step(layer):
        q, k, v = static.split([16, 4, 4], 1)
        layer.update(k, v)
        return layer.attend(q)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step(layers[0])
    for number in range(1000):
        static.copy_(torch.randn(2, 24, 1, 128, generator=generator))
        graph.replay()
        layers[0].advance(1)
        near(out, step(layers[1]), number)
    assert layers[0].store.tail.length.min() > 900


def test_padding_among_the_queries():
    """A second turn whose rows have 5, 2 and no new tokens."""
    store, kernel = make_store([40, 0], 64, [200, 90, 150], Sizes(10, 70, 8), DTYPE, widths=[23, 9]), Kernel(programs=4)
    real = (torch.arange(5) >= torch.tensor([0, 3, 5])[:, None]).to(DEVICE)
    k, v = torch.randn(2, 3, 2, 5, 64).to(DEVICE, DTYPE)
    position = store.append(k, v, real, kernel.write)
    poison(store)
    q = torch.randn(3, 6, 5, 64).to(DEVICE, DTYPE)
    assert error(kernel, store, q, position) < 5e-3
    assert not kernel.attend(store, q, position, 0.2)[~real].any()
