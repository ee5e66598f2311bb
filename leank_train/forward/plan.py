"""What the answer rows of a pass read: ranges of documents' and branches' keys, laid out once for all layers.

A pass over an 8B decoder has 32 layers of short answer rows: the time goes into launches, not into memory. So a plan
says which ranges of which keys the rows read, with plain or with scaled queries (Eq. 1), and lays them out in groups
that `fused` reads with few products. Shapes are named in `attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leank_train.forward.prefix import to_device
from leank_train.forward.visibility import Visibility

JOINED = 4096  # keys of a range up to which it is copied beside its neighbours, for one product over all of them


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys start:stop of one part, read with scaled queries or not. hidden [B, 1, 1, M * n, keys]: True = unseen."""

    part: int
    start: int
    stop: int
    scaled: bool
    hidden: Tensor | None

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Run:
    """Pieces side by side, read by one product with plain or with scaled queries."""

    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        return sum(p.width for p in self.pieces)

    @property
    def scaled(self) -> bool:
        return self.pieces[0].scaled

    @cached_property
    def hidden(self) -> Tensor | None:
        """As of a piece, over the keys of all; None where no key is hidden."""
        some = next((p.hidden for p in self.pieces if p.hidden is not None), None)
        if some is None:
            return None
        masks = [some.new_zeros(*some.shape[:-1], p.width) if p.hidden is None else p.hidden for p in self.pieces]
        return masks[0] if len(masks) == 1 else torch.cat(masks, -1)


@dataclass(frozen=True, eq=False)
class Group:
    """What one softmax reads: the keys of runs, and one column for each piece that the flash kernel reads."""

    runs: tuple[Run, ...]
    flash: tuple[Piece, ...]

    @cached_property
    def spreads(self) -> tuple[Run, ...]:
        """The runs, short neighbours joined: a product with values does not ask which queries made the weights."""
        return tuple(Run(pieces) for pieces in _side_by_side(p for run in self.runs for p in run.pieces))

    def middle(self, like: Tensor) -> Tensor:
        """Bool [columns], beside `like`: read with scaled queries."""
        columns = [(run.width, run.scaled) for run in self.runs] + [(1, p.scaled) for p in self.flash]
        return torch.cat([torch.full((width,), scaled, device=like.device) for width, scaled in columns])


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of a plan; the first `shares` of them are a rank's own."""

    groups: tuple[Group, ...]
    shares: int

    @property
    def flashes(self) -> bool:
        return any(group.flash for group in self.groups)


class Plan:
    """The pieces of a pass, and their layouts, made once and not in every layer."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """pieces: of part 0, the documents' keys, and of the branches' own parts."""
        self.pieces = tuple(pieces)
        self.scales = any(p.scaled for p in pieces)
        self._layouts: dict[tuple[int, int | None, bool], Layout] = {}

    def layout(self, block: int, flash_from: int | None, shared: bool) -> Layout:
        """Groups of about `block` keys, with the flash kernel from `flash_from` keys on; shared: part 0, over ranks."""
        key = block, flash_from, shared
        if key not in self._layouts:
            self._layouts[key] = self._laid_out(*key)
        return self._layouts[key]

    def _laid_out(self, block: int, flash_from: int | None, shared: bool) -> Layout:
        flash = [p for p in self.pieces if flash_from and not p.part and p.hidden is None and p.width >= flash_from]
        documents = [p for p in self.pieces if not p.part and p not in flash]
        own = [p for p in self.pieces if p.part]
        if shared:
            shares = _groups(documents, flash, block)
            return Layout((*shares, *_groups(own, [], block)), len(shares))
        return Layout(_groups(own + documents, flash, block), 0)


def document_pieces(
    q_positions: Tensor, k_positions: Tensor, zones: Sequence[Visibility], place: torch.device | None = None
) -> tuple[Piece, ...]:
    """Part 0, the documents' keys: k_positions [B, P], read by rows at q_positions [R, n].

    zones: "causal" alone, or "dense" and "middle" (read with scaled queries); their spans may have been made for more
    rows than these. place: of the masks, if not that of the positions.
    """
    place = place or q_positions.device
    rows = to_device(q_positions.reshape(len(k_positions), -1)[:, :, None], place)  # [B, M * n, 1]
    pieces = []
    for scaled, zone in enumerate(zones):
        for start, stop, masked in zone.spans if scaled else _joined(zone.spans):
            seen = zone.sees(rows, to_device(k_positions[:, None, start:stop], place)) if masked else None
            pieces.append(Piece(0, start, stop, bool(scaled), None if seen is None else ~seen[:, None, None]))
    return tuple(pieces)


def _joined(spans: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Neighbours as one masked span: sink and window are short, and a launch costs more than a mask."""
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
    place: torch.device | None = None,
    part: int = 1,
) -> tuple[Piece, ...]:
    """Keys of the branches' own laid side by side (`side_by_side`), as that part: a row sees those of its branch alone.

    q_positions [R, n], k_positions [R, T]; zones: made for them, their spans maybe for more rows. place: as above. The
    window usually holds all: then nothing is scaled.
    """
    n, T, M = q_positions.shape[1], k_positions.shape[1], len(q_positions) // documents
    place = place or q_positions.device
    same = torch.eye(M, dtype=torch.bool, device=place)[None, :, None, :, None]
    rows, columns = to_device(q_positions[:, :, None], place), to_device(k_positions[:, None], place)
    pieces = []
    for scaled, zone in enumerate(zones):
        if not zone.spans:
            continue
        seen = zone.sees(rows, columns)  # [R, n, T]
        hidden = ~(seen.view(documents, M, n, 1, T) & same).reshape(documents, 1, 1, M * n, M * T)
        pieces.append(Piece(part, 0, M * T, bool(scaled), hidden))
    return tuple(pieces)


def _groups(pieces: Sequence[Piece], flash: Sequence[Piece], block: int) -> tuple[Group, ...]:
    """The pieces cut to at most `block` keys and gathered into groups of about as many; the first has `flash`."""
    groups: list[list[Piece]] = [[]] if flash else []
    held = 0 if flash else block
    for p in pieces:
        for start in range(p.start, p.stop, block):
            stop = min(start + block, p.stop)
            hidden = None if p.hidden is None else p.hidden[..., start - p.start : stop - p.start]
            if held + stop - start > block:
                groups.append([])
                held = 0
            groups[-1].append(Piece(p.part, start, stop, p.scaled, hidden))
            held += stop - start
    made = []
    for number, group in enumerate(groups):
        group.sort(key=lambda p: (p.width > JOINED, p.scaled))
        parts = ([p for p in group if p.scaled == scaled and (p.width > JOINED) == long]
                 for long in (False, True) for scaled in (False, True))  # fmt: skip
        runs = tuple(Run(side) for part in parts for side in _side_by_side(part))
        made.append(Group(runs, tuple(flash) if not number else ()))
    return tuple(made)


def _side_by_side(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Short pieces together, long ones alone: no long range of keys is copied."""
    joined: list[tuple[Piece, ...]] = []
    short = False
    for p in pieces:
        if short and p.width <= JOINED:
            joined[-1] = (*joined[-1], p)
        else:
            joined.append((p,))
        short = p.width <= JOINED
    return joined
