"""Which keys the rows of a pass read, and in which order: planned once per pass, used by all layers.

In a pass over short answer rows, the GPU's time goes into launches and not into memory. So the plan gathers the keys
into few blocks, which `fused` reads with few products. `fused` names the shapes.

An example: one document of 1000 tokens (positions 0 to 999), a question of 20 tokens (1000 to 1019), and an answer of 3
tokens, whose rows are at the positions 1020, 1021 and 1022. sink = 4, window = 64 (`branching.ScaledPass`).

1. Part 0 holds the document's keys, part 1 the question's, part 2 the answer's own.
2. The row at 1020 sees its window, the positions 957 to 1020; the row at 1022 sees 959 to 1022.
3. Of part 0 all rows read 0:4 (sink) and 959:1000 (window) with the plain query, and 4:957 (middle) with the scaled
   query, q * alpha. The keys 957 and 958 are in the window of some rows and in the middle of others.
4. Each range is a `Piece`: 0:4, 957:1000 (with a mask for 957 and 958), and scaled 4:957 and 957:959 (with a mask).
5. The parts 1 and 2 lie within every window: one plain piece each, with a mask, since a row must not see later answer
   tokens. With several questions per document the mask also hides the other questions.
6. Short neighbours that need the same query become `JoinedPieces`: here all plain pieces, and all scaled ones. So a
   layer makes its logits with two products, applies one softmax over them (a `KeyBlock`), and reads all values with one
   more.
7. On a GPU the flash kernel reads 4:957 instead, because all rows see it whole. It adds one column, its log-sum-exp, to
   that softmax.
8. If all keys of a pass are too many to read at once, there are several blocks, merged by an online softmax.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

JOINED = 4096  # keys; a piece up to this length is short: it is copied next to other short ones, for one product


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy of x on `device`; a copy from the host to a GPU does not wait for what runs there."""
    if device.type == "cuda" and not x.is_cuda:
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


@dataclass(frozen=True)
class Visibility:
    """The keys that each query of a pass sees in one zone; made by `visibility` once per pass, used by every layer.

    Position i sees position j <= i. The zone says which of these keys count:
    - "causal": all of them.
    - "dense": the sink, j < sink, and the window, i - j < window.
    - "middle": the others, which Eq. 1 reads with scaled queries.
    """

    q_positions: Tensor  # [B, M * n], the rows of all branches of a document side by side
    k_positions: Tensor  # [B, T], -1 for padding
    zone: str
    sink: int
    window: int
    # (start, stop, masked) ranges of key indices. Nobody sees a key outside the spans. Where masked is False, every row
    # sees every key of the span.
    spans: tuple[tuple[int, int, bool], ...]

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether a row at position i sees a key at position j, broadcast; it ignores the spans."""
        causal = (j >= 0) & (j <= i)
        if self.zone == "causal":
            return causal
        dense = (j < self.sink) | (i - j < self.window)
        return causal & (dense if self.zone == "dense" else ~dense)


def visibility(q_positions: Tensor, k_positions: Tensor, zone: str, sink: int = 0, window: int = 1) -> Visibility:
    """Find the spans of one zone for a pass.

    The zones "dense" and "middle" of the same sink and window are disjoint, and together they are "causal".
    q_positions: [R, n]; k_positions: [B, T], -1 for padding; B divides R; sink, window: as in `branching.student`.
    """
    folded = q_positions.reshape(k_positions.shape[0], -1)  # [B, M * n]
    found = Visibility(folded, k_positions, zone, sink, window, ())
    low, high = folded.amin(1, keepdim=True), folded.amax(1, keepdim=True)  # [B, 1]
    # The rows that see a key are neighbours. So if the lowest and the highest row see it, those between see it, too.
    at_low, at_high = found.sees(low, k_positions), found.sees(high, k_positions)  # [B, T]
    unseen = ~at_high
    if zone == "dense":  # a key can lie in the windows of rows in between, but of neither the lowest nor the highest
        unseen &= (k_positions < 0) | (k_positions > high) | (low - k_positions >= window)
    return replace(found, spans=_spans(unseen, at_low & at_high))


def _spans(unseen: Tensor, seen: Tensor) -> tuple[tuple[int, int, bool], ...]:
    """Spans of keys that some row sees; unseen, seen [B, T]: no row sees the key, all rows see it."""
    kind = torch.where(unseen.all(0), 0, torch.where(seen.all(0), 1, 2))
    kinds, counts = (x.tolist() for x in torch.unique_consecutive(kind, return_counts=True))
    stops = torch.tensor(counts).cumsum(0).tolist()
    return tuple((b - c, b, k == 2) for k, c, b in zip(kinds, counts, stops, strict=True) if k)


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of keys that the rows read with one kind of query."""

    part: int  # 0 for the documents' keys, 1 and more for keys of the branches' own
    start: int  # start, stop: key indices within the part
    stop: int
    scaled: bool  # whether the rows read it with scaled queries, q * alpha (the middle), or with plain ones
    hidden: Tensor | None  # bool [B, 1, 1, M * n, stop - start], True where a row does not see a key; None: nowhere

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class JoinedPieces:
    """Pieces that one product reads, all with plain or all with scaled queries."""

    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """Number of keys."""
        return sum(p.width for p in self.pieces)

    @property
    def scaled(self) -> bool:
        """Whether its rows use scaled queries."""
        return self.pieces[0].scaled

    @cached_property
    def hidden(self) -> Tensor | None:
        """The `hidden` of its pieces side by side; None if all rows see all keys."""
        some = next((p.hidden for p in self.pieces if p.hidden is not None), None)
        if some is None:
            return None
        masks = [some.new_zeros(*some.shape[:-1], p.width) if p.hidden is None else p.hidden for p in self.pieces]
        return masks[0] if len(masks) == 1 else torch.cat(masks, -1)


