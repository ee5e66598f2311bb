"""What a pass leaves for the next one: prefilled documents, and branches that continue them.

Lengths and positions are on the host, where passes are planned. All passes of a step are launched while the first of
them, the prefill, still runs on the GPU; a plan that read a length from the GPU would wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from leank.data_gen.amount import amount


@dataclass(frozen=True)
class Prefix:
    """Prefilled documents.

    keys, values: [B, H, P, D] per layer.
    k_positions: [B, P] on the host, -1 for padding.
    lengths: [B] on the host, tokens of each document.
    ranks: the processes that each hold a share of the P tokens; None if this one holds all.
    """

    keys: list[Tensor]
    values: list[Tensor]
    k_positions: Tensor
    lengths: Tensor
    ranks: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.keys[0].device


@dataclass(frozen=True)
class Branch:
    """Branches that continue the documents with full attention.

    keys, values: [R, H, T, D] per layer, of the branch's own tokens.
    k_positions: [R, T] on the host, -1 for padding.
    lengths: [R] on the host, the branch's own tokens.
    starts: [R] on the host, tokens of its document.
    hidden: [R, T, hidden] after the final norm.
    """

    keys: list[Tensor]
    values: list[Tensor]
    k_positions: Tensor
    lengths: Tensor
    starts: Tensor
    hidden: Tensor

    def cut(self, lengths: Sequence[int] | Tensor) -> "Branch":
        """The first lengths [R] tokens of each branch, such as the question of a pass over question and answer."""
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
        )

    def repeat(self, times: int) -> "Branch":
        """Each branch `times` times in a row, [R * times], to decode it under several masks at once."""
        return Branch(
            [k.repeat_interleave(times, 0) for k in self.keys],
            [v.repeat_interleave(times, 0) for v in self.values],
            self.k_positions.repeat_interleave(times, 0),
            self.lengths.repeat_interleave(times, 0),
            self.starts.repeat_interleave(times, 0),
            self.hidden.repeat_interleave(times, 0),
        )


def checked_lengths(lengths: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    """Lengths [R] of ids [R, T] on the host; lengths on a GPU make it wait.

    Raises ValueError if a length is not between 1 and T, or their number is not R.
    """
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.shape != ids.shape[:1] or lengths.min() < 1 or lengths.max() > ids.shape[1]:
        wanted = amount(ids.shape[0], "number")
        raise ValueError(f"lengths={lengths.tolist()} must be {wanted} from 1 to {ids.shape[1]}")
    return lengths


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy of x on `device`; a copy from the host to a GPU does not wait for what runs there."""
    if device.type == "cuda" and not x.is_cuda:
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)
