"""Which K and V columns of a token lie where in the pages of a served cache, under a mask without a layout of bits.

A served cache has two groups of pages, with a block table each:

    kept   every token: the K channels that the mask keeps, and V of the heads that keep any
    rest   sink and window tokens only: all other K channels, and V of the heads that keep none

So a token of the sink or the window is whole in both groups together, and a middle token has its kept part alone.

One page holds the columns of all layers for `group.block` tokens. The pages of a group are one tensor
`pages` [blocks, page_columns] of the model's dtype; both groups share the pool of blocks, and a block belongs to one
group at a time. stride(0) is `layout.page_columns`, which both groups fit. Block 0 is vLLM's null block: block tables
point to it where a token is not stored, and it is never written nor read.

Within a page lie stripes. A stripe is one head's K or V: `width` columns that begin at column `start` of a token, for
all tokens of the page side by side. Channel i of token t (0 <= t < block) of the stripe lies at

    pages[b, block * start + t * width + i]

so `stripe()` is a strided view [blocks, block, width] whose last two dimensions are contiguous. A K stripe holds the
channels `channels[:count]` in ascending order, then zeros up to `width`, a multiple of STRIPE. A V stripe holds
head_dim columns, and zeros up to a multiple of STRIPE. The stripes of a layer follow each other (K, V of head 0, K, V
of head 1, ...), and each layer begins at a multiple of LINE columns.

Position p of a request lies in the page `table[p // block]`, at token `p % block`. A step that computes the positions
[first, end) of a request reads

    whole         [0, sink), [first - window, first) and, causally, [first, end)
    kept alone    [sink, first - window); heads that keep no channel do not see these

A decoding step is such a step with end = first + 1. The new positions of a decoding step are written to both groups
before they are read, so all that it reads is in pages. A longer step (prefill) takes its new positions from the
projections instead, because the rest of most of them is never stored.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from leank.eval.cache.storage.segment import round_up
from leank.eval.serving.rest import Position, window_start

STRIPE = 16  # columns: the width of a stripe is a multiple of them, so that a GPU reads whole sectors of 32 bytes
LINE = 32  # columns: a layer begins at a multiple of them
LARGEST_BLOCK = 2**16  # tokens, far beyond what vLLM takes


@dataclass(frozen=True)
class Stripe:
    """One head's K or V in a group."""

    start: int  # first column in a token of the whole model
    count: int  # columns that hold channels, at most `width`; 0 = nothing is stored
    width: int  # columns, a multiple of STRIPE


@dataclass(frozen=True)
class HeadStripes:
    """What a group stores of one KV head."""

    k: Stripe  # k, v: where
    v: Stripe
    channels: Tensor  # int64 [k.count], the K channels stored, ascending


