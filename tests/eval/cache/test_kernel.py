"""The decode kernel, its parts, and what it moves out of the window against plain forms, over whole middles, pruned V
and KIVI's pages: in Triton's interpreter on a CPU, on the device with `-m gpu`."""

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

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

from leank.eval.cache.attention import schedule  # isort: skip  (needs Triton, which the line above asks for)
import triton
import triton.language as tl

from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.kernels import banded, packed
from leank.eval.cache.attention.kernels.banded import joining, lowest_of
from leank.eval.cache.attention.kernels.packed import instructions, numbers, step_of, unit_of
from leank.eval.cache.attention.kernels.parts import merge
from leank.eval.cache.attention.launch import FEW, Kernel
from leank.eval.cache.attention.readers import Config
from leank.eval.cache.attention.schedule import Part, Split
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from tests import ROOT
from tests.helpers.thinned import at_length, thinned

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(ON_GPU, reason="the same on the device below")


@interpreted
@pytest.mark.parametrize(
    ("counts", "dim", "group", "queries", "tile", "form"),
    thinned(
        [
            ([0, 32], 64, 2, 1, 64, {}),
            ([17, 64], 64, 4, 3, 64, {}),
            ([77, 96, 0], 128, 4, 1, 128, {}),
            ([128, 2], 128, 7, 1, 64, {}),
            ([33, 62], 64, 8, 18, 64, {}),  # five chunks of query tokens, in two launches
            ([77, 128, 33], 128, 4, 1, 64, {"widths": [77, 90, 128]}),  # 77 = ThinK's 0.4; a head that keeps all of V
            ([17, 0, 64], 64, 2, 3, 128, {"widths": [1, 64, 0]}),  # a head that keeps none of V, one without a middle
            ([40, 64], 64, 8, 5, 64, {"widths": [16, 3]}),  # two chunks
            ([0, 33, 177], 192, 1, 1, 64, {}),
            ([160, 192], 192, 16, 1, 64, {}),  # multiples of 32, of which masks are left out
            ([192, 100], 192, 3, 9, 64, {"widths": [192, 70]}),  # two chunks
            ([256, 224, 0, 128], 256, 2, 1, 64, {}),
            ([150, 250], 256, 16, 1, 128, {}),
            ([96, 256], 256, 8, 5, 64, {"widths": [201, 256]}),  # two chunks
            ([0, 32], 64, 2, 1, 64, {"bits": Packing(2, 32)}),
            ([17, 64], 64, 4, 3, 64, {"bits": Packing(8, 32)}),
            ([77, 96, 0], 128, 4, 1, 128, {"bits": Packing(2, 64)}),
            ([128, 2], 128, 7, 1, 64, {"bits": Packing(4, 32)}),
            ([33, 62], 64, 8, 5, 64, {"bits": Packing(2, 32)}),  # two chunks
        ],
        keep=(1, 4, 5, 6, 9, 12, 15, 16, 18),
    ),
)
def test_interpreted(counts, dim, group, queries, tile, form):
    sizes = Sizes(10, 64, form["bits"].group if "bits" in form else 8)
    lengths = [301] if queries > 4 else [301, 170]
    store = check_decoding(counts, dim, group, lengths, sizes, DTYPE, queries, 2, Config(tile), 5, **form)
    assert store.prompt.length.max() == 227  # an odd number: half a word of scales


