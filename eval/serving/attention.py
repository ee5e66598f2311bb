"""A server's step in plain PyTorch: what it reads of the pages, and attention over it; for any device and dtype.

A `Step` says which of its tokens decode, which belong to a longer chunk, and where their past lies. `attend` computes
it: `decode` takes all requests that decode at once, `prefill` one chunk of one request. What each query reads is said
in `eval.serving.layout`. A query of a position that the model generated itself reads as a decoding step does, also when
a preempted request computes it again among others.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.serving.layout import PageGroup, PageLayout, Stripe

LOGITS = 2**24  # of generated positions that are computed at a time: 64 MiB in float32


@dataclass(frozen=True)
class Places:
    """Positions of R requests and where the group `rest` holds them."""

    at: Tensor  # int64 [R, S], positions, 0 where there is none
    real: Tensor  # bool [R, S], whether there is one
    block: Tensor  # block, token: int64 [R, S], the page, and the token in it
    token: Tensor

    def only_real(self) -> Self:
        """The real places of a single request."""
        return type(self)(*(x[:, self.real[0]] for x in (self.at, self.real, self.block, self.token)))


@dataclass(frozen=True)
class DecodingRequests:
    """The requests of a step with one new position each."""

    rows: Tensor  # int64 [R], their rows in the step's tokens
    blocks: Tensor  # int64 [R, n], their pages of `kept`
    seen: Tensor  # bool [R, n * block], whether there is a token in each place of these pages
    whole: Places  # the positions of sink and window, the new one included


@dataclass(frozen=True)
class Chunk:
    """A request of a step with several new positions."""

    rows: slice  # their rows in the step's tokens
    first: int  # the first new position; all before it are in pages
    generated: int  # how many of the new positions the model generated before; the request had been preempted
    blocks: Tensor  # int64 [n], pages of `kept` of the positions before `first`
    whole: Places  # the positions before `first` in sink and window, R = 1


@dataclass
class Step:
    """What one step computes; it is made once, and every layer reads it."""

    layout: PageLayout  # the page layout
    starts: list[int]  # [R + 1], the first row of each request in the step's tokens
    ends: list[int]  # [R], positions of each request once the step is done
    prompts: list[int]  # [R], tokens of each prompt
    kept: Tensor  # kept, rest: int [R, blocks], block tables; what the step makes lies on their device
    rest: Tensor

    @property
    def _new(self) -> list[int]:
        return [end - start for start, end in pairwise(self.starts)]

    @cached_property
    def decoding(self) -> DecodingRequests | None:
        """The requests that decode, if any; padded requests have no new position."""
        which = [i for i, new in enumerate(self._new) if new == 1]
        if not which:
            return None
        kept, rest = (table[which].long() for table in (self.kept, self.rest))
        ends = torch.tensor([self.ends[i] for i in which], device=kept.device)
        block = self.layout.kept.block
        blocks = kept[:, : -(-int(ends.max()) // block)]
        seen = torch.arange(blocks.shape[1] * block, device=kept.device) < ends[:, None]
        rows = torch.tensor([self.starts[i] for i in which], device=kept.device)
        return DecodingRequests(rows, blocks, seen, places(self.layout, rest, ends - 1, ends))

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The requests with several new positions."""
        found = []
        for i, new in enumerate(self._new):
            if new > 1:
                end, first = self.ends[i], self.ends[i] - new
                blocks = self.kept[i, : -(-first // self.layout.kept.block)].long()
                at = torch.tensor([first], device=blocks.device)
                whole = places(self.layout, self.rest[i : i + 1].long(), at, at).only_real()
                rows = slice(self.starts[i], self.starts[i + 1])
                found.append(Chunk(rows, first, min(new, max(0, end - self.prompts[i])), blocks, whole))
        return found

    @cached_property
    def slots(self) -> list[Tensor]:
        """The slots of the new positions in `kept` and `rest`, int64 [tokens] each; -1 = not stored."""
        new = [torch.arange(end - n, end, device=self.kept.device) for end, n in zip(self.ends, self._new, strict=True)]
        return [
            torch.cat([slots_of(group, row.long(), at) for row, at in zip(table, new, strict=True)])
            for group, table in ((self.layout.kept, self.kept), (self.layout.rest, self.rest))
        ]


def slots_of(group: PageGroup, table: Tensor, at: Tensor) -> Tensor:
    """The slot of each position `at` of the request with this block table, -1 in the null block."""
    block = table[at // group.block]
    return torch.where(block > 0, block * group.block + at % group.block, -1)


def places(layout: PageLayout, table: Tensor, first: Tensor, end: Tensor) -> Places:
    """Where `rest` [R, blocks] holds what steps from position `first` [R] on read whole, up to position `end` [R]."""
    window = torch.clamp(first - layout.window, min=layout.sink)
    sink = torch.arange(layout.sink, device=table.device).expand(len(first), -1)
    longest = max(0, int((end - window).max()))
    at = torch.cat([sink, window[:, None] + torch.arange(longest, device=table.device)], 1)
    real = at < end[:, None]
    at = at.where(real, 0)
    block = table.gather(1, at // layout.rest.block) if at.shape[1] else at
    return Places(at, real, block, at % layout.rest.block)


def attend(step: Step, layer: int, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, scaling: float, out: Tensor) -> None:
    """Write a step's attention to `out`; the step's tokens are in pages already.

    pages: [blocks, page_columns]; q, out: [tokens, Hq, D]; k, v: [tokens, H, D], from the projections
    """
    if step.decoding is not None:
        rows = step.decoding.rows
        out[rows] = decode(step.layout, layer, pages, q[rows], step.decoding, scaling)
    for chunk in step.chunks:
        at = chunk.rows
        out[at] = prefill(step.layout, layer, pages, q[at], k[at], v[at], chunk, scaling)


def decode(layout: PageLayout, layer: int, pages: Tensor, q: Tensor, step: DecodingRequests, scaling: float) -> Tensor:
    """Attention of R requests with one new position each, which is in pages already.

    pages: [blocks, page_columns]; q: [R, Hq, D]. Returns [R, Hq, D] in q's dtype, computed in at least fp32.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    of_kept, of_rest = (group.layers[layer] for group in (layout.kept, layout.rest))
    grouped = q.unflatten(1, (len(of_kept), -1)).to(wide)  # [R, H, G, D]
    unseen = ~step.seen[:, None]  # [R, 1, T]
    out = torch.empty_like(grouped)
    for head, (kept, rest) in enumerate(zip(of_kept, of_rest, strict=True)):
        of_head = grouped[:, head] * scaling
        extra = None
        if rest.k.width:
            k = _at(layout.rest, pages, rest.k, step.whole).to(wide)
            extra = of_head[..., rest.channels] @ k.mT  # [R, G, S]
        if not kept.k.width:  # the head sees sink and window alone
            assert extra is not None
            values = _at(layout.rest, pages, rest.v, step.whole).to(wide)
            out[:, head] = _weighted(extra, values, ~step.whole.real[:, None])
            continue
        k, values = (_blocks(layout.kept, pages, stripe, step.blocks).to(wide) for stripe in (kept.k, kept.v))
        logits = of_head[..., kept.channels] @ k.mT  # [R, G, T]
        if extra is not None:
            extra = extra.masked_fill(~step.whole.real[:, None], 0)
            logits.scatter_add_(2, step.whole.at[:, None].expand_as(extra), extra)
        out[:, head] = _weighted(logits, values, unseen)
    return out.flatten(1, 2).to(q.dtype)


def prefill(
    layout: PageLayout, layer: int, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Chunk, scaling: float
) -> Tensor:
    """Attention [n, Hq, D] of one request's new positions, whose K and V [n, H, D] come from the projections."""
    dense = len(q) - step.generated
    out = torch.empty_like(q)
    keys, values = _with_past(layout, layer, pages, step, k, v)
    if dense:
        for heads, some in _by_sight(layout, layer, step, keys, values):
            of_heads = heads.repeat_interleave(q.shape[1] // len(heads))
            mine_k, mine_v = (x[: len(x) - step.generated, heads] for x in some)
            out[:dense, of_heads] = _causal(q[:dense, of_heads], mine_k, mine_v, scaling)
    queries = max(1, LOGITS * k.shape[1] // (q.shape[1] * len(keys)))
    for start in range(dense, len(q), queries):
        at = torch.arange(start, min(start + queries, len(q)), device=q.device)
        out[at] = _as_decoding(layout, layer, q[at], keys, values, step.first + at, scaling)
    return out


def _by_sight(
    layout: PageLayout, layer: int, step: Chunk, k: Tensor, v: Tensor
) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """The KV heads [H] bool that see the same of the past and the chunk, and K and V [T, H, D] of what they see."""
    empty = torch.tensor([not head.k.width for head in layout.kept.layers[layer]], device=k.device)
    if not step.first or not empty.any():
        return [(torch.ones_like(empty), (k, v))]
    seen = torch.cat([step.whole.at[0], torch.arange(step.first, len(k), device=k.device)])  # empty heads see no middle
    of_empty = empty, (k[seen], v[seen])
    return [of_empty] if empty.all() else [(~empty, (k, v)), of_empty]


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Causal attention [n, Hq, D]; the last of q [n, Hq, D] belongs to the last of k, v [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense.attend(q, k, v, scaling)[0]


def _as_decoding(layout: PageLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor, scaling: float) -> Tensor:
    """Attention of queries q [n, Hq, D] at positions `at` [n] as if each were decoded, over k, v [T, H, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    token, query = torch.arange(len(k), device=k.device), at[:, None]
    middle = (token >= layout.sink) & (token < query - layout.window)  # [n, T]
    of_heads = q.unflatten(1, (k.shape[1], -1)).to(wide) * scaling  # [n, H, G, D]
    out = torch.empty_like(of_heads)
    for head, stripes in enumerate(layout.kept.layers[layer]):  # one after the other, which bounds the memory
        mine, key = of_heads[:, head].transpose(0, 1), k[:, head].to(wide)  # [G, n, D], [T, D]
        logits = mine @ key.T
        if stripes.k.count:
            logits = torch.where(middle, mine[..., stripes.channels] @ key[:, stripes.channels].T, logits)
        else:
            logits.masked_fill_(middle, -torch.inf)
        weight = logits.masked_fill_(token > query, -torch.inf).softmax(-1)
        out[:, head] = (weight @ v[:, head].to(wide)).transpose(0, 1)
    return out.flatten(1, 2).to(q.dtype)


def _with_past(
    layout: PageLayout, layer: int, pages: Tensor, step: Chunk, new_k: Tensor, new_v: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V [T, H, D] of the chunk behind those before it, with zeros for what is not stored."""
    if not step.first:
        return new_k, new_v
    k, v = (x.new_zeros(step.first + len(x), *x.shape[1:]) for x in (new_k, new_v))
    k[step.first :], v[step.first :] = new_k, new_v
    at = step.whole.at[0]
    for head, (kept, rest) in enumerate(
        zip(*(group.layers[layer] for group in (layout.kept, layout.rest)), strict=True)
    ):
        for x, stripes in ((k, (kept.k, rest.k)), (v, (kept.v, rest.v))):
            to = kept.channels if x is k else slice(None)
            if stripes[0].width:
                x[: step.first, head, to] = _blocks(layout.kept, pages, stripes[0], step.blocks[None])[0, : step.first]
            to = rest.channels if x is k else slice(None)
            if stripes[1].width:
                x[at[:, None] if x is k else at, head, to] = _at(layout.rest, pages, stripes[1], step.whole)[0]
    return k, v


def _weighted(logits: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """softmax(logits [R, G, T]) values [R, T, D] without the hidden tokens [R, 1, T], whatever their values are."""
    weight = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return weight @ values.masked_fill(hidden.mT, 0)


def _blocks(group: PageGroup, pages: Tensor, stripe: Stripe, blocks: Tensor) -> Tensor:
    """A stripe of all tokens in the pages `blocks` [R, n]: [R, n * block, count]."""
    return group.stripe(pages, stripe)[blocks].flatten(1, 2)[..., : stripe.count]


def _at(group: PageGroup, pages: Tensor, stripe: Stripe, places: Places) -> Tensor:
    """A stripe of the tokens at `places` [R, S]: [R, S, count]."""
    return group.stripe(pages, stripe)[places.block, places.token][..., : stripe.count]
