"""Prefill of contexts that do not fit one GPU: each of the W ranks of a group holds a share of the tokens.

A document is cut into 2 W chunks. Rank r takes the chunks r and 2 W - 1 - r, so that all ranks have the same causal
work, but for less than a cell: chunks meet where cells of a layout do, the tokens that share a scale. In every layer, K
and V go round the ring of ranks, one share at a time, and the outputs are merged by their log-sum-exp. The `Prefix`
stays in shares. All ranks of a group run the same answers, and `fused_attention` sums their attention over the shares.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from leank.eval.cache.attention.softmax import PLAIN, Softmax, beside_sinks
from leank.kernels import SCORES_AT_ONCE, cudnn_forward, cudnn_pays, flash_forward, flash_takes, on_hopper
from leank.precision import GROUP
from leank.shape import check_decoder
from leank_train.forward.branching import Keeps, Prefix, checked_lengths
from leank_train.forward.fused import exp_, product
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import to_device


@torch.no_grad()
def prefill_in_shares(
    model: PreTrainedModel,
    document_ids: Tensor,
    lengths: Sequence[int] | Tensor,
    ranks: dist.ProcessGroup,
    kernel: str = "auto",
    sink: int = 0,
    cell: int = GROUP,
) -> Prefix:
    """`branching.prefill` by all W processes of the group `ranks`, which all call it with the same documents.

    kernel: one of `kernels.KERNELS`, of which those without a log-sum-exp stand for the library's flash kernel.
    sink: token at which the cells of a layout begin; cell: tokens of a cell.
    Returns a Prefix with this rank's share of the tokens, [B, 2 c] where c is P / 2 W, rounded up to whole cells.
    """
    check_decoder(model)
    lengths = checked_lengths(lengths, document_ids)
    rank, world = dist.get_rank(ranks), dist.get_world_size(ranks)
    columns = share(document_ids.shape[1], rank, world, sink, cell)
    # columns past the end are padding, and repeat the last one
    ids = document_ids[:, to_device(columns.clamp(max=document_ids.shape[1] - 1), document_ids.device)]
    positions = columns.expand(ids.shape)
    state = RingPass(int(lengths.max()), ranks, model.config.num_hidden_layers, kernel, sink % cell)
    run_decoder(model, ids, to_device(positions, ids.device), state)
    k_positions = positions.masked_fill(positions >= lengths[:, None], -1)
    first_cell = None if cell % GROUP else (sink % cell if rank == 0 else 0)
    return Prefix(state.keys, state.values, k_positions, lengths, ranks=ranks, first_cell=first_cell)


def share(tokens: int, rank: int, world: int, sink: int = 0, cell: int = 1) -> Tensor:
    """Columns of a rank's two chunks, ascending; the last chunks may reach past `tokens`.

    Two chunks meet `cell` times any number behind `sink`: what is longer in the first one is shorter in the last one.
    """
    chunk, more, last = cell * -(-tokens // (2 * world * cell)), sink % cell, 2 * world - 1
    meet = [0, *(more + chunk * number for number in range(1, last + 1)), chunk * (last + 1)]
    return torch.cat([torch.arange(meet[number], meet[number + 1]) for number in (rank, last - rank)])


class RingPass(Keeps):
    """Causal attention over the shares of all ranks; keeps this rank's K and V.

    more: by how many tokens the first chunk of the first rank is longer than half a share.

    Within its own share a rank attends causally. Both of its chunks see the first chunk of a rank before it. Only its
    second chunk sees a rank after it, and then both chunks. So every step of the ring is the same work on all ranks.
    """

    def __init__(self, longest: int, ranks: dist.ProcessGroup, layers: int, kernel: str, more: int) -> None:
        super().__init__(longest)
        self.ranks, self.layers, self.kernel, self.more = ranks, layers, kernel, more
        self.rank, self.world = dist.get_rank(ranks), dist.get_world_size(ranks)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Attention of this rank's rows over all shares, [B, Hq, 2 c, D]."""
        held = torch.stack([k, v])  # one message; [2, B, H, 2 c, D]
        self.keep(*held)
        chunks = [q.shape[2] // 2 + (0 if rank else self.more) for rank in range(self.world)]  # first ones, in tokens
        own = chunks[self.rank]
        for step in range(self.world):
            works, coming = self._pass_on(held) if step + 1 < self.world else ([], held)
            source, (k, v) = (self.rank - step) % self.world, held
            first = chunks[source]
            if source == self.rank:
                out, lse = self._block(q, k, v, scale, softmax, causal=True)
            elif source < self.rank:
                out, lse = merge(out, lse, *self._block(q, k[:, :, :first], v[:, :, :first], scale, softmax))
            else:
                late = out[:, :, own:], lse[:, :, own:]
                late = merge(*late, *self._block(q[:, :, own:], k, v, scale, softmax))
                out[:, :, own:], lse[:, :, own:] = late
            for work in works:
                work.wait()
            held = coming
        sinks = None if softmax.sink_logits is None else softmax.sink_logits[:, None, None].to(lse.dtype)
        return beside_sinks(out, lse[..., None], sinks).to(q.dtype)

    def _block(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`block_attention` by the kernel that the setting means for a block of this shape."""
        fast = on_hopper(q) and cudnn_pays(q, k.shape[2], self.layers, causal)
        cudnn = fast if self.kernel == "auto" else self.kernel == "cudnn"
        return block_attention(q, k, v, scale, causal, cudnn, softmax)

    def _pass_on(self, held: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Send K and V to the next rank and receive those of the rank before: the transfers, and their target."""
        coming, (after, before) = torch.empty_like(held), ((self.rank + way) % self.world for way in (1, -1))
        transfers = [
            dist.P2POp(dist.isend, held, group=self.ranks, group_peer=after),
            dist.P2POp(dist.irecv, coming, group=self.ranks, group_peer=before),
        ]
        return dist.batch_isend_irecv(transfers), coming


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, cudnn: bool = False, softmax: Softmax = PLAIN
) -> tuple[Tensor, Tensor]:
    """Attention [B, Hq, n, D] and its log-sum-exp [B, Hq, n], both in at least float32; k, v: [B, H, T, D].

    One of the library's kernels computes it where they run, cuDNN's or the flash kernel, else plain products.
    causal: query i sees the keys up to i, and n = T; otherwise every query sees all keys.
    softmax: logits may be soft-capped; its sinks do not count yet (`beside_sinks`).
    """
    if flash_takes(q) and softmax.softcap is None:
        out, lse = (cudnn_forward if cudnn else flash_forward)(q, k, v, scale, causal)[:2]
        return out.float(), lse
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    at_once = max(1, SCORES_AT_ONCE[q.device.type] // k.shape[:3].numel())  # rows
    columns, outs, lses = torch.arange(k.shape[2], device=q.device), [], []
    for rows in torch.arange(q.shape[2], device=q.device).split(at_once):
        logits = softmax.cap(product(q[:, :, rows], k.mT).mul_(scale))
        if causal:
            logits.masked_fill_(columns > rows[:, None], -torch.inf)
        lses.append(logits.logsumexp(-1))
        outs.append(product(exp_(logits.sub_(lses[-1][..., None])), v))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from out [..., n, D] and finite lse [..., n] over each."""
    lse = torch.logaddexp(lse1, lse2)
    return out1 * (lse1 - lse).exp()[..., None] + out2 * (lse2 - lse).exp()[..., None], lse
