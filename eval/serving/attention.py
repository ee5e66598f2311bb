"""A server's step in plain PyTorch: what it reads of the pages, and attention over it; for any device and dtype.

A `Step` says which of its tokens decode, which belong to a longer chunk, and where their past lies. `attend` computes
it: `decode` takes all requests that decode at once, `prefill` one chunk of one request. What each query reads is said
in `eval.serving.layout`, and for a layout of bits in `eval.serving.coded`. A query of a position that the model
generated itself reads as a decoding step does, also when a preempted request computes it again among others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.cache.storage.segment import PAGE
from leank.eval.serving.coded import AnyLayout, CodedLayout
from leank.eval.serving.layout import PageGroup, PageLayout, Stripe

LOGITS = 2**24  # of generated positions that are computed at a time: 64 MiB in float32


@dataclass(frozen=True)
class Places:
    """Positions of R requests and where the group `rest` holds them."""

    at: Tensor  # int64 [R, S], positions, 0 where there is none
    real: Tensor  # bool [R, S], whether there is one
    block: Tensor  # block, token: int64 [R, S], the page, and the token in it
    token: Tensor

    def only_real(self, request: int = 0) -> Self:
        """The real places of one request, R = 1."""
        one = slice(request, request + 1)
        return type(self)(*(x[one, self.real[request]] for x in (self.at, self.real, self.block, self.token)))


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
    blocks: Tensor  # int64 [n], pages of `kept` of the positions before `first`, or of all if some were generated
    whole: Places  # the positions before `first` in sink and window, R = 1


@dataclass(frozen=True)
class WholePages:
    """Pages of 64 tokens whose last one a step computes, and where their tokens are."""

    number: Tensor  # int64 [n], block * m + page in it, see `CodedLayout.pack`
    row: Tensor  # int64 [n, 64], the token's row behind the step's first, -1 = it was computed before, and is in `rest`
    block: Tensor  # block, token: int64 [n, 64], the page of `rest`, and the token in it; those of others may be any
    token: Tensor


@dataclass
class Step:
    """What one step computes; it is made once, and every layer reads it."""

    layout: AnyLayout
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
                generated = min(new, max(0, end - self.prompts[i]))
                blocks = self.kept[i, : -(-(end if generated else first) // self.layout.kept.block)].long()
                at = torch.tensor([first], device=blocks.device)
                whole = places(self.layout, self.rest[i : i + 1].long(), at, at).only_real()
                rows = slice(self.starts[i], self.starts[i + 1])
                found.append(Chunk(rows, first, generated, blocks, whole))
        return found

    @cached_property
    def slots(self) -> list[Tensor]:
        """The slots of the new positions in `kept` and `rest`, int64 [tokens] each; -1 = not stored."""
        new = [torch.arange(end - n, end, device=self.kept.device) for end, n in zip(self.ends, self._new, strict=True)]
        return [
            torch.cat([slots_of(group, row.long(), at) for row, at in zip(table, new, strict=True)])
            for group, table in ((self.layout.kept, self.kept), (self.layout.rest, self.rest))
        ]

    @cached_property
    def whole_pages(self) -> WholePages:
        """The pages that this step fills, but those of the sink."""
        device, rest, each = self.kept.device, self.layout.rest.block, self.layout.kept.block // PAGE
        found: list[list[Tensor]] = [[], [], [], []]
        for i, (start, end, new) in enumerate(zip(self.starts[:-1], self.ends, self._new, strict=True)):
            begin = max(self.layout.sink, (end - new) // PAGE * PAGE) // PAGE
            page = torch.arange(begin, max(begin, end // PAGE) if new else begin, device=device)
            at = page[:, None] * PAGE + torch.arange(PAGE, device=device)
            row = (at - (end - new) + start - self.starts[0]).where(at >= end - new, -1)
            number = self.kept[i].long()[page // each] * each + page % each
            for to, x in zip(found, (number, row, self.rest[i].long()[at // rest], at % rest), strict=True):
                to.append(x)
        return WholePages(*map(torch.cat, found))


def slots_of(group: Any, table: Tensor, at: Tensor) -> Tensor:
    """The slot of each position `at` of the request with this block table, -1 in the null block."""
    block = table[at // group.block]
    return torch.where(block > 0, block * group.block + at % group.block, -1)


def places(layout: AnyLayout, table: Tensor, first: Tensor, end: Tensor) -> Places:
    """Where `rest` [R, blocks] holds what steps from position `first` [R] on read whole, up to position `end` [R]."""
    window = torch.clamp(layout.window_start(first), min=layout.sink)
    sink = torch.arange(layout.sink, device=table.device).expand(len(first), -1)
    longest = max(0, int((end - window).max()))
    at = torch.cat([sink, window[:, None] + torch.arange(longest, device=table.device)], 1)
    real = at < end[:, None]
    at = at.where(real, 0)
    block = table.gather(1, at // layout.rest.block) if at.shape[1] else at
    return Places(at, real, block, at % layout.rest.block)


def write(step: Step, layer: int, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Put a step's tokens into pages, before `attend`.

    pages: [blocks, page_columns]; k, v: [tokens, H, D], from the projections
    """
    layout, rows = step.layout, slice(step.starts[0], step.starts[-1])
    k, v = k[rows], v[rows]
    if isinstance(layout, PageLayout):
        for group, slots in zip((layout.kept, layout.rest), step.slots, strict=True):
            group.write(pages, layer, slots, k, v)
        return
    layout.rest.write(pages, layer, step.slots[1], k, v)
    filled = step.whole_pages
    if len(filled.number):
        new = (filled.row >= 0)[..., None, None]
        before = layout.whole(pages, layer, filled.block, filled.token)
        layout.pack(
            pages,
            layer,
            filled.number,
            *(torch.where(new, x[filled.row], y) for x, y in zip((k, v), before, strict=True)),
        )


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


