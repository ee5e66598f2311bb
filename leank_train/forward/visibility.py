"""Which keys each query row sees, and in which zone of Eq. 1 they lie; `attention` names the shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ZONES = ("causal", "dense", "middle")


@dataclass(frozen=True)
class Visibility:
    """The keys that each query of a pass sees in one zone; made by `visibility` once per pass, used by every layer.

    Position i sees position j <= i. The zone says which of these keys count:
    - "causal": all of them.
    - "dense": the sink, j < sink, and the window, i - j < window.
    - "middle": the others, which Eq. 1 reads with scaled queries.

    q_positions: [B, M * n], the rows of all branches of a document side by side.
    k_positions: [B, T], -1 for padding.
    spans: (start, stop, masked) ranges of key indices. Nobody sees a key outside the spans. Where masked is False,
        every row sees every key of the span.
    """

    q_positions: Tensor
    k_positions: Tensor
    zone: str
    sink: int
    window: int
    spans: tuple[tuple[int, int, bool], ...]

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether a row at position i sees a key at position j, broadcast; it ignores the spans."""
        causal = (j >= 0) & (j <= i)
        if self.zone == "causal":
            return causal
        dense = (j < self.sink) | (i - j < self.window)
        return causal & (dense if self.zone == "dense" else ~dense)

    def mask(self, start: int, stop: int) -> Tensor:
        """Bool [B, M * n, stop - start], True where a row sees a key."""
        return self.sees(self.q_positions[:, :, None], self.k_positions[:, None, start:stop])

    def blocks(self, block: int) -> Iterator[tuple[int, int, bool]]:
        """The spans, cut into pieces of at most `block` keys."""
        for start, stop, masked in self.spans:
            for first in range(start, stop, block):
                yield first, min(first + block, stop), masked


def visibility(q_positions: Tensor, k_positions: Tensor, zone: str, sink: int = 0, window: int = 1) -> Visibility:
    """Find the spans of one zone for a pass.

    The zones "dense" and "middle" of the same sink and window are disjoint, and together they are "causal".

    q_positions: [R, n].
    k_positions: [B, T], -1 for padding; B divides R.
    zone: one of `ZONES`.
    sink, window: tokens, at least 0 and 1; the window counts the row itself.

    Raises ValueError for an unknown zone, or a sink or window out of range.
    """
    if zone not in ZONES:
        raise ValueError(f"zone={zone!r} is unknown; use one of {', '.join(ZONES)}")
    if sink < 0 or window < 1:
        raise ValueError(f"sink={sink}, window={window}: the sink must be at least 0, the window (self included) 1")
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
