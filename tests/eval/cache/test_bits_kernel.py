"""The decode kernel over a packed middle against its float64 reference: in Triton's interpreter on a CPU, on the device
with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, check_decoding, error, make_store

from leank.eval.cache.attention.kernels import packed  # isort: skip
from leank.eval.cache.attention.launch import FEW, Config, Kernel, kernels_of  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes


@pytest.fixture
def poisoned_cells(monkeypatch):
    """New uint8 tensors are filled with ones, which as scale and zero point are NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries", "tile", "packing"),
    [
        ([0, 32], 64, 2, 1, 64, Packing(2, 32)),
        ([17, 64], 64, 4, 3, 64, Packing(8, 32)),
        ([77, 96, 0], 128, 4, 1, 128, Packing(2, 64)),
        ([128, 2], 128, 7, 1, 64, Packing(4, 32)),
        ([33, 127], 128, 8, 5, 64, Packing(2, 32)),  # two chunks of query tokens
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted(counts, dim, group, queries, tile, packing):
    sizes, config = Sizes(10, 64, packing.group), Config(tile)
    store = check_decoding(
        counts, dim, group, [301, 170], sizes, torch.float16, queries, 2, config, programs=5, bits=packing
    )
    assert store.prompt.length.max() == 227  # an odd number: half a word of scales


@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=3),
    st.integers(1, 8),
    st.lists(st.integers(1, 200), min_size=1, max_size=2),
    st.tuples(st.integers(0, 70), st.integers(1, 80)),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([32, 64]),
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_on_random_shapes(counts, group, lengths, ends, bits, cell, queries, programs, seed):
    sizes = Sizes(*ends, cell)
    lengths = [max(n, sizes.sink) for n in lengths]  # shorter rows are written by Store.append, as on a CPU
    packing = Packing(bits, cell)
    check_decoding(counts, 64, group, lengths, sizes, torch.float16, queries, 2, Config(), programs, seed, bits=packing)


@pytest.mark.skipif(ON_GPU, reason="bfloat16 has that unit on the device below")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_and_results_are_divided_by_the_unit(monkeypatch):
    monkeypatch.setattr(packed, "unit_of", lambda dtype, ptx: 2.0**-64)
    sizes = Sizes(10, 64, 32)
    check_decoding([17, 64], 64, 2, [170, 90], sizes, torch.float32, 1, 2, Config(), 3, bits=Packing(8, 32))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_program_of_few_pages_asks_for_fewer_of_them_ahead(bits):
    store = make_store([40, 0, 9], 64, [90], Sizes(4, 16, 32), torch.float16, bits=Packing(bits, 32))
    assert Kernel(programs=1).prepare(store).few
    store = make_store([64], 64, [64 * FEW + 90], Sizes(4, 16, 32), torch.float16, bits=Packing(bits, 32))
    assert not Kernel(programs=1).prepare(store).few
    codec = kernels_of(store)
    assert Kernel()._config(codec, 16, few=True).stages < Kernel()._config(codec, 16, few=False).stages
    assert Kernel(Config(stages=4))._config(codec, 16, few=True).stages == 4  # what was asked for


@pytest.mark.parametrize("scaling", [0.0, -0.1])
def test_a_scaling_that_is_not_positive_is_refused(scaling):
    """The loop takes the maximum before it scales."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    store = make_store([40, 0], 64, [90], Sizes(4, 16, 32), dtype, bits=Packing(4, 32))
    position = store.append(*torch.randn(2, 1, 2, 1, 64).to(DEVICE, dtype))
    with pytest.raises(ValueError, match=r"scaling=.* must be positive"):
        Kernel(programs=4).attend(store, torch.randn(1, 2, 1, 64).to(DEVICE, dtype), position, scaling)


@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tokens_that_left_the_window_are_read_from_half_filled_pages():
    """Groups of 32 join one after the other: a page of 64 tokens is half full at times."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    store = make_store([40, 0], 64, [40, 90], Sizes(4, 16, 32), dtype, bits=Packing(2, 32))
    kernel, lengths = Kernel(programs=4), set()
    for _ in range(3):
        k, v = torch.randn(2, 2, 2, 32, 64).to(DEVICE, dtype)
        position = store.append(k, v, write=kernel.write)
        store.flush()
        assert error(kernel, store, torch.randn(2, 6, 1, 64).to(DEVICE, dtype), position[:, -1:]) < 5e-3
        lengths.add(int(store.tail.length[0, 0]) % 64)
    assert lengths == {0, 32}


def check_moves(counts, dim, lengths, sizes, dtype, packing, appends, seed):
    """Append and move, again and again: the kernel packs the numbers that plain PyTorch packs, bit for bit."""
    stores, kernel = [make_store(counts, dim, lengths, sizes, dtype, seed, packing) for _ in range(2)], Kernel()
    generator, moves = torch.Generator().manual_seed(seed), 0
    for new in appends:
        k, v = torch.randn(2, len(lengths), len(counts), new, dim, generator=generator).to(DEVICE, dtype)
        v[..., : dim // 2] = v[..., :1]  # cells of equal numbers
        for store in stores:
            store.append(k, v)
        before = stores[0].start.copy()
        stores[0].flush()
        stores[1].flush(kernel.move)
        moves += int((stores[0].start > before).any())
        plain, packed = (store.tail for store in stores)
        assert packed.length.tolist() == packed.length_dev.tolist() == plain.length.tolist()
        assert stores[1].start_dev.tolist() == stores[1].start.tolist() == stores[0].start.tolist()
        assert not kernel._done.any()
        for row in range(len(lengths)):
            for head in range(len(counts)):
                for got, want in zip(packed.read(row, head), plain.read(row, head), strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return moves


@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("packing", [Packing(b, g) for b in (2, 4, 8) for g in (32, 64)], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("counts", "dim"), [([0, 5, 64], 64), ([77, 128], 128)])  # lines in part, and several times
def test_tokens_that_leave_the_window_are_packed_as_in_plain_pytorch(counts, dim, packing, dtype):
    sizes = Sizes(3, 20, packing.group)
    assert check_moves(counts, dim, [90, 40], sizes, dtype, packing, [packing.group, 70, 3, 70], 0) > 2


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packing", [Packing(b, g) for b in (2, 4, 8) for g in (32, 64)], ids=str)
@pytest.mark.parametrize(("counts", "dim"), [([0, 32, 64, 96], 128), ([77, 128, 1], 128), ([0, 17, 64], 64)])
def test_moves_on_the_device(counts, dim, packing, dtype):
    lengths, appends = [3000, 1700, 700], [31, 1, 64, 40, 500, 33]
    assert check_moves(counts, dim, lengths, Sizes(128, 256, 64), dtype, packing, appends, 0) > 2


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_cells")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packing", [Packing(2, 32), Packing(4, 32), Packing(2, 64), Packing(8, 64)], ids=str)
@pytest.mark.parametrize("config", [Config(), Config(tile=128, stages=2)], ids=str)
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries"),
    [
        ([0, 32, 64, 96], 128, 4, 1),
        ([77, 128, 16, 48, 5], 128, 1, 1),
        ([0, 17, 64], 64, 8, 1),
        ([96, 33], 128, 8, 40),  # several chunks of query tokens
    ],
)
def test_on_the_device(counts, dim, group, queries, config, packing, dtype):
    sizes = Sizes(128, 256, 64)
    check_decoding(counts, dim, group, [3001, 1700, 700], sizes, dtype, queries, 3, config, 0, bits=packing)