@interpreted
@settings(max_examples=6, derandomize=True)
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
    st.sampled_from([64, 192, 256]),
    st.integers(0, 99),
)
def test_interpreted_on_random_shapes(
    form, channels, group, lengths, sizes, packing, queries, programs, per_row, dim, seed
):
    dim = 64 if form == "packed" else dim
    counts, widths = zip(*(tuple(n * dim // 64 for n in one) for one in channels), strict=True)
    sizes = Sizes(*sizes[:2], packing.group if form == "packed" else sizes[2])
    lengths = [max(n, sizes.sink) for n in lengths]  # shorter rows are written by Store.append, as on a CPU
    forms = {"whole": {}, "pruned": {"widths": widths, "per_row": per_row}, "packed": {"bits": packing}}
    check_decoding(counts, dim, group, lengths, sizes, DTYPE, queries, 2, None, programs, seed, **forms[form])


test_interpreted_on_many_random_shapes = at_length(test_interpreted_on_random_shapes, 60)


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 192)])
def test_new_keys_lose_the_center(heads, dim):
    """In the kernel that writes them, as in plain PyTorch; values do not."""
    center = torch.randn(heads, dim, generator=torch.Generator().manual_seed(1))
    stores = [make_store([17] * heads, dim, [301, 170], Sizes(10, 64, 8), DTYPE, center=center) for _ in range(2)]
    k, v = torch.randn(2, 2, heads, 3, dim, generator=torch.Generator().manual_seed(2)).to(DEVICE, DTYPE)
    backends = Kernel(), Plain()
    assert torch.equal(*(s.append(k, v, write=one.write) for s, one in zip(stores, backends, strict=True)))
    assert torch.equal(stores[0].ring_k, stores[1].ring_k)
    assert torch.equal(stores[0].ring_v, stores[1].ring_v)
    newest = stores[1].ring_k[0, :, 300 % stores[1].ring_k.shape[2] + 1]
    torch.testing.assert_close(newest.float(), k[0, :, 0].float() - center.to(DEVICE), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("merge", [16, 64])
def test_more_partial_results_than_a_merge_reads_in_a_round(merge):
    config, rows = Config(merge=merge), 16
    store, kernel = make_store([64], 64, [900], Sizes(10, 70, 8), DTYPE), Kernel(config, programs=14)
    k, v = torch.randn(2, 1, 1, 2, 64).to(DEVICE, DTYPE)
    position = store.append(k, v, write=kernel.write)
    assert error(kernel, store, torch.randn(1, 8, 2, 64).to(DEVICE, DTYPE), position) < 5e-3
    assert kernel.plan(store).table[:, Split.PARTIALS].max() > 2 * (64 // rows)


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


# The schedule


@settings(max_examples=30, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 128), st.integers(0, 128)), min_size=1, max_size=12
    ),  # tokens, channels of K and of V of each unit
    st.integers(1, 40),
    st.sampled_from([64, 128]),
    st.integers(1, 4),
    st.sampled_from([0, schedule.TILE_BYTES]),
    st.sampled_from([0, schedule.SPLIT_BYTES, 2**17]),
)
def test_spans_cover_every_token_once_and_are_even(parts, programs, tile, per_head, per_tile, split):
    """Walking every program's span reads each unit's tokens once, in partial results that are numbered without gaps."""
    units = np.zeros((len(parts), len(Part)), dtype=np.int64)
    units[:, Part.KIND], units[:, Part.ROW] = schedule.PROMPT, np.arange(len(parts)) // per_head
    units[:, Part.V_START] = np.arange(len(parts))  # names the unit
    units[:, [Part.TOKENS, Part.CHANNELS, Part.WIDTH]] = parts
    units[:, Part.COST] = units[:, [Part.CHANNELS, Part.WIDTH]].sum(1) * 128
    table = schedule.cut(units, programs, tile, per_tile=per_tile, split=split)
    assert len(table) <= programs + len(parts)
    read = {i: [] for i in range(len(parts))}
    partials, cost = {}, []
    for program in range(programs):
        line, spent, open_result = program, 0, None
        while line >= 0:
            of_line = dict(zip(Split, table[line].tolist(), strict=True))
            row, first, last, name = (of_line[c] for c in (Split.ROW, Split.FIRST, Split.LAST, Split.V_START))
            count, width, fresh, ends = (of_line[c] for c in (Split.CHANNELS, Split.WIDTH, Split.FRESH, Split.PARTIALS))
            number, first_number, line = (of_line[c] for c in (Split.NUMBER, Split.FIRST_NUMBER, Split.NEXT))
            if last > first:
                read[name].append((first, last))
                spent += (-(-(last - first) // tile)) * ((count + width) * tile * 2 + per_tile) + split
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
    largest_step = 256 * tile * 2 + per_tile + 2 * split
    assert max(cost) <= sum(cost) / programs + 2 * largest_step + split * len(parts)


def test_the_work_of_a_head_is_the_bytes_of_its_keys_and_values():
    """Two heads alike but for V: the one that keeps twice as many bytes in all gets twice as many spans."""
    store = make_store([32, 32], 64, [12000], Sizes(0, 0, 8), DTYPE, widths=[0, 32])
    parts = schedule.parts(store)
    middles = parts[parts[:, Part.KIND] == schedule.PROMPT]
    assert middles[:, [Part.CHANNELS, Part.WIDTH]].tolist() == [[32, 0], [32, 32]]
    table = schedule.cut(middles, 30, 64, per_tile=0)  # bytes alone
    heads, numbers = table[:, Split.HEAD], table[:, Split.NUMBER]
    spans = [len(set(numbers[heads == head].tolist())) for head in (0, 1)]
    assert spans[1] / spans[0] == pytest.approx(2, abs=0.3)


# KIVI's pages


@pytest.mark.skipif(ON_GPU, reason="bfloat16 has that unit on the device below")
def test_logits_and_results_are_divided_by_the_unit(monkeypatch):
    for module in (packed, banded):
        monkeypatch.setattr(module, "unit_of", lambda dtype, ptx: 2.0**-64)
    sizes = Sizes(10, 64, 32)
    check_decoding([17, 64], 64, 2, [170, 90], sizes, torch.float32, 1, 2, Config(), 3, bits=Packing(8, 32))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_split_costs_more_where_programs_read_few_pages(bits):
    store = make_store([40, 0, 9], 64, [90], Sizes(4, 16, 32), torch.float16, bits=Packing(bits, 32))
    assert Kernel(programs=1).prepare(store).few
    store = make_store([64], 64, [64 * FEW + 90], Sizes(4, 16, 32), torch.float16, bits=Packing(bits, 32))
    assert not Kernel(programs=1).prepare(store).few
    reader = Kernel(programs=1).prepare(store).reader
    assert Kernel()._config(reader, 64, 16, few=True).split > Kernel()._config(reader, 64, 16, few=False).split
    assert Kernel(Config(stages=4))._config(reader, 64, 16, few=True).stages == 4  # what was asked for


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
LONG = [([0, 32, 160, 192], 192, 4, 1), ([0, 64, 96, 224, 256], 256, 7, 1), ([77, 177, 5], 192, 16, 1),
        ([150, 250, 33], 256, 1, 1), ([96, 256], 256, 8, 40)]  # fmt: skip
LONG_PRUNED = [([100, 192], 192, 4, 1, [192, 70]), ([96, 256, 0], 256, 8, 5, [201, 256, 64])]
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
        *((None, {}, w) for w in LONG), *((None, {"widths": w, "per_row": True}, case) for *case, w in LONG_PRUNED),
        *((c, {"widths": w, "per_row": True}, case) for c in (Config(), Config(tile=128, stages=2))
          for *case, w in PRUNED),
        *((c, {"bits": b}, p) for c in (None, Config()) for p in PACKED
          for b in (Packing(2, 32), Packing(4, 32), Packing(8, 32), Packing(2, 64), Packing(8, 64))),
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

        step()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        found.append(torch.stack(got))
    assert torch.equal(*found)


# Tokens that leave the window


STEPS, PROGRAMS = (1000, {}) if ON_GPU else (20, {"programs": 2})  # the interpreter is slow
PACKINGS = [Packing(b, g) for b in (2, 4, 8) for g in (32, 64)]


@interpreted
@settings(max_examples=8, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 40)),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([64, 192, 256]),
    st.integers(0, 99),
)
def test_moves_on_random_shapes(channels, pruned, lengths, sizes, appends, per_row, dim, seed):
    """V whole and pruned."""
    counts, widths = zip(*(tuple(n * dim // 64 for n in one) for one in channels), strict=True)
    widths = widths if pruned else None
    check_moves(counts, dim, lengths, Sizes(*sizes), DTYPE, appends, seed, per_row=per_row, widths=widths)


test_moves_on_many_random_shapes = at_length(test_moves_on_random_shapes, 80)


@interpreted
@pytest.mark.parametrize(
    ("counts", "dim", "dtype", "packing"),
    thinned(
        [
            *(([0, 5, 64], 64, torch.float16, packing) for packing in PACKINGS),
            *(([77, 128], 128, torch.float32, packing) for packing in PACKINGS[::3]),
        ],
        keep=(0, 3, 4, 7),  # every number of bits
    ),
    ids=str,
)
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
    assert not store.tail.capacity[:, 1:3].any()


def test_a_step_that_brings_nothing_due_touches_no_store(monkeypatch):
    """advance() moves exactly when decoding step by step would, and asks nothing of a store in between."""
    layer = CompressedLayer(Middle(torch.ones(2, 64).bool()), Sizes(4, 20, 8), Plain())
    k, v = torch.randn(2, 2, 2, 50, 64)
    layer.compress(k, v)
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


@pytest.mark.parametrize(("pruned", "dim"), thinned([(False, 64), (True, 64), (False, 192), (True, 256)]))
def test_many_steps_with_padding_and_flushes(pruned, dim):
    """Rows of unequal length, each with channels of its own: all that leaves the window goes through the kernels."""
    generator = torch.Generator().manual_seed(0)
    keep, values = (torch.rand(2, 1, dim, generator=generator) < share for share in (0.6, 0.4))
    layers = pair(Middle(keep, values if pruned else None), Sizes(4, 20, 8))
    k, v = torch.randn(2, 2, 1, 90, dim, generator=generator).to(DEVICE, DTYPE)
    real = (torch.arange(90) >= torch.tensor([0, 37])[:, None]).to(DEVICE)
    for layer in layers:
        layer.compress(k, v, real)
    decode(layers, STEPS, generator, 1, 2, dim)
    assert layers[0].backend.captures
    assert layers[0].store.tail.length.tolist() == [[STEPS // 8 * 8]] * 2
    for name, kept in layers[1].store.tail.tensors().items():
        if name in ("k", "v", "length"):
            held = layers[0].store.tail.tensors()[name]
            torch.testing.assert_close(held, kept, rtol=0, atol=0, equal_nan=True, msg=name)


@interpreted
@pytest.mark.parametrize("dim", thinned([192, 256]))
def test_replies_of_two_turns_are_those_of_the_plain_form(dim):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=dim, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, generator, found = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(0), []
    keep = torch.rand(1, 1, dim, generator=generator) < 0.4
    prompt, question = torch.randint(3, 97, (1, 75), generator=generator).split([70, 5], 1)
    for name in ("torch", "triton"):
        cache, ids = compressed_cache(model, keep, 4, 16, 8, name), prompt
        if name == "triton":
            cache.choice.options = {"programs": 2}
        for _ in range(2):
            options = {"max_new_tokens": 10, "do_sample": False}
            ids = torch.cat([model.generate(ids, past_key_values=cache, **options), question], 1)
        found.append(ids)
    assert isinstance(cache.layers[0].backend, Kernel)
    assert cache.layers[0].store.tail.length.min() > 0
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "dim", "form"),
    [
        *((*case, {"per_row": per_row}) for per_row in (False, True)
          for case in (([0, 32, 64, 96], 128), ([77, 128, 1], 128), ([0, 17, 64], 64), ([0, 33, 192], 192),
                       ([7, 256], 256))),
        *((*case, {"widths": w}) for *case, w in (
            ([32, 96], 128, [77, 128]), ([77, 1], 128, [0, 19]), ([9], 64, [64]), ([99, 2], 192, [0, 192]),
            ([256, 9], 256, [201, 33]))),
    ],
    ids=str,
)  # fmt: skip
def test_moves_on_the_device(counts, dim, form):
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


# Parts of kernels


WORD, HALF, BYTE = 2**32 - 1, 2**16 - 1, 2**8 - 1
OF_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PLACES = [(bits, place) for bits in (2, 4, 8) for place in range(8 // bits)]


def bits_of(*numbers, dtype):
    """A register with the numbers, the first in the lower half."""
    low, high = (int(x) & HALF for x in torch.tensor(numbers, dtype=torch.float64).to(dtype).view(torch.int16))
    return torch.tensor(low | high << 16)


def halves(register, dtype):
    """The two numbers of registers, int64 [n], as float64 [n, 2]."""
    both = torch.stack([register & HALF, register >> 16], -1)
    return torch.where(both > 2**15 - 1, both - 2**16, both).to(torch.int16).view(dtype).double()


def run(ptx, given, dtype):
    """Carry out PTX on registers, int64 tensors by name; subnormal numbers are numbers. Returns all registers."""
    held = dict(given)
    for line in ptx.strip("{} \n").split(";")[1:]:
        if not line.strip():
            continue
        name, rest = line.split(None, 1)
        to, *words = (word.strip() for word in rest.split(","))
        x = [held[w] if w in held else torch.tensor(int(w, 0)) for w in words]
        if name == "mov.b32":
            held[to] = x[0]
        elif name == "and.b32":
            held[to] = x[0] & x[1]
        elif name in ("or.b32", "shl.b32", "shr.b32"):
            held[to] = {"or": x[0] | x[1], "shl": x[0] << x[1] & WORD, "shr": x[0] >> x[1]}[name[:-4]]
        elif name == "prmt.b32":
            both, chosen = x[0] | x[1] << 32, int(x[2])
            held[to] = sum((both >> 8 * (chosen >> 4 * i & 7) & BYTE) << 8 * i for i in range(4))
        else:
            assert name == {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}[dtype]
            a, b, c = (halves(y, dtype) for y in x)
            stored = (a * b + c).to(dtype).view(torch.int16).long() & HALF
            held[to] = stored[..., 0] | stored[..., 1] << 16
    return held


@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_the_instructions_give_every_code_exactly(bits, place, dtype):
    """All bytes, at scales of 1, 2, 4 and 8 and zero points 128 codes below 0: numbers that no rounding touches."""
    kind = OF_TRITON[dtype]
    unit, step = unit_of(kind, True), step_of(kind, bits, place)
    data = torch.arange(256).view(64, 4)
    scales, zeros = [unit / step * 2**i for i in range(4)], [-unit * 128 * 2**i for i in range(4)]
    given = {"$2": (data << torch.tensor([0, 8, 16, 24])).sum(-1)}
    for first, pair in ((3, scales), (5, zeros)):
        given |= {f"${first + i}": bits_of(*pair[2 * i : 2 * i + 2], dtype=dtype) for i in range(2)}
    held = run(instructions(kind, bits, place), given, dtype)
    found = torch.cat([halves(held[name], dtype) for name in ("$0", "$1")], -1) / unit
    want = ((data >> place * bits & 2**bits - 1) - 128) * torch.tensor([1, 2, 4, 8])
    assert torch.equal(found, want.double())


@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("place", "bit"), [(place, bit) for place in range(4) for bit in range(8)])
def test_the_instructions_join_every_code_of_three_bits_exactly(place, bit, dtype):
    """Each byte of lower bits beside four of highest ones, and each of highest ones beside four of lower ones."""
    kind = OF_TRITON[dtype]
    unit, step = unit_of(kind, True), step_of(kind, lowest_of(place), 1)
    every, some = torch.arange(256).view(64, 4), torch.tensor([0, 255, 90, 165]).expand(64, 4)
    lower, top = torch.cat([every, some]), torch.cat([some, every])
    shifts = torch.tensor([0, 8, 16, 24])
    given = {"$2": (lower << shifts).sum(-1), "$3": (top << shifts).sum(-1)}
    for first, pair in ((4, [unit / step * 2**i for i in range(4)]), (6, [-unit * 128 * 2**i for i in range(4)])):
        given |= {f"${first + i}": bits_of(*pair[2 * i : 2 * i + 2], dtype=dtype) for i in range(2)}
    held = run(joining(kind, place, bit), given, dtype)
    found = torch.cat([halves(held[name], dtype) for name in ("$0", "$1")], -1) / unit
    code = (lower >> 2 * place & 3) + (top >> bit & 1) * 4
    assert torch.equal(found, ((code - 128) * torch.tensor([1, 2, 4, 8])).double())


@triton.jit
def unpack(
    codes, scales, zeros, out, N: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """All bytes at every one of N scales and zero points, to out [N, 256]."""
    n, byte = tl.arange(0, N), tl.arange(0, 256)
    read = tl.load(codes + byte[None, None, :] + tl.zeros([1, N, 1], tl.int32))
    scale, zero = tl.load(scales + n)[None, :, None], tl.load(zeros + n)[None, :, None]
    x = numbers(read, scale, zero, PLACE, BITS, PTX)
    tl.store(out + n[None, :, None] * 256 + byte[None, None, :], x)


def check_codes(bits, place, dtype, ptx):
    """Codes of all bytes within half a unit in the last place of code * scale + zero, and alone exactly."""
    generator = torch.Generator().manual_seed(bits + place)
    scale = torch.cat([2.0 ** torch.arange(-8, 8), torch.rand(16, generator=generator)]).to(dtype)
    zero = torch.cat([torch.zeros(16), torch.randn(16, generator=generator) * 9]).to(dtype)
    data = torch.arange(256).to(torch.uint8).to(DEVICE)
    out = torch.empty(32, 256, dtype=dtype, device=DEVICE)
    unpack[(1,)](data, scale.to(DEVICE), zero.to(DEVICE), out, N=32, PLACE=place, BITS=bits, PTX=ptx)
    code = (torch.arange(256) >> place * bits & 2**bits - 1).double()
    want = code * scale.double()[:, None] + zero.double()[:, None]
    found = out.cpu().double() / unit_of(OF_TRITON[dtype], ptx)
    assert torch.equal(found[:16], want[:16])
    assert ((found - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2).all()


@interpreted
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_every_code_interpreted(bits, place):
    check_codes(bits, place, torch.float16, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_every_code_on_the_device(bits, place, dtype):
    check_codes(bits, place, dtype, True)


# The merge of partial results


@triton.jit
def merged(
    part, stat, out, most, total, first, parts, R: tl.constexpr, LINES: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Write what `merge` returns."""
    result, m, z = merge(part, stat, first, parts, R, LINES, D)
    r, d = tl.arange(0, R), tl.arange(0, D)
    tl.store(out + r[:, None] * D + d[None, :], result)
    tl.store(most + r, m)
    tl.store(total + r, z)


def check_merge(first, parts, rows, lines, dim, empty, seed):
    """Partial results first .. first + parts - 1 among memory that holds NaN; those of `empty` saw no token."""
    generator = torch.Generator().manual_seed(seed)
    part = torch.full((first + parts + 3, rows, dim), torch.nan)
    stat = torch.full((first + parts + 3, rows, 2), torch.nan)
    of = slice(first, first + parts)
    part[of] = torch.randn(parts, rows, dim, generator=generator)
    m, z = torch.randn(2, parts, rows, generator=generator) * 20
    z = 1 + z.abs()
    for i in empty:
        part[first + i % parts], m[i % parts], z[i % parts] = 0, -torch.inf, 0
    stat[of] = torch.stack([m, z], -1)
    out, most, total = (torch.full(shape, torch.nan, device=DEVICE) for shape in ((rows, dim), (rows,), (rows,)))
    merged[(1,)](part.to(DEVICE), stat.to(DEVICE), out, most, total, first, parts, R=rows, LINES=lines, D=dim)
    top = m.double().amax(0)
    weight = torch.exp2(m.double() - top.nan_to_num(neginf=0))
    whole = (weight * z).sum(0)
    want = (part[of].double() * weight[..., None]).sum(0) / whole.where(whole > 0, 1)[:, None]
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(most.cpu().double(), top, rtol=0, atol=0)
    torch.testing.assert_close(total.cpu().double(), whole, rtol=1e-4, atol=0)


@interpreted
@settings(max_examples=10, derandomize=True)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 17),
    st.sampled_from([64, 128]),
    st.lists(st.integers(0, 39), max_size=4),
    st.integers(0, 99),
)
def test_merge_interpreted(first, parts, rows, lines, dim, empty, seed):
    check_merge(first, parts, rows, lines, dim, empty, seed)


@interpreted
def test_where_no_part_saw_a_token_the_result_is_zero():
    check_merge(2, 3, 4, 2, 64, [0, 1, 2], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("parts", "rows", "lines"), [(1, 4, 16), (34, 4, 16), (34, 4, 20), (50, 8, 8), (7, 32, 2)])
def test_merge_on_the_device(parts, rows, lines, dim):
    check_merge(5, parts, rows, lines, dim, [0, 3], 0)


def test_shapes_hold_no_attributes():
    """Triton 3.6, which PyTorch 2.11 brings, refuses F.M in a shape; later ones and the interpreter take it."""
    code = "".join(file.read_text() for file in (ROOT / "eval").rglob("kernels/*.py"))
    shapes = re.findall(r"tl\.(?:zeros|full)\(\[(.*?)\],", code)
    assert len(shapes) > 40
    assert [shape for shape in shapes if "F." in shape] == []


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_the_kernels_compile_for_a_gpu(tmp_path, dim):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tests.helpers.compiling", str(dim)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