@dataclass(frozen=True, eq=False)
class KeyBlock:
    """The pieces whose logits stand side by side in one softmax."""

    joined: tuple[JoinedPieces, ...]  # read key by key; each key is a column of the softmax
    flash: tuple[Piece, ...]  # read by the flash kernel; each piece is one column, its log-sum-exp

    @cached_property
    def spreads(self) -> tuple[JoinedPieces, ...]:
        """The pieces for the product with values: it may join plain and scaled pieces, since no query enters it."""
        return tuple(JoinedPieces(pieces) for pieces in _side_by_side(p for some in self.joined for p in some.pieces))

    def middle(self, like: Tensor) -> Tensor:
        """Bool [columns] on the device of `like`, True for columns that were read with scaled queries."""
        columns = [(some.width, some.scaled) for some in self.joined] + [(1, p.scaled) for p in self.flash]
        return torch.cat([torch.full((width,), scaled, device=like.device) for width, scaled in columns])


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks of a plan, in the order in which they are read."""

    blocks: tuple[KeyBlock, ...]
    shares: int  # blocks at the front that hold a rank's share of the documents; merged over the ranks

    @property
    def flashes(self) -> bool:
        """Whether the flash kernel reads any piece."""
        return any(block.flash for block in self.blocks)


class Plan:
    """The pieces that the rows of a pass read, which are disjoint and all keys that a row sees, and their layouts."""

    def __init__(self, pieces: Sequence[Piece], documents: Sequence[int] = (0,)) -> None:
        """Plan pieces; documents: the parts that hold the documents' keys, of which ranks may have a share each."""
        self.pieces, self.documents = tuple(pieces), documents
        self.scales = any(p.scaled for p in pieces)
        self._layouts: dict[tuple[int, int | None, bool], Layout] = {}

    def layout(self, size: int, flash_from: int | None, shared: bool) -> Layout:
        """The blocks of the plan, made by the first layer and kept for the others; size: keys per block, about.

        flash_from: keys from which the flash kernel reads a piece of part 0; None: it reads none.
        shared: whether part 0 is this rank's share of the documents.
        """
        key = size, flash_from, shared
        if key not in self._layouts:
            self._layouts[key] = self._laid_out(*key)
        return self._layouts[key]

    def _laid_out(self, size: int, flash_from: int | None, shared: bool) -> Layout:
        flash = [p for p in self.pieces if flash_from and not p.part and p.hidden is None and p.width >= flash_from]
        documents = [p for p in self.pieces if p.part in self.documents and p not in flash]
        own = [p for p in self.pieces if p.part not in self.documents]
        if shared:
            shares = _blocks(documents, flash, size)
            return Layout((*shares, *_blocks(own, [], size)), len(shares))
        return Layout(_blocks(own + documents, flash, size), 0)