def decode(layout: AnyLayout, layer: int, pages: Tensor, q: Tensor, step: DecodingRequests, scaling: float) -> Tensor:
    """Attention of R requests with one new position each, which is in pages already.

    pages: [blocks, page_columns]; q: [R, Hq, D]. Returns [R, Hq, D] in q's dtype, computed in at least fp32.
    """
    if isinstance(layout, CodedLayout):
        return _decode_codes(layout, layer, pages, q, step, scaling)
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


def _decode_codes(
    layout: CodedLayout, layer: int, pages: Tensor, q: Tensor, step: DecodingRequests, scaling: float
) -> Tensor:
    wide, empty = torch.promote_types(q.dtype, torch.float32), layout.empty(layer)
    out = torch.empty_like(q)
    for row, (blocks, tokens) in enumerate(zip(step.blocks, step.seen.sum(-1).tolist(), strict=True)):
        whole = step.whole.only_real(row)
        k, v = (x.to(wide).transpose(0, 1) for x in _stored(layout, layer, pages, blocks, whole, tokens))  # [H, T, D]
        hidden = torch.zeros(len(k), 1, tokens, dtype=torch.bool, device=q.device)
        unseen = torch.ones(tokens, dtype=torch.bool, device=q.device).index_fill(0, whole.at[0], False)
        hidden[empty] = unseen
        logits = q[row].unflatten(0, (len(k), -1)).to(wide) * scaling @ k.mT  # [H, G, T]
        out[row] = (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).flatten(0, 1).to(q.dtype)
    return out