@dataclass(frozen=True)
class PageGroup:
    """One of the two groups of pages."""

    block: int  # tokens of a page
    layers: tuple[tuple[HeadStripes, ...], ...]  # [L][H]
    columns: int  # of a token over all layers, a multiple of LINE

    def stripe(self, pages: Tensor, stripe: Stripe) -> Tensor:
        """The view [blocks, block, width] of a stripe; pages [blocks, page_columns]."""
        first = pages.storage_offset() + self.block * stripe.start
        return pages.as_strided((len(pages), self.block, stripe.width), (pages.stride(0), stripe.width, 1), first)

    def table(self, layer: int) -> Tensor:
        """A layer's stripes for a kernel, int32 [H, 5]: start, width, count of K, start, width of V; 0: none stored."""
        rows = [(h.k.start, h.k.width, h.k.count, h.v.start, h.v.width) for h in self.layers[layer]]
        return torch.tensor(rows, dtype=torch.int32)

    def channels(self, layer: int) -> Tensor:
        """The K channels of a layer for a kernel: int32 [H, widest stripe], -1 where a stripe holds zeros."""
        heads = self.layers[layer]
        table = torch.full((len(heads), max(head.k.width for head in heads)), -1, dtype=torch.int32)
        for row, head in zip(table, heads, strict=True):
            row[: head.k.count] = head.channels
        return table

    def write(self, pages: Tensor, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the tokens k, v [n, H, D] of a layer; what the group does not hold of them is dropped.

        slots: int64 [n], block * group.block + token; a slot below group.block (the null block, or -1) stores nothing
        """
        real = slots >= self.block
        if not real.all():
            slots, k, v = slots[real], k[real], v[real]
        at = slots // self.block, slots % self.block
        for head, stripes in enumerate(self.layers[layer]):
            for stripe, values in ((stripes.k, k[:, head, stripes.channels]), (stripes.v, v[:, head])):
                if stripe.width:
                    pad = stripe.width - values.shape[-1]
                    self.stripe(pages, stripe)[at] = torch.nn.functional.pad(values, (0, pad)).to(pages.dtype)


def heads_of(heads: int, rank: int, ranks: int) -> slice:
    """The KV heads of a layer that a rank of tensor parallelism has; of fewer heads than ranks, several have the same.

    Raises ValueError where neither number divides the other.
    """
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"tensor-parallel-size={ranks} does not divide the model's {heads} KV heads; take a divisor or a multiple"
        )
    each = max(1, heads // ranks)
    first = rank * heads // ranks
    return slice(first, first + each)


class Layout:
    """What the layouts of a mask and of bits share: the sizes of the two groups.

    Each rank of tensor parallelism has the layout of its KV heads. vLLM asks for pages of equal sizes on all ranks, so
    that they are those of the widest.
    """

    kept: Any  # `PageGroup`, or of codes `coded.CodeGroup`
    rest: PageGroup
    window: int
    grain: int  # tokens; the window begins at a multiple of them
    hit: int  # tokens; prefix hits end at multiples of them, 1 = there is no prefix cache

    @property
    def channels(self) -> int:
        """Channels of K that the group `kept` holds, in all layers."""
        return sum(len(head.channels) for of_layer in self.kept.layers for head in of_layer)

    def window_start(self, first: Position) -> Position:
        """Where the window of a step from position `first` on begins, unless the sink ends behind it."""
        return window_start(first, self.window, self.grain)


def padded(size: int, beside: int) -> int:
    """The bytes, or columns, of a page: the smallest multiple of `beside` that is at least `size`; 0 = any."""
    return round_up(size, beside) if beside else size


def tokens_of_rest(block: int, page: int, token: int, hits: bool) -> int:
    """Tokens of a page of `rest`: as many as fit, at least one, and with a prefix cache a divisor of `block`.

    vLLM takes prefix hits at multiples of both groups' pages, so others would make them rare.

    page, token: bytes, or columns, of a page of `kept`, and of a token of `rest`
    """
    fit = max(1, page // token)
    return max(n for n in range(1, fit + 1) if block % n == 0) if hits else fit


def hit_tokens(block: int, page: int, beside: int) -> int:
    """Tokens at whose multiples prefix hits end: those of a page of another layer, if there is one; see `padded`."""
    return block * page // beside if beside else block


@dataclass(frozen=True)
class PageLayout(Layout):
    """The two groups of a mask, and the sizes that both share."""

    kept: PageGroup  # kept, rest: the groups; each stores something
    rest: PageGroup
    sink: int  # sink, window: tokens kept whole
    window: int
    head_dim: int  # D
    hit: int
    page_columns: int  # columns of a page, the stride of blocks in both groups

    grain = 1

    @classmethod
    def of(
        cls, keep: Tensor, block: int, sink: int, window: int, hits: bool = True, rank: int = 0, ranks: int = 1,
        beside: int = 0,
    ) -> Self:  # fmt: skip
        """Lay out a mask: keep bool [L, H, D], True = kept.

        block: tokens of a page of `kept`, a multiple of 16
        hits: whether there is a prefix cache; see `tokens_of_rest`
        rank, ranks: of tensor parallelism; see `heads_of`
        beside: columns of a page of another layer, of which this page is a multiple; see `serving.layers`
        Raises ValueError for other blocks, and masks that prune nothing or everything.
        """
        if not 16 <= block <= LARGEST_BLOCK or block % 16:
            raise ValueError(
                f"block_size={block} must be a multiple of 16 up to {LARGEST_BLOCK}; take 16, 32, 64 or 128"
            )
        if keep.all() or not keep.any():
            what = "nothing" if keep.all() else "every channel"
            raise ValueError(f"the mask prunes {what}; serve the model without it, or take another mask")
        of_ranks = [keep[:, heads_of(keep.shape[1], one, ranks)] for one in range(ranks)]
        # V of a head is kept if any channel of its K is
        kept, rest = (
            [lay_out(stored, stored.any(-1) if of_kept else stored.all(-1), size) for stored in stored_of]
            for of_kept, size, stored_of in ((True, block, of_ranks), (False, 1, [~one for one in of_ranks]))
        )
        token = max(group.columns for group in rest)
        page = padded(block * max(group.columns for group in kept), beside)
        tokens = tokens_of_rest(block, page, token, hits)
        page = padded(max(page, tokens * token), beside)
        return cls(
            kept[rank], replace(rest[rank], block=tokens), sink, window, keep.shape[-1],
            hit_tokens(block, page, beside) if hits else 1, page,
        )  # fmt: skip

    def empty(self, layer: int) -> Tensor:
        """Which heads of a layer keep no channel, bool [H]."""
        return torch.tensor([not head.k.width for head in self.kept.layers[layer]])


def lay_out(stored: Tensor, values: Tensor, block: int) -> PageGroup:
    """The group that stores K channels [L, H, D], and V of heads `values` [L, H], in pages of `block` tokens."""
    layers, at, dim = [], 0, stored.shape[-1]
    for of_layer, with_values in zip(stored, values.tolist(), strict=True):
        heads = []
        for channels, with_v in zip(of_layer, with_values, strict=True):
            k = _stripe(at, int(channels.sum()))
            v = _stripe(at + k.width, dim if with_v else 0)
            heads.append(HeadStripes(k, v, channels.nonzero().flatten()))
            at = v.start + v.width
        layers.append(tuple(heads))
        at = round_up(at, LINE)
    return PageGroup(block, tuple(layers), at)


def _stripe(start: int, count: int) -> Stripe:
    return Stripe(start, count, round_up(count, STRIPE))
