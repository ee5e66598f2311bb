"""The decode kernel against its float64 reference, over whole middles, pruned V and KIVI's pages: in Triton's
interpreter on a CPU, on the device with `-m gpu`."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import (  # noqa: F401
    DEVICE,
    ON_GPU,
    check_decoding,
    error,
    make_store,
    poison,
    poisoned_memory,
)

from leank.eval.cache.attention import work  # isort: skip  (needs Triton, which the lines above ask for)
from leank.eval.cache.attention.kernels import packed
from leank.eval.cache.attention.launch import FEW, Config, Kernel, kernels_of
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(ON_GPU, reason="the same on the device below")


@interpreted
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries", "tile", "form"),
    [
        ([0, 32], 64, 2, 1, 64, {}),
        ([17, 64], 64, 4, 3, 64, {}),
        ([77, 96, 0], 128, 4, 1, 128, {}),
        ([128, 2], 128, 7, 1, 64, {}),
        ([33, 62], 64, 8, 18, 64, {}),  # five chunks of query tokens, in two launches
        ([77, 128, 33], 128, 4, 1, 64, {"widths": [77, 90, 128]}),  # 77 = ThinK's 0.4; a head that keeps all of V
        ([17, 0, 64], 64, 2, 3, 128, {"widths": [1, 64, 0]}),  # a head that keeps none of V, one without a middle
        ([40, 64], 64, 8, 5, 64, {"widths": [16, 3]}),  # two chunks
        ([0, 32], 64, 2, 1, 64, {"bits": Packing(2, 32)}),
        ([17, 64], 64, 4, 3, 64, {"bits": Packing(8, 32)}),
        ([77, 96, 0], 128, 4, 1, 128, {"bits": Packing(2, 64)}),
        ([128, 2], 128, 7, 1, 64, {"bits": Packing(4, 32)}),
        ([33, 62], 64, 8, 5, 64, {"bits": Packing(2, 32)}),  # two chunks
    ],
)
def test_interpreted(counts, dim, group, queries, tile, form):
    sizes = Sizes(10, 64, form["bits"].group if "bits" in form else 8)
    lengths = [301] if queries > 4 else [301, 170]
    store = check_decoding(counts, dim, group, lengths, sizes, DTYPE, queries, 2, Config(tile), 5, **form)
    assert store.prompt.length.max() == 227  # an odd number: half a word of scales


@interpreted
@settings(max_examples=9, derandomize=True)
@given(
    st.sampled_from(["whole", "pruned", "packed"]),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=2),
    st.integers(1, 8),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.tuples(st.integers(0, 70), st.integers(1, 80), st.integers(1, 40)),
    st.sampled_from([Packing(b, g) for b in (2, 4, 8) for g in (32, 64)]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_interpreted_on_random_shapes(form, channels, group, lengths, sizes, packing, queries, programs, per_row, seed):
    counts, widths = zip(*channels, strict=True)
    sizes = Sizes(*sizes[:2], packing.group if form == "packed" else sizes[2])
    lengths = [max(n, sizes.sink) for n in lengths]  # shorter rows are written by Store.append, as on a CPU
    forms = {"whole": {}, "pruned": {"widths": widths, "per_row": per_row}, "packed": {"bits": packing}}
    check_decoding(counts, 64, group, lengths, sizes, DTYPE, queries, 2, Config(), programs, seed, **forms[form])


@pytest.mark.parametrize("merge", [16, 64])
def test_more_partial_results_than_a_merge_reads_in_a_round(merge):
    config, rows = Config(merge=merge), 16
    store, kernel = make_store([64], 64, [900], Sizes(10, 70, 8), DTYPE), Kernel(config, programs=14)
    k, v = torch.randn(2, 1, 1, 2, 64).to(DEVICE, DTYPE)
    position = store.append(k, v, write=kernel.write)
    assert error(kernel, store, torch.randn(1, 8, 2, 64).to(DEVICE, DTYPE), position) < 5e-3
    assert store.plan.table[:, work.Column.PARTIALS].max() > 2 * (64 // rows)


@pytest.mark.parametrize("widths", [None, [23, 9]])
def test_padding_among_the_queries(widths):
    """A second turn whose rows have 5, 2 and no new tokens: padding gets zeros and is not stored."""
    store = make_store([40, 0], 64, [200, 90, 150], Sizes(10, 70, 8), DTYPE, widths=widths)
    kernel, real = Kernel(programs=4), (torch.arange(5) >= torch.tensor([0, 3, 5])[:, None]).to(DEVICE)
    k, v = torch.randn(2, 3, 2, 5, 64).to(DEVICE, DTYPE)
    q = torch.randn(3, 6, 5, 64).to(DEVICE, DTYPE)
    position = store.append(k, v, real, kernel.write)
    assert position.tolist() == [[200, 201, 202, 203, 204], [-1, -1, -1, 90, 91], [-1] * 5]
    poison(store)
    assert error(kernel, store, q, position) < 5e-3
    assert not kernel.attend(store, q, position, 0.2)[~real].any()


def test_heads_with_tokens_of_their_own():
    """Rows and heads that keep all, some and none of the prompt's tokens, and a head that takes no new ones."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 2, 4, 300, 64, generator=generator).to(DEVICE, DTYPE)
    share = torch.tensor([[1.0, 0.3, 0.0, 0.6], [0.1, 1.0, 0.5, 0.0]])
    tokens = torch.rand(2, 4, 300, generator=generator) < share[..., None]
    keep = torch.arange(64) < torch.tensor([64, 17, 32, 0])[:, None]
    middle = Middle(keep, joins=torch.tensor([True, False, True, True]))
    store, kernel = Store(k, v, None, middle, Sizes(10, 70, 8), tokens), Kernel(programs=5)
    for _ in range(10):
        k, v = torch.randn(2, 2, 4, 1, 64, generator=generator).to(DEVICE, DTYPE)
        position = store.append(k, v, write=kernel.write)
        store.flush()
    poison(store)
    q = torch.randn(2, 8, 1, 64, generator=generator).to(DEVICE, DTYPE)
    assert store.prompt.length[0].tolist()[2:] == [0, 0]
    assert store.tail.length.tolist() == [[8, 0, 8, 0]] * 2
    assert error(kernel, store, q, position) < 5e-3