def prefill(
    layout: AnyLayout, layer: int, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Chunk, scaling: float
) -> Tensor:
    """Attention [n, Hq, D] of one request's new positions, whose K and V [n, H, D] come from the projections."""
    dense = len(q) - step.generated
    out = torch.empty_like(q)
    keys, values = _with_past(layout, layer, pages, step, k, v)
    middle = _middle(layout, layer, pages, step, keys, values) if step.generated else None
    if dense:
        for heads, some in _by_sight(layout, layer, step, keys, values):
            of_heads = heads.repeat_interleave(q.shape[1] // len(heads))
            mine_k, mine_v = (x[: len(x) - step.generated, heads] for x in some)
            out[:dense, of_heads] = _causal(q[:dense, of_heads], mine_k, mine_v, scaling)
    queries = max(1, LOGITS * k.shape[1] // (q.shape[1] * len(keys)))
    for start in range(dense, len(q), queries):
        at = torch.arange(start, min(start + queries, len(q)), device=q.device)
        assert middle is not None
        out[at] = _as_decoding(layout, q[at], keys, values, middle, step.first + at, scaling)
    return out


def _by_sight(
    layout: AnyLayout, layer: int, step: Chunk, k: Tensor, v: Tensor
) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """The KV heads [H] bool that see the same of the past and the chunk, and K and V [T, H, D] of what they see."""
    empty = layout.empty(layer).to(k.device)
    if not step.first or not empty.any():
        return [(torch.ones_like(empty), (k, v))]
    seen = torch.cat([step.whole.at[0], torch.arange(step.first, len(k), device=k.device)])  # empty heads see no middle
    of_empty = empty, (k[seen], v[seen])
    return [of_empty] if empty.all() else [(~empty, (k, v)), of_empty]


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Causal attention [n, Hq, D]; the last of q [n, Hq, D] belongs to the last of k, v [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense.attend(q, k, v, scaling)[0]


# K and V [T, D] of a head's middle, None = it has none
Middle = Callable[[int], tuple[Tensor, Tensor] | None]


def _middle(layout: AnyLayout, layer: int, pages: Tensor, step: Chunk, k: Tensor, v: Tensor) -> Middle:
    """K and V as the middle holds them, where steps of the chunk read it; k, v: [T, H, D], all positions' own."""
    if isinstance(layout, CodedLayout):
        coded_k, coded_v = _rounded(layout, layer, pages, step, len(k))
        empty = layout.empty(layer).tolist()
        return lambda head: None if empty[head] else (coded_k[:, head], coded_v[:, head])
    channels = [stripes.channels for stripes in layout.kept.layers[layer]]

    def of_head(head: int) -> tuple[Tensor, Tensor] | None:
        if not len(channels[head]):
            return None
        kept = torch.zeros_like(k[:, head])
        kept[:, channels[head]] = k[:, head, channels[head]]
        return kept, v[:, head]

    return of_head


def _as_decoding(
    layout: AnyLayout, q: Tensor, k: Tensor, v: Tensor, middle: Middle, at: Tensor, scaling: float
) -> Tensor:
    """Attention of queries q [n, Hq, D] at positions `at` [n] as if each were decoded, over k, v [T, H, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    token, query = torch.arange(len(k), device=k.device), at[:, None]
    in_middle = (token >= layout.sink) & (token < layout.window_start(query))  # [n, T]
    of_heads = q.unflatten(1, (k.shape[1], -1)).to(wide) * scaling  # [n, H, G, D]
    out = torch.empty_like(of_heads)
    for head in range(k.shape[1]):  # one after the other, which bounds the memory
        mine, own = of_heads[:, head].transpose(0, 1), middle(head)  # [G, n, D]
        logits = mine @ k[:, head].to(wide).T
        logits = torch.where(in_middle, -torch.inf if own is None else mine @ own[0].to(wide).T, logits)
        weight = logits.masked_fill(token > query, -torch.inf).softmax(-1)
        found = weight.masked_fill(in_middle, 0) @ v[:, head].to(wide)
        if own is not None:
            found += weight.masked_fill(~in_middle, 0) @ own[1].to(wide)
        out[:, head] = found.transpose(0, 1)
    return out.flatten(1, 2).to(q.dtype)


def _rounded(layout: CodedLayout, layer: int, pages: Tensor, step: Chunk, tokens: int) -> tuple[Tensor, Tensor]:
    """K and V [T, H, D] as codes hold them, with zeros where no step of the chunk reads codes."""
    end = max(0, layout.window_start(tokens)) // PAGE
    return _unpacked(layout, layer, pages, step.blocks, range(min(layout.sink // PAGE, end), end), tokens)


def _unpacked(
    layout: CodedLayout, layer: int, pages: Tensor, blocks: Tensor, which: range, tokens: int
) -> tuple[Tensor, Tensor]:
    """K and V [tokens, H, D] of one request, zeros outside the pages `which` of 64 tokens."""
    each, page = layout.kept.block // PAGE, torch.tensor(which, dtype=torch.int64, device=pages.device)
    found = layout.unpack(pages, layer, blocks[page // each] * each + page % each)
    k, v = (x.new_zeros(tokens, *x.shape[2:]) for x in found)
    at = slice(PAGE * which.start, PAGE * which.stop)
    k[at], v[at] = (x.flatten(0, 1) for x in found)
    return k, v


def _stored(
    layout: CodedLayout, layer: int, pages: Tensor, blocks: Tensor, whole: Places, tokens: int
) -> tuple[Tensor, Tensor]:
    """K and V [tokens, H, D] of one request, whose pages of `kept` are `blocks`: codes but in the places `whole`."""
    coded = tokens - whole.at.shape[1]  # those between sink and window
    first = layout.sink // PAGE
    k, v = _unpacked(layout, layer, pages, blocks, range(first, first + coded // PAGE), tokens)
    k[whole.at[0]], v[whole.at[0]] = layout.whole(pages, layer, whole.block[0], whole.token[0])
    return k, v


def _with_past(
    layout: AnyLayout, layer: int, pages: Tensor, step: Chunk, new_k: Tensor, new_v: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V [T, H, D] of the chunk behind those before it, with zeros for what is not stored."""
    if not step.first:
        return new_k, new_v
    if isinstance(layout, CodedLayout):
        past = _stored(layout, layer, pages, step.blocks, step.whole, step.first)
        return torch.cat([past[0], new_k]), torch.cat([past[1], new_v])
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
