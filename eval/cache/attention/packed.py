"""Launches over packed pages (eval.cache.storage.quantised), which KIVI's codec names as its kernels."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from leank.eval.cache.attention.kernels import packed
from leank.eval.cache.attention.launch import WIDE, CodecKernels, Config
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import Store

# With a page more on its way, 8 warps' pages of 128 channels take 147 KB, and two programs do not fit a multiprocessor.
WIDE_PACKED = replace(WIDE, stages=2, pdl=False)
# By bits: the costs of a packed middle follow its bytes, and it gained nothing from programmatic dependent launch.
_BYTES = Config(slow=1.0, per_tile=0, piece=16384, pdl=False)
PACKED = {8: _BYTES, 4: replace(_BYTES, slow=1.6), 2: replace(_BYTES, slow=1.6)}
# Where every program has few pages, another one on its way gains nothing, and a piece's start counts.
PACKED_FEW = {b: replace(_BYTES, stages=2, slow=slow, piece=65536) for b, slow in ((8, 1.3), (4, 1.6), (2, 2.5))}


def kernels(store: Store) -> CodecKernels:
    """The kernels of a store whose middle is packed."""
    packing, base = store.middle.bits, store.ring_k
    assert isinstance(packing, Packing)

    def config(tile_rows: int, few: bool) -> Config:
        if tile_rows > 16:
            return WIDE_PACKED
        return (PACKED_FEW if few else PACKED)[packing.bits]

    return CodecKernels(
        read=packed.read,
        codes=packed.Codes(packing.bits, packing.group, base.is_cuda),
        share=packing.cell(base.dtype) / (packing.group * base.itemsize),
        config=config,
        move=_move,
    )


def _move(store: Store, done: Tensor) -> None:
    """Pack the tokens that are due, in one launch."""
    packing, tail, index = store.middle.bits, store.tail, store.channels.index
    assert isinstance(packing, Packing)
    batch, heads, slots, dim = store.ring_k.shape
    packed.move[(batch, heads)](
        *(store.ring_k, store.ring_v, tail.k, tail.v, index, tail.places()),
        *(store.seen_dev, store.start_dev, tail.length_dev, done),
        *(index.stride(0), slots, store.sizes.window, store.sizes.flush),
        H=heads,
        D=dim,
        PAGE=PAGE,
        BITS=packing.bits,
        CELL=packing.group,
    )
