"""What tests of kernels share: where kernels run, layers of random keys, and how far a kernel is from its reference.

Kernels run in Triton's interpreter on a CPU, and on the device with `-m gpu`. A test file that imports from here is
skipped where Triton is not installed.
"""

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytest.importorskip("triton")  # Linux only

from leank.eval.cache.attention.launch import Kernel  # noqa: E402
from leank.eval.cache.storage.banded import Banded  # noqa: E402
from leank.eval.cache.storage.channels import KeptChannels  # noqa: E402
from leank.eval.cache.storage.middle import Middle  # noqa: E402
from leank.eval.cache.storage.store import Store  # noqa: E402
from tests.helpers.poisoned import poison_new, poisoned_memory  # noqa: E402, F401
from tests.oracles import cache_attention as naive  # noqa: E402


def some_channels(counts, dim, generator):
    """A mask [H, dim] of counts[h] random channels in head h."""
    keep = torch.zeros(len(counts), dim, dtype=torch.bool)
    for head, count in enumerate(counts):
        keep[head, torch.randperm(dim, generator=generator)[:count]] = True
    return keep


def make_store(counts, dim, lengths, sizes, dtype, seed=0, bits=None, widths=None, per_row=False, **middle):
    """A compressed layer of random keys: counts[h] channels of K and widths[h] of V (None = all) per head, rows of the
    given lengths, left-padded. per_row: every row keeps other channels of V. middle: more choices of the `Middle`."""
    generator = torch.Generator().manual_seed(seed)
    keep, values = some_channels(counts, dim, generator), None
    if isinstance(bits, Banded):
        keep = bits.order > 0
    if widths is not None:
        values = torch.stack([some_channels(widths, dim, generator) for _ in (lengths if per_row else [0])])
        values = values if per_row else values[0]
    shape = (2, len(lengths), len(counts), max(lengths), dim)
    k, v = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    real = torch.arange(shape[3]) >= shape[3] - torch.tensor(lengths)[:, None]
    scores = torch.rand(shape[1:4], generator=generator).to(DEVICE)
    return Store(
        k, v, None if real.all() else real.to(DEVICE), Middle(keep, values, bits=bits, **middle), sizes, None, scores
    )


def poison(store):
    """NaN wherever no token is held, so that reading it shows."""
    slots = store.ring_k.shape[2]
    for row, (seen, start) in enumerate(zip(store.seen, store.start, strict=True)):
        empty = np.setdiff1d(np.arange(slots), np.arange(start, max(start, seen)) % slots)
        for part in (store.ring_k, store.ring_v):
            part[row, :, empty] = torch.nan
        for part in (store.sink_k, store.sink_v):
            part[row, :, seen:] = torch.nan
    for segment in (store.prompt, store.tail):
        for row, head in np.ndindex(*segment.length.shape):
            n, (k, v) = int(segment.length[row, head]), segment._regions(row, head)
            for pages in (k,) if segment.values is None else (k, v):
                page = pages.shape[-1]
                first, rest = -(-n // page), n % page
                pages[first:] = torch.nan
                if rest:
                    pages[first - 1, :, rest:] = torch.nan
            if segment.values is None:
                v[n:] = torch.nan


def error(kernel, store, q, position, scaling=0.2):
    """Relative error of the kernel, called twice with poisoned scratch and output memory."""
    want = naive.attend(store, q.double(), position, scaling)
    with pytest.MonkeyPatch.context() as patch:
        poison_new(patch)
        kernel.attend(store, q, position, scaling)
        kernel._partials.fill_(torch.nan)
        got = kernel.attend(store, q, position, scaling)
    assert (kernel._done == 0).all()
    return ((got.double() - want).norm() / want.norm()).item()


def check_decoding(
    counts, dim, group, lengths, sizes, dtype, queries, steps, config, programs, seed=0, bits=None, **pruned
):
    """Append and attend a few times, past moves out of the window, comparing every step; bits, pruned: of `make_store`.

    Returns the store.
    """
    store = make_store(counts, dim, lengths, sizes, dtype, seed, bits, **pruned)
    kernel = Kernel(config, programs)
    generator = torch.Generator().manual_seed(seed + 1)
    heads, batch = len(counts), len(lengths)
    for _ in range(steps):
        k, v = torch.randn(2, batch, heads, queries, dim, generator=generator).to(DEVICE, dtype)
        q = torch.randn(batch, queries, heads * group, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        position = store.append(k, v, write=kernel.write)
        assert position.tolist() == [[n - queries + i for i in range(queries)] for n in store.seen]
        if bits is None:  # codes are not numbers that could be NaN
            poison(store)
        assert error(kernel, store, q, position) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
        store.flush(kernel.move if pruned else None)
    return store


def check_moves(counts, dim, lengths, sizes, dtype, appends, seed, joins=None, per_row=False, widths=None, bits=None):
    """Append and move, again and again; both paths leave the same bits everywhere, and NaN where nothing was put.

    Returns how many appends moved tokens, and the kernel's store.
    """
    stores = [make_store(counts, dim, lengths, sizes, dtype, seed, bits, widths, per_row) for _ in range(2)]
    kernel = Kernel(programs=3)
    generator = torch.Generator().manual_seed(seed)
    keep = torch.stack([stores[0].middle.channels[:, torch.randperm(dim, generator=generator)] for _ in lengths])
    for store in stores:
        store.middle = Middle(store.middle.channels, store.middle.values, joins=joins, bits=bits)
        if per_row:  # the same number of channels, other ones
            store.channels = KeptChannels.of(keep, store.ring_k)
            store.prompt.channels = store.tail.channels = store.channels
    moves = 0
    for new in appends:
        k, v = torch.randn(2, len(lengths), len(counts), new, dim, generator=generator).to(DEVICE, dtype)
        if bits is not None:
            v[..., : dim // 2] = v[..., :1]  # cells of equal numbers
        for store in stores:
            store.append(k, v)
            if bits is None:  # codes are not numbers that could be NaN
                poison(store)
        before = stores[0].start.copy()
        stores[0].flush()
        stores[1].flush(kernel.move)
        moves += int((stores[0].start > before).any())
        plain, moved = (store.tensors() for store in stores)
        for name in plain.keys() - {"values.ranks"} if bits is None else ():  # the kernel's alone
            torch.testing.assert_close(moved[name], plain[name], rtol=0, atol=0, equal_nan=True, msg=name)
        assert stores[1].tail.length.tolist() == stores[1].tail.length_dev.tolist() == stores[0].tail.length.tolist()
        assert stores[1].start_dev.tolist() == stores[1].start.tolist() == stores[0].start.tolist()
        assert stores[0].quiet == stores[1].quiet > 0
        assert not kernel._done.any()
        for part in ("tail", "prompt"):
            for row, head in np.ndindex(len(lengths), len(counts)):
                both = (getattr(store, part).read(row, head) for store in stores)
                for want, got in zip(*both, strict=True):
                    assert torch.equal(got, want)
                    assert not got.isnan().any()
    return moves, stores[1]
