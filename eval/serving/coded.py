"""Which codes lie where in the pages of a served cache, under a mask with a layout of bits.

The two groups of pages of `eval.serving.layout` stay, with another split:

    kept   codes of every whole page of 64 tokens, K and V of all layers, as `Banded` packs them, scales inside
    rest   sink, window and the page that is being filled: all of K and V, in the model's dtype

A block of `kept` holds m pages of 64 tokens. In the bytes of such a page the layers follow each other, in these the
heads, and K of a head before its V:

    page j of block b, head h of layer l:  bytes  b * page_bytes + j * kept.bytes + kept.layers[l][h].start  and on

Every head's pages are a multiple of 64 bytes, with packed scales of 32, so all begin at one; those of all layers are
filled up to a multiple of 64. A head that keeps no channel has none.

A page is packed by the step that computes its 64th token, whether it is in the window still or not. So it is a
function of 64 tokens alone: a request that shares it, or computes it again, finds the same codes. The pages of the sink
are never read, and so not packed. A step that computes the positions [first, end) reads, with
f = 64 floor((first - window) / 64),

    whole    [0, sink), [f, first) and, causally, [first, end)
    codes    [sink, f); heads that keep no channel do not see these

A decoding step is such a step with end = first + 1, as in a mask's pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.banded import Banded, codecs
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import PageCodec
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.eval.serving.layers import Layers
from leank.eval.serving.layout import (
    LARGEST_BLOCK,
    Layout,
    PageGroup,
    PageLayout,
    heads_of,
    hit_tokens,
    lay_out,
    padded,
    tokens_of_rest,
)
from leank.mask import ChannelMask
from leank.precision import ROOM, Precision

LINE_BYTES = 64  # a page of 64 tokens of all layers begins at a multiple of them


@dataclass(frozen=True)
class Band:
    """Channels of a head that one codec stores, in a page of K, or its V."""

    codec: PageCodec
    keys: bool
    channels: slice  # which of the stored ones
    codes: slice  # codes, numbers: bytes of the head's K and V
    numbers: slice


@dataclass(frozen=True)
class HeadPages:
    """One head's pages of codes."""

    start: int  # byte of 64 tokens of the whole model at which K begins; V follows
    k_bytes: int  # k_bytes, v_bytes: of a page; 0 = the head keeps no channel
    v_bytes: int
    channels: Tensor  # int64 [C], the channels of K stored, the widest first
    bands: tuple[Band, ...]  # of K, then V

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """The bytes [n, k_bytes + v_bytes] of whole pages k, v [n, 64, D]."""
        found: list[Tensor] = []
        for band in self.bands:
            x = k[..., self.channels[band.channels]] if band.keys else v
            found += band.codec.pack(*band.codec.encode(x, band.keys), band.keys)
        return torch.cat([x.contiguous().view(torch.uint8) for x in found], -1)

    def unpack(self, pages: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [n, 64, dim] of the bytes of pages, with zeros in channels that are not stored."""
        k, v = (torch.zeros(len(pages), PAGE, dim, dtype=dtype, device=pages.device) for _ in range(2))
        for band in self.bands:
            numbers = pages[:, band.numbers].contiguous().view(band.codec.numbers_dtype or dtype)
            channels = band.channels.stop - band.channels.start
            x = band.codec.decode(*band.codec.unpack(pages[:, band.codes], numbers, channels, band.keys), band.keys)
            if band.keys:
                k[..., self.channels[band.channels]] = x.to(dtype)
            else:
                v = x.to(dtype)
        return k, v


@dataclass(frozen=True)
class CodeGroup:
    """The group `kept`."""

    block: int  # tokens of a block, a multiple of 64
    layers: tuple[tuple[HeadPages, ...], ...]  # [L][H]
    bytes: int  # of 64 tokens over all layers, a multiple of 64


@dataclass(frozen=True)
class CodedLayout(Layout):
    """The two groups of a layout of bits, and the sizes that both share."""

    kept: CodeGroup
    rest: PageGroup
    sink: int  # sink, window: tokens kept whole, multiples of 64
    window: int
    head_dim: int  # D
    dtype: torch.dtype  # the model's
    codecs: tuple[Banded, ...]  # of the layers
    hit: int
    page_bytes: int  # bytes of a page, the stride of blocks in both groups

    grain = PAGE

    @classmethod
    def of(
        cls, precision: Precision, block: int, sink: int, window: int, dtype: torch.dtype, hits: bool = True,
        rank: int = 0, ranks: int = 1, beside: int = 0,
    ) -> Self:  # fmt: skip
        """Lay out a layout of bits.

        block: tokens of a block of `kept`, a multiple of 64
        dtype: the model's
        hits: whether there is a prefix cache; see `tokens_of_rest`
        rank, ranks: of tensor parallelism; see `layout.heads_of`
        beside: columns of a page of another layer; see `PageLayout.of`
        Raises ValueError for other blocks, for sink and window off the grid of pages, and for layouts that save nothing
            or keep nothing.
        """
        if not PAGE <= block <= LARGEST_BLOCK or block % PAGE:
            raise ValueError(
                f"block_size={block} must be a multiple of {PAGE} up to {LARGEST_BLOCK} under a mask with bits per "
                f"channel; take {PAGE} or {2 * PAGE}"
            )
        for name, tokens in (("sink", sink), ("window", window)):
            if tokens % PAGE:
                raise ValueError(
                    f"{name}={tokens} must be a multiple of {PAGE}, the tokens of a page of codes; take "
                    f"{round_up(tokens, PAGE)}"
                )
        keep = precision.keep
        if not keep.any() or precision.middle_bytes >= 1:
            what = "prunes every channel" if not keep.any() else "takes no fewer bytes than the model's own cache"
            raise ValueError(f"the layout of bits {what}; serve the model without it, or take another mask")
        of_ranks = []
        for one in range(ranks):
            heads = heads_of(keep.shape[1], one, ranks)
            bits = precision.key_bits[:, heads], precision.value_bits[:, heads]
            of_layers = tuple(codecs(Precision(*bits, packed=precision.packed)))
            layers, at = [], 0
            for codec, kept in zip(of_layers, keep[:, heads], strict=True):
                layers.append(tuple(_heads(codec, kept, dtype, at)))
                at += sum(head.k_bytes + head.v_bytes for head in layers[-1])
            of_ranks.append((CodeGroup(block, tuple(layers), round_up(at, LINE_BYTES)), of_layers))
        own = torch.ones_like(keep[:, heads_of(keep.shape[1], rank, ranks)])
        whole = lay_out(own, own[..., 0], 1)
        beside, token = beside * dtype.itemsize, whole.columns * dtype.itemsize
        page = padded(block // PAGE * max(group.bytes for group, _ in of_ranks), beside)
        rest = replace(whole, block=tokens_of_rest(block, page, token, hits))
        page = padded(max(page, rest.block * token), beside)
        group, of_layers = of_ranks[rank]
        return cls(
            group, rest, sink, window, keep.shape[-1], dtype, of_layers,
            hit_tokens(block, page, beside) if hits else 1, page,
        )  # fmt: skip

    @property
    def page_columns(self) -> int:
        """Columns of a page, numbers of the model's dtype."""
        return self.page_bytes // self.dtype.itemsize

    @property
    def packed(self) -> bool:
        """Whether scales are."""
        return self.codecs[0].packed

    def empty(self, layer: int) -> Tensor:
        """Which heads of a layer keep no channel, bool [H]."""
        return torch.tensor([not head.k_bytes for head in self.kept.layers[layer]])

    def table(self, layer: int) -> Tensor:
        """Where a layer's pages lie, for a kernel, int32 [H, 5]: K, channels rounded up to 16 and as they are, V, 0."""
        rows = [
            (h.start, round_up(len(h.channels), ROOM), len(h.channels), h.start + h.k_bytes, 0)
            for h in self.kept.layers[layer]
        ]
        return torch.tensor(rows, dtype=torch.int32)

    def order(self, layer: int) -> Tensor:
        """All channels of a layer for a kernel, int32 [H, D]: those stored in their order, then the others."""
        every = torch.arange(self.head_dim)
        heads = [torch.cat([h.channels, every[~torch.isin(every, h.channels)]]) for h in self.kept.layers[layer]]
        return torch.stack(heads).int()

    def _codes(self, pages: Tensor, head: HeadPages) -> Tensor:
        """The view [blocks, m, bytes] of a head's pages; pages [blocks, page_columns]."""
        of_bytes, each = pages.view(torch.uint8), self.kept.bytes
        size = len(pages), self.kept.block // PAGE, head.k_bytes + head.v_bytes
        return of_bytes.as_strided(size, (of_bytes.stride(0), each, 1), of_bytes.storage_offset() + head.start)

    def pack(self, pages: Tensor, layer: int, numbers: Tensor, k: Tensor, v: Tensor) -> None:
        """Store whole pages k, v [n, 64, H, D] of a layer. numbers: int64 [n], block * m + page in it."""
        each = self.kept.block // PAGE
        for number, head in enumerate(self.kept.layers[layer]):
            if head.k_bytes:
                self._codes(pages, head)[numbers // each, numbers % each] = head.pack(k[:, :, number], v[:, :, number])

    def unpack(self, pages: Tensor, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [n, 64, H, D] of stored pages, zeros where nothing is stored. numbers: as for `pack`."""
        each, heads = self.kept.block // PAGE, self.kept.layers[layer]
        size = len(numbers), PAGE, len(heads), self.head_dim
        k, v = (torch.zeros(size, dtype=self.dtype, device=pages.device) for _ in range(2))
        for number, head in enumerate(heads):
            if head.k_bytes:
                found = self._codes(pages, head)[numbers // each, numbers % each]
                k[:, :, number], v[:, :, number] = head.unpack(found, self.head_dim, self.dtype)
        return k, v

    def whole(self, pages: Tensor, layer: int, block: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [..., H, D] of tokens in pages of `rest`, by the numbers of page and token [...]."""
        found = [
            torch.stack([self.rest.stripe(pages, stripe)[block, token][..., : self.head_dim] for stripe in stripes], -2)
            for stripes in zip(*((head.k, head.v) for head in self.rest.layers[layer]), strict=True)
        ]
        return found[0], found[1]


def _heads(codec: Banded, keep: Tensor, dtype: torch.dtype, start: int) -> Iterator[HeadPages]:
    """The pages of a layer's heads; keep: bool [H, D], start: byte of the first."""
    heads, dim = keep.shape
    channels = KeptChannels.of(keep, torch.empty(1, heads, 0, dim), codec.order)
    sizes = codec.page_bytes(dim, channels.count, dtype)
    for head, count in enumerate(channels.count[0].tolist()):
        of_k, of_v = (int(size[0, head]) if count else 0 for size in sizes)
        bands, at, first = [], 0, 0
        for of, number, keys in [
            *((of, number, True) for of, number in codec.bands(head, count)), (codec.of_values(head), dim, False),
        ] if count else ():  # fmt: skip
            codes, numbers = (int(np.asarray(n)) for n in of.pages(dim, number, dtype)[0 if keys else 1])
            part = slice(first, first + number) if keys else slice(0, dim)
            bands.append(Band(of, keys, part, slice(at, at + codes), slice(at + codes, at + codes + numbers)))
            at, first = at + codes + numbers, first + number
        assert at == of_k + of_v
        yield HeadPages(start, of_k, of_v, channels.index[0, head, :count].long(), tuple(bands))
        start += of_k + of_v


AnyLayout = PageLayout | CodedLayout


def page_layout(
    mask: ChannelMask, block: int, sink: int, window: int, dtype: torch.dtype, hits: bool = True, rank: int = 0,
    ranks: int = 1, layers: Layers | None = None,
) -> AnyLayout:  # fmt: skip
    """The pages of a mask, or of its layout of bits; see `PageLayout.of` and `CodedLayout.of`.

    layers: of the model; None = all of them have full attention
    """
    beside = 0
    if layers is not None:
        mask, beside = layers.mask(mask), layers.columns(mask.keep, block, rank, ranks)
    if mask.precision is None:
        return PageLayout.of(mask.keep, block, sink, window, hits, rank, ranks, beside)
    return CodedLayout.of(mask.precision, block, sink, window, dtype, hits, rank, ranks, beside)