def document_pieces(
    q_positions: Tensor, k_positions: Tensor, zones: Sequence[Visibility], device: torch.device | None = None
) -> tuple[Piece, ...]:
    """The pieces of part 0, the documents' keys, with masks on `device`, by default that of the positions.

    q_positions: [R, n], positions of the rows; k_positions: [B, P], -1 for padding.
    zones: "causal" alone, or "dense" and then "middle", which is read with scaled queries. Their spans may cover more
        keys than these rows see.
    """
    device = device or q_positions.device
    rows = to_device(q_positions.reshape(len(k_positions), -1)[:, :, None], device)  # [B, M * n, 1]
    pieces = []
    for scaled, zone in enumerate(zones):
        for start, stop, masked in zone.spans if scaled else _joined(zone.spans):
            seen = zone.sees(rows, to_device(k_positions[:, None, start:stop], device)) if masked else None
            pieces.append(Piece(0, start, stop, bool(scaled), None if seen is None else ~seen[:, None, None]))
    return tuple(pieces)


def _joined(spans: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Spans that touch, joined to one masked span: sink and window are short, and a launch costs more than a mask."""
    joined: list[tuple[int, int, bool]] = []
    for start, stop, masked in spans:
        if joined and joined[-1][1] == start:
            start, masked = joined[-1][0], True
            joined.pop()
        joined.append((start, stop, masked))
    return joined


def own_pieces(
    q_positions: Tensor,
    k_positions: Tensor,
    documents: int,
    zones: Sequence[Visibility],
    device: torch.device | None = None,
    part: int = 1,
) -> tuple[Piece, ...]:
    """The pieces of a part that holds the branches' own keys [R, T], laid out by `fused.side_by_side`; documents: B.

    A row sees the keys of its own branch alone. The window usually holds all of them; then there is no scaled piece.
    The other arguments are those of `document_pieces`.
    """
    n, T, M = q_positions.shape[1], k_positions.shape[1], len(q_positions) // documents
    device = device or q_positions.device
    same = torch.eye(M, dtype=torch.bool, device=device)[None, :, None, :, None]
    rows, columns = to_device(q_positions[:, :, None], device), to_device(k_positions[:, None], device)
    pieces = []
    for scaled, zone in enumerate(zones):
        if not zone.spans:
            continue
        seen = zone.sees(rows, columns)  # [R, n, T]
        hidden = ~(seen.view(documents, M, n, 1, T) & same).reshape(documents, 1, 1, M * n, M * T)
        pieces.append(Piece(part, 0, M * T, bool(scaled), hidden))
    return tuple(pieces)


def _blocks(pieces: Sequence[Piece], flash: Sequence[Piece], size: int) -> tuple[KeyBlock, ...]:
    """Cut pieces to at most `size` keys and gather them into blocks of about that many; the first has `flash`."""
    blocks: list[list[Piece]] = [[]] if flash else []
    held = 0 if flash else size
    for p in pieces:
        for start in range(p.start, p.stop, size):
            stop = min(start + size, p.stop)
            hidden = None if p.hidden is None else p.hidden[..., start - p.start : stop - p.start]
            if held + stop - start > size:
                blocks.append([])
                held = 0
            blocks[-1].append(Piece(p.part, start, stop, p.scaled, hidden))
            held += stop - start
    made = []
    for number, block in enumerate(blocks):
        block.sort(key=lambda p: (p.width > JOINED, p.scaled))
        parts = ([p for p in block if p.scaled == scaled and (p.width > JOINED) == long]
                 for long in (False, True) for scaled in (False, True))  # fmt: skip
        joined = tuple(JoinedPieces(side) for part in parts for side in _side_by_side(part))
        made.append(KeyBlock(joined, tuple(flash) if not number else ()))
    return tuple(made)


def _side_by_side(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Short neighbours together, long pieces alone, so that no long range of keys is copied."""
    joined: list[tuple[Piece, ...]] = []
    short = False
    for p in pieces:
        if short and p.width <= JOINED:
            joined[-1] = (*joined[-1], p)
        else:
            joined.append((p,))
        short = p.width <= JOINED
    return joined
