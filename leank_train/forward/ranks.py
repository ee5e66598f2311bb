"""What the ranks of a sequence-parallel group add up: the online softmax over all keys, and gradients of queries."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def over_ranks(
    state: tuple[Tensor, Tensor, Tensor] | None, rows: Tensor, values: Tensor, ranks: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax over all ranks' shares from that over this rank's, which is None if no row sees its share."""
    if state is None:
        dtype = torch.promote_types(rows.dtype, torch.float32)
        out = rows.new_zeros(*rows.shape[:3], values.shape[-1], dtype=dtype)
        state = out, out.new_zeros(*rows.shape[:3], 1), out.new_full((*rows.shape[:3], 1), -torch.inf)
    out, total, top = state
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, ranks)
    sums = torch.cat([out, total], -1) * (top - highest.masked_fill(highest == -torch.inf, 0.0)).exp()
    dist.all_reduce(sums, group=ranks)
    return sums[..., :-1], sums[..., -1:], highest


def summed(
    d_queries: list[Tensor | None], dense: Tensor, scaled: Tensor | None, dtype: torch.dtype, ranks: dist.ProcessGroup
) -> list[Tensor | None]:
    """Gradients of plain and of scaled queries, summed over the ranks in one message."""
    found = [torch.zeros_like(dense, dtype=dtype) if d is None else d for d in d_queries[: 1 + (scaled is not None)]]
    sums = torch.stack(found)
    dist.all_reduce(sums, group=ranks)
    return [*sums.unbind(0), None][:2]
