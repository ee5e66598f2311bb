"""Prefill of contexts that do not fit one GPU: the ranks of a group hold a share of the tokens each, and keep it.

A document is cut into 2 W chunks; rank r takes the chunks r and 2 W - 1 - r, so that causal work is the same for all.
In every layer K and V go round the ring of ranks, one share at a time; outputs are merged by their log-sum-exp. The
`Prefix` stays in shares: answers, which all ranks of a group run alike, merge over them (`fused_attention`, ranks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from leank_train.forward.attention import merge, partial_attention
from leank_train.forward.hook import check_decoder, run_decoder
from leank_train.forward.kernels import flash_forward, flash_takes
from leank_train.forward.prefix import Prefix, checked_lengths, to_device
from leank_train.forward.visibility import visibility


@torch.no_grad()
def prefill_in_shares(
    model: PreTrainedModel, document_ids: Tensor, lengths: Sequence[int] | Tensor, ranks: dist.ProcessGroup
) -> Prefix:
    """`branching.prefill` by all ranks of a group, called with the same document_ids [B, P] and lengths [B].

    The Prefix of each rank has its share of the tokens, [B, 2 c] with c = ceil(P / 2 W). Raises ValueError as `prefill`
    does.
    """
    check_decoder(model)
    lengths = checked_lengths(lengths, document_ids)
    columns = share(document_ids.shape[1], dist.get_rank(ranks), dist.get_world_size(ranks))
    # columns past the end are padding, and repeat the last one
    ids = document_ids[:, to_device(columns.clamp(max=document_ids.shape[1] - 1), document_ids.device)]
    positions = columns.expand(ids.shape)
    state = RingPass(int(lengths.max()), ranks)
    run_decoder(model, ids, to_device(positions, ids.device), state)
    k_positions = positions.masked_fill(positions >= lengths[:, None], -1)
    return Prefix(state.keys, state.values, k_positions, lengths, ranks=ranks)


def share(tokens: int, rank: int, world: int) -> Tensor:
    """Columns of rank's two chunks, ascending; the last chunks may reach past `tokens`."""
    chunk = -(-tokens // (2 * world))
    columns = torch.arange(chunk)
    return torch.cat([columns + rank * chunk, columns + (2 * world - 1 - rank) * chunk])


class RingPass:
    """Causal attention over the shares of all ranks; keeps this rank's K and V.

    Of its two chunks a rank sees its own share causally, the first chunk of a rank before it from both, and both
    chunks of a rank after it from the second alone: every step is the same work on all ranks.
    """

    def __init__(self, longest: int, ranks: dist.ProcessGroup) -> None:
        self.longest, self.ranks = longest, ranks
        self.rank, self.world = dist.get_rank(ranks), dist.get_world_size(ranks)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        held = torch.stack([k, v])  # one message; [2, B, H, 2 c, D]
        self.keys.append(held[0])
        self.values.append(held[1])
        chunk = q.shape[2] // 2
        for step in range(self.world):
            works, coming = self._pass_on(held) if step + 1 < self.world else ([], held)
            source, (k, v) = (self.rank - step) % self.world, held
            if source == self.rank:
                out, lse = block_attention(q, k, v, scale, causal=True)
            elif source < self.rank:
                out, lse = merge(out, lse, *block_attention(q, k[:, :, :chunk], v[:, :, :chunk], scale))
            else:
                late = out[:, :, chunk:], lse[:, :, chunk:]
                late = merge(*late, *block_attention(q[:, :, chunk:], k, v, scale))
                out[:, :, chunk:], lse[:, :, chunk:] = late
            for work in works:
                work.wait()
            held = coming
        return out.to(q.dtype)

    def _pass_on(self, held: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Send K and V to the next rank while those of the rank before come in: the transfers, and where they end."""
        coming, (after, before) = torch.empty_like(held), ((self.rank + way) % self.world for way in (1, -1))
        transfers = [
            dist.P2POp(dist.isend, held, group=self.ranks, group_peer=after),
            dist.P2POp(dist.irecv, coming, group=self.ranks, group_peer=before),
        ]
        return dist.batch_isend_irecv(transfers), coming


def block_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, n, D] over all of k, v [B, H, T, D], or causally (n = T), and its log-sum-exp [B, Hq, n].

    Both in at least float32. By the library's flash kernel in half precision on a GPU, else by `partial_attention`.
    """
    (B, _, n, _), T = q.shape, k.shape[2]
    if flash_takes(q):
        out, lse, _ = flash_forward(q, k, v, scale, causal)
        return out.float(), lse
    columns = torch.arange(T, device=q.device).expand(B, T)
    seen = visibility(columns if causal else torch.full((B, n), T, device=q.device), columns, "causal")
    return partial_attention(q, k, v, scale, seen)