# The work table


@settings(max_examples=30, derandomize=True)
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


# KIVI's pages


@pytest.mark.skipif(ON_GPU, reason="bfloat16 has that unit on the device below")
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
    store = make_store([40, 0], 64, [90], Sizes(4, 16, 32), DTYPE, bits=Packing(4, 32))
    position = store.append(*torch.randn(2, 1, 2, 1, 64).to(DEVICE, DTYPE))
    with pytest.raises(ValueError, match=r"scaling=.* must be positive"):
        Kernel(programs=4).attend(store, torch.randn(1, 2, 1, 64).to(DEVICE, DTYPE), position, scaling)


def test_tokens_that_left_the_window_are_read_from_half_filled_pages():
    """Groups of 32 join one after the other: a page of 64 tokens is half full at times."""
    store = make_store([40, 0], 64, [40, 90], Sizes(4, 16, 32), DTYPE, bits=Packing(2, 32))
    kernel, lengths = Kernel(programs=4), set()
    for _ in range(3):
        k, v = torch.randn(2, 2, 2, 32, 64).to(DEVICE, DTYPE)
        position = store.append(k, v, write=kernel.write)
        store.flush()
        assert error(kernel, store, torch.randn(2, 6, 1, 64).to(DEVICE, DTYPE), position[:, -1:]) < 5e-3
        lengths.add(int(store.tail.length[0, 0]) % 64)
    assert lengths == {0, 32}


# On the device

WHOLE = [([0, 32, 64, 96], 128, 4, 1), ([0, 32, 64, 96], 128, 7, 1), ([77, 128, 16, 48, 5], 128, 1, 1),
         ([0, 17, 64], 64, 8, 1), ([32, 0, 80], 128, 4, 5), ([96, 33], 128, 8, 40)]  # fmt: skip
PRUNED = [([77] * 4, 128, 4, 1, [77] * 4), ([32, 64, 96, 128], 128, 7, 1, [128, 0, 17, 96]),
          ([64, 64], 128, 8, 1, [64, 64]), ([0, 17, 64], 64, 8, 1, [5, 33, 16]),
          ([96, 33], 128, 8, 40, [90, 51])]  # fmt: skip
PACKED = [
    ([0, 32, 64, 96], 128, 4, 1),
    ([77, 128, 16, 48, 5], 128, 1, 1),
    ([0, 17, 64], 64, 8, 1),
    ([96, 33], 128, 8, 40),
]  # fmt: skip  (40 queries: several chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("config", "form", "case"),
    [
        *((c, {}, w) for c in (Config(), Config(tile=128, stages=2), Config(registers=168)) for w in WHOLE),
        *((c, {"widths": w, "per_row": True}, case) for c in (Config(), Config(tile=128, stages=2))
          for *case, w in PRUNED),
        *((c, {"bits": b}, p) for c in (Config(), Config(tile=128, stages=2)) for p in PACKED
          for b in (Packing(2, 32), Packing(4, 32), Packing(2, 64), Packing(8, 64))),
    ],
    ids=str,
)  # fmt: skip
def test_on_the_device(case, form, config, dtype):
    (counts, dim, group, queries), sizes = case, Sizes(128, 256, 64 if "bits" in form else 32)
    check_decoding(counts, dim, group, [3001, 1700, 700], sizes, dtype, queries, 3, config, 0, **form)


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
