"""What reads and packs a middle in fewer bits: one reader for each codec that a kernel knows.

A codec that is not in `READERS` is read by plain PyTorch; `backend.why_not_bits` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from leank.eval.cache.attention import codes, schedule, variants
from leank.eval.cache.attention.kernels import banded
from leank.eval.cache.attention.schedule import Part
from leank.eval.cache.storage.banded import Banded
from leank.eval.cache.storage.codecs import PageSegment
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import Store
from leank.eval.cache.storage.upload import upload
from leank.precision import BANDS

AHEAD = 4 * variants.PAGE_BYTES  # bytes of pages that a program may ask for before it needs them, where it can choose
SHARED = 208_000  # bytes that a program has for them at most
EFFORT = 8.5  # bytes of sink and window that a program reads in the time of an instruction of each warp


@dataclass(frozen=True)
class Config:
    """How the decode kernel is launched."""

    tile: int = 64  # tokens that a program reads at a time, 64 or 128
    warps: int = 4  # warps, stages: of a program
    stages: int = 3
    registers: int = 0  # limit per thread, 0 = none
    per_sm: int = 2  # programs per multiprocessor
    # lines of partial results that a merge asks for at a time, if that many rows at once keep all threads busy; a line
    # is one query row's
    merge: int = 64
    slow: float = 0.85  # how much longer a byte of the middle takes than one of sink and window, whose tiles have masks
    # per_tile, split: what it costs to read a tile, beside its bytes, and to start a split; see schedule.cut
    per_tile: int = schedule.TILE_BYTES
    split: int = schedule.SPLIT_BYTES
    pdl: bool = True  # whether to use programmatic dependent launch, where the GPU has it


WIDE = Config(warps=8)  # for tiles of more than 16 rows
# For heads of more than 128 channels: a program has as many warps, and asks for as many bytes ahead, as two of 128.
LONG = Config(warps=8, per_sm=1)
# Over codes costs follow bytes, and programmatic dependent launch gains nothing.
MANY_PAGES = Config(slow=1.0, per_tile=0, split=16384, pdl=False)
FEW_PAGES = replace(MANY_PAGES, split=65536)  # where every program reads few pages, a split's start counts


@dataclass(frozen=True)
class Reader:
    """How kernels run over a store whose middle is in fewer bits."""

    read: Any  # the Triton function that reads a part's codes within the decode kernel, `banded.read`
    codes: banded.Codes  # what it is compiled for
    cost: np.ndarray  # bytes that a page of the middle counts as in the schedule, [B or 1, H]
    # the launch for tiles of so many rows; the other argument says whether every program reads few pages
    config: Callable[[int, bool], Config]
    columns: Mapping[Part, np.ndarray]  # of the middle's lines in the schedule, [B or 1, H]
    # bytes of shared memory that a warp of `codes` has for K and V; None = that kernel does not read this store
    warp_bytes: tuple[int, int] | None = None


def pages_reader(store: Store) -> Reader:
    """The reader of pages of codes, KIVI's and a layout's."""
    codec, base, tail = store.middle.bits, store.ring_k, store.tail
    assert isinstance(codec, Packing | Banded)
    assert isinstance(tail, PageSegment)
    dim, heads = base.shape[-1], codec.heads_of(store.channels.count)
    found = variants.variants(codec.model_heads(dim), dim)
    numbers = variants.numbers(found, heads)
    pages = tuple(variants.page_bytes(one, dim, base.itemsize, codec.group, codec.packed) for one in found)
    warp_bytes = codes.warp_bytes(*tail.page_bytes()) if codes.can_read(base.device, base.dtype, dim) else None
    per_sm = codes.per_sm(warp_bytes, dim, base.device) if warp_bytes else 0
    warp_bytes = warp_bytes if per_sm else None
    # Programs share what takes time: bytes, or instructions where these take longer.
    if warp_bytes:
        instructions = codes.effort(heads, dim) * codes.BYTES_OF_EFFORT
    else:
        instructions = np.take([variants.effort(one, dim) * EFFORT for one in found] or [0], numbers)
    cost = np.where(heads[..., : len(BANDS)].any(-1), np.maximum(np.add(*tail.page_bytes()), instructions), 0)

    def config(tile_rows: int, few: bool) -> Config:
        # `banded.stages_of` says how many pages each variant asks for ahead, so that all launches have one compiled
        # kernel
        launch = FEW_PAGES if few else MANY_PAGES
        if warp_bytes:
            launch = replace(launch, per_sm=per_sm, per_tile=1024)
        if tile_rows > 16:  # of which ptxas of CUDA 12.8 gives a thread 32 registers if it is not told
            launch = replace(WIDE, stages=2, pdl=False, registers=255)
        return launch if launch.warps * max(pages, default=0) < SHARED else replace(launch, warps=4)

    return Reader(
        read=banded.read,
        codes=banded.Codes(found, pages, AHEAD, base.is_cuda, codec.group, codec.packed),
        cost=cost,
        config=config,
        columns={**dict(zip(schedule.BITS, np.moveaxis(heads, -1, 0), strict=True)), Part.VARIANT: numbers},
        warp_bytes=warp_bytes,
    )


def move(store: Store, done: Tensor) -> None:
    """Pack the tokens that are due, in one launch; done: int32 [>= B], zero before and after."""
    codec, tail, index = store.middle.bits, store.tail, store.channels.index
    assert isinstance(codec, Packing | Banded)
    batch, heads, slots, dim = store.ring_k.shape
    bands = np.broadcast_to(codec.heads_of(store.channels.count), (batch, heads, len(schedule.BITS)))
    banded.move[(batch, heads)](
        *(store.ring_k, store.ring_v, tail.k, tail.v, index, tail.places()),
        upload(bands.astype(np.int32), index.device),
        *(store.seen_dev, store.start_dev, tail.length_dev, done),
        *(index.stride(0), slots, store.sizes.window, store.sizes.flush),
        H=heads,
        D=dim,
        PAGE=PAGE,
        G=codec.group,
        PACKED=codec.packed,
    )


READERS: dict[type, Callable[[Store], Reader]] = {Packing: pages_reader, Banded: pages_reader}
