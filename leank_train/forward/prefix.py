"""What a pass leaves behind for the next: documents prefilled, and branches that continue them.

Lengths and positions are on the host, where passes are planned: a plan read off the GPU would wait for it, and all
passes of a step are launched while the first one, the prefill, still runs there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """Documents, prefilled. keys, values: per layer [B, H, P, D]; k_positions [B, P] with -1 = padding; lengths [B].

    queries: per layer the document's last queries [B, Hq, P', D] at q_positions [B, P'], if they were asked for.
    ranks: the processes that hold a share of the P tokens each (None: this one holds all).
    """

    keys: list[Tensor]
    values: list[Tensor]
    k_positions: Tensor
    lengths: Tensor
    queries: list[Tensor] | None = None
    ranks: dist.ProcessGroup | None = None

    @property
    def place(self) -> torch.device:
        """Where keys and values are."""
        return self.keys[0].device


@dataclass(frozen=True)
class Branch:
    """Branches with full attention. keys, values: per layer [R, H, T, D]; k_positions [R, T] with -1 = padding.

    lengths [R] counts a branch's own tokens, starts [R] those of its document; hidden [R, T, hidden] after the final
    norm; queries: per layer the last queries of document and branch [R, Hq, n, D], if they were asked for.
    """

    keys: list[Tensor]
    values: list[Tensor]
    k_positions: Tensor
    lengths: Tensor
    starts: Tensor
    hidden: Tensor
    queries: list[Tensor] | None = None

    def cut(self, lengths: Sequence[int] | Tensor) -> "Branch":
        """Only the first lengths [R] tokens of each branch: the question, of a pass over question and answer."""
        lengths = checked_lengths(lengths, self.k_positions)
        longest = int(lengths.max())
        seen = torch.arange(longest) < lengths[:, None]
        return replace(
            self,
            keys=[k[:, :, :longest] for k in self.keys],
            values=[v[:, :, :longest] for v in self.values],
            k_positions=self.k_positions[:, :longest].masked_fill(~seen, -1),
            lengths=lengths,
            hidden=self.hidden[:, :longest],
            queries=None,
        )

    def repeat(self, times: int) -> "Branch":
        """Every branch `times` times in a row, [R * times]: to decode one branch under several masks at once."""
        return Branch(
            [k.repeat_interleave(times, 0) for k in self.keys],
            [v.repeat_interleave(times, 0) for v in self.values],
            self.k_positions.repeat_interleave(times, 0),
            self.lengths.repeat_interleave(times, 0),
            self.starts.repeat_interleave(times, 0),
            self.hidden.repeat_interleave(times, 0),
        )


def checked_lengths(lengths: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    """Lengths [R] of ids [R, T], checked, on the host; such as are on a GPU are waited for."""
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.shape != ids.shape[:1] or lengths.min() < 1 or lengths.max() > ids.shape[1]:
        raise ValueError(f"lengths={lengths.tolist()} must be {ids.shape[0]} numbers from 1 to {ids.shape[1]}")
    return lengths


def to_device(x: Tensor, place: torch.device) -> Tensor:
    """X at `place`; from the host to a GPU without waiting for what runs there."""
    if place.type == "cuda" and not x.is_cuda:
        return x.contiguous().pin_memory().to(place, non_blocking=True)
    return x.to(place)
