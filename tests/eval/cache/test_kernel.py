"""The decode kernel against its float64 reference: in Triton's interpreter on a CPU, on the device with `-m gpu`."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU, check_decoding, error, make_store, poison

from leank.eval.cache.attention import work  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache.attention.launch import Config, Kernel
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries", "tile"),
    [
        ([0, 32], 64, 2, 1, 64),
        ([17, 64], 64, 4, 3, 64),
        ([77, 96, 0], 128, 4, 1, 128),
        ([128, 2], 128, 7, 1, 64),
        ([33, 127], 128, 8, 18, 64),  # five chunks of query tokens, in two launches
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted(counts, dim, group, queries, tile):
    check_decoding(
        counts, dim, group, [300, 170], Sizes(10, 70, 8), torch.float16, queries, 2, Config(tile), programs=5
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("merge", [16, 64])
def test_more_partial_results_than_a_merge_reads_in_a_round(merge):
    dtype, config, rows = torch.bfloat16 if ON_GPU else torch.float16, Config(merge=merge), 16
    store, kernel = make_store([64], 64, [900], Sizes(10, 70, 8), dtype), Kernel(config, programs=14)
    k, v = torch.randn(2, 1, 1, 2, 64).to(DEVICE, dtype)
    position = store.append(k, v, write=kernel.write)
    assert error(kernel, store, torch.randn(1, 8, 2, 64).to(DEVICE, dtype), position) < 5e-3
    assert store.plan.table[:, work.Column.PARTIALS].max() > 2 * (64 // rows)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=3),
    st.integers(1, 8),
    st.lists(st.integers(1, 260), min_size=1, max_size=2),
    st.tuples(st.integers(0, 70), st.integers(0, 80), st.integers(1, 40)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_on_random_shapes(counts, group, lengths, sizes, queries, programs, seed):
    lengths = [max(n, sizes[0]) for n in lengths]  # shorter rows are written by Store.append, as on a CPU
    check_decoding(counts, 64, group, lengths, Sizes(*sizes), torch.float16, queries, 2, Config(64), programs, seed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_among_the_queries():
    """A second turn whose rows have 5, 2 and no new tokens: padding gets zeros and is not stored."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    store, kernel = make_store([40, 0], 64, [200, 90, 150], Sizes(10, 70, 8), dtype), Kernel(programs=4)
    real = (torch.arange(5) >= torch.tensor([0, 3, 5])[:, None]).to(DEVICE)
    k, v = torch.randn(2, 3, 2, 5, 64).to(DEVICE, dtype)
    q = torch.randn(3, 6, 5, 64).to(DEVICE, dtype)
    position = store.append(k, v, real, kernel.write)
    assert position.tolist() == [[200, 201, 202, 203, 204], [-1, -1, -1, 90, 91], [-1] * 5]
    assert error(kernel, store, q, position) < 5e-3
    assert not kernel.attend(store, q, position, 0.2)[~real].any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 128), st.integers(0, 128)), min_size=1, max_size=12
    ),  # tokens, channels of K and of V of each unit
    st.integers(1, 40),
    st.sampled_from([64, 128]),
    st.integers(1, 4),
    st.sampled_from([0, work.TILE_BYTES]),
    st.sampled_from([0, work.PIECE_BYTES, 2**17]),
)
def test_spans_cover_every_token_once_and_are_even(parts, programs, tile, per_head, per_tile, piece):
    """Walking every program's span reads each unit's tokens once, in partial results that are numbered without gaps."""
    unit = [(2, i // per_head, 0, tokens, 0, i, *channels) for i, (tokens, *channels) in enumerate(parts)]
    units = np.array(unit, dtype=np.int64)  # V's start names the unit
    table = work.cut(units, programs, tile, per_tile=per_tile, piece=piece)
    assert len(table) <= programs + len(unit)
    read = {i: [] for i in range(len(unit))}
    partials, cost = {}, []
    for program in range(programs):
        line, spent, open_result = program, 0, None
        while line >= 0:
            _, row, _, first, last, _, name, *values = table[line].tolist()
            count, fresh, ends, number, first_number, line, width = values
            if last > first:
                read[name].append((first, last))
                spent += (-(-(last - first) // tile)) * ((count + width) * tile * 2 + per_tile) + piece
                assert fresh == (open_result is None)
                open_result = number
                if ends:
                    partials.setdefault(row, []).append((number, first_number, ends))
                    open_result = None
        assert open_result is None
        cost.append(spent)
    for i, (tokens, *_) in enumerate(parts):
        spans = sorted(read[i])
        assert spans[0][0] == 0
        assert spans[-1][1] == tokens
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for results in partials.values():
        numbers = sorted(n for n, _, _ in results)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all(first == numbers[0] and count == len(numbers) for _, first, count in results)
    largest_step = 256 * tile * 2 + per_tile + 2 * piece
    assert max(cost) <= sum(cost) / programs + 2 * largest_step + piece * len(unit)


def test_columns_of_the_work_table_lie_where_they_always_lay():
    """Two programs over a sink and a middle of one head: every number of the table, by name and by place."""
    units = [(work.SINK, 0, 0, 64, 0, 1000, 128, 128), (work.PROMPT, 0, 0, 640, 2000, 3000, 32, 128)]
    table = work.cut(np.array(units, dtype=np.int64), 2, 64)
    assert table.shape == (3, work.FIELDS) == (3, 14)
    assert [column.value for column in work.Column] == list(range(14))
    assert table.tolist() == [
        [work.SINK, 0, 0, 0, 64, 0, 1000, 128, 1, 0, 0, 0, 2, 128],
        [work.PROMPT, 0, 0, 256, 640, 2000, 3000, 32, 1, 2, 1, 0, -1, 128],
        [work.PROMPT, 0, 0, 0, 256, 2000, 3000, 32, 0, 2, 0, 0, -1, 128],
    ]
    assert table[:, work.Column.NEXT].tolist() == [2, -1, -1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_heads_with_tokens_of_their_own():
    """Rows and heads that keep all, some and none of the prompt's tokens, and a head that takes no new ones."""
    dtype, generator = torch.bfloat16 if ON_GPU else torch.float16, torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 2, 4, 300, 64, generator=generator).to(DEVICE, dtype)
    share = torch.tensor([[1.0, 0.3, 0.0, 0.6], [0.1, 1.0, 0.5, 0.0]])
    tokens = torch.rand(2, 4, 300, generator=generator) < share[..., None]
    keep = torch.arange(64) < torch.tensor([64, 17, 32, 0])[:, None]
    middle = Middle(keep, joins=torch.tensor([True, False, True, True]))
    store, kernel = Store(k, v, None, middle, Sizes(10, 70, 8), tokens), Kernel(programs=5)
    for _ in range(10):
        k, v = torch.randn(2, 2, 4, 1, 64, generator=generator).to(DEVICE, dtype)
        position = store.append(k, v, write=kernel.write)
        store.flush()
    poison(store)
    q = torch.randn(2, 8, 1, 64, generator=generator).to(DEVICE, dtype)
    assert store.prompt.length[0].tolist()[2:] == [0, 0]
    assert store.tail.length.tolist() == [[8, 0, 8, 0]] * 2
    assert error(kernel, store, q, position) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [Config(), Config(tile=128, stages=2), Config(registers=168)], ids=str)
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries"),
    [
        ([0, 32, 64, 96], 128, 4, 1),
        ([0, 32, 64, 96], 128, 7, 1),
        ([77, 128, 16, 48, 5], 128, 1, 1),
        ([0, 17, 64], 64, 8, 1),
        ([32, 0, 80], 128, 4, 5),
        ([96, 33], 128, 8, 40),  # several chunks of query tokens
    ],
)
def test_on_the_device(counts, dim, group, queries, config, dtype):
    check_decoding(counts, dim, group, [3000, 1700, 700], Sizes(128, 256, 32), dtype, queries, 3, config, 0)


@pytest.mark.gpu
def test_launches_that_start_early_change_no_bit():
    """Launches follow each other in a graph and share their scratch memory."""
    sizes, generator = Sizes(16, 200, 32), torch.Generator().manual_seed(0)
    stores = [make_store([32, 0, 64], 64, [3000 + 500 * i], sizes, torch.bfloat16, seed=i) for i in range(4)]
    q = torch.randn(1, 12, 1, 64, generator=generator).to(DEVICE, torch.bfloat16)
    positions = [(store.seen_dev - 1)[:, None].clone() for store in stores]
    found = []
    for early in (False, True):
        kernel, graph = Kernel(Config(pdl=early)), torch.cuda.CUDAGraph()

        def step(kernel=kernel):
            return [kernel.attend(store, q, at, 0.1) for store, at in zip(stores * 6, positions * 6, strict=True)]

        for store in stores:
            store.plan = None
        step()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        found.append(torch.stack(got))
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_captured_step_can_be_replayed_past_moves_out_of_the_window():
    """Replaying one captured step and accounting for it gives what uncaptured steps give."""
    from leank.eval.cache.attention.backend import choose_backend
    from leank.eval.cache.layer import CompressedLayer

    keep = torch.zeros(4, 128, dtype=torch.bool)
    keep[1, :32] = keep[2, :64] = keep[3, :96] = True
    layers = [CompressedLayer(Middle(keep), Sizes(16, 128, 32), choose_backend("triton")) for _ in range(2)]
    k, v = torch.randn(2, 2, 4, 700, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(3, 400, 2, 16, 1, 128, device="cuda", dtype=torch.bfloat16)

    def step(layer, q, k, v):
        layer.update(k[:, :4], v[:, :4])
        return layer.attend(q)

    for layer in layers:
        layer.update(k, v)
        layer.attend(torch.randn(2, 16, 700, 128, device="cuda", dtype=torch.bfloat16))
    plain = [step(layers[0], *new[:, i]) for i in range(400)]
    captured = [step(layers[1], *new[:, i]) for i in range(3)]
    static = new[:, 3].clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step(layers[1], *static)
    for i in range(3, 400):
        static.copy_(new[:, i])
        graph.replay()
        captured.append(out.clone())
        layers[1].advance(1)
    torch.testing.assert_close(torch.stack(captured), torch.stack(plain), rtol=2e-2, atol=2e-2)
    assert layers[1].store.tail.length.max() == layers[0].store.tail.length.max() > 200
