"""The bytes that a step reads, against what the cache holds."""

import pytest
import torch

from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from scripts.bench.common import bytes_read

HEADS, DIM, TOKENS = 2, 64, 64 * 4 + 8 + 32  # whole groups in the middle, so that what is held is what is read
KEEP = torch.arange(DIM) < torch.tensor([[64], [32]])


def store_of(reads, bits=None, values=None):
    k, v = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    return Store(k, v, None, Middle(KEEP, values, bits=bits, reads=reads), Sizes(8, 32, 32))


@pytest.mark.parametrize("bits", [None, Packing(2), Packing(4, 64), Packing(8)])
def test_who_chooses_everything_reads_what_is_held(bits):
    store, labels = store_of(Labels(torch.arange(DIM).expand(HEADS, DIM) % 8 == 0, TOKENS), bits), 0.125
    held = measure_store(store_of(None, bits))
    ends = held.sink + held.window
    assert bytes_read(store_of(None, bits), 4) == ends + held.middle_k + held.middle_v
    assert bytes_read(store, 1) == ends + (1 + labels) * held.middle_k + held.middle_v
    pages = store_of(Quest(TOKENS, 16, 0), bits)
    bounds = 2 * 16 * (64 + 32) * 2  # 256 tokens of the middle in pages of 16, 2 bytes a number
    assert pages.reads.ranking.bounds.flat.nbytes == bounds
    assert bytes_read(pages, 3) == ends + 3 * (held.middle_k + held.middle_v) + bounds


@pytest.mark.parametrize("bits", [None, Packing(2)])
def test_every_query_head_reads_its_own(bits):
    """Six of 16 pages: for each of four query heads six sixteenths of the middle."""
    store = store_of(Quest(8 + 32 + 96, 16, 0), bits)
    held = measure_store(store_of(None, bits))
    chosen = 4 * 6 / 16 * (held.middle_k + held.middle_v)
    assert bytes_read(store, 4) == held.sink + held.window + chosen + store.reads.ranking.bounds.flat.nbytes


def test_pruned_values_are_counted():
    store = store_of(Quest(TOKENS, 16, 0), None, KEEP)
    held = measure_store(store)
    assert held.middle_v == 256 * int(KEEP.sum()) * 2
    bounds = store.reads.ranking.bounds.flat.nbytes
    assert bytes_read(store, 1) == held.sink + held.window + held.middle_k + held.middle_v + bounds
