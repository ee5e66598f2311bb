"""Attention of one pass over all its keys in a single autograd node: what `attention` does in parts, in few launches.

A pass over an 8B decoder has 32 layers of short answer rows: the time goes into launches, not into memory. So a plan,
made once per pass and used by every layer, says which ranges of which keys the rows read, with plain or with scaled
queries (Eq. 1), and a layer is a handful of products around one softmax. `attention.scaled_attention` is the slow
reference with the same result; shapes are named there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from leank_train.attention import SCORES_AT_ONCE, Visibility, _product, _sees


@dataclass(frozen=True)
class Piece:
    """Keys start:stop of one part, read with scaled queries or not. hidden [B, 1, 1, M * n, keys]: True = unseen."""

    part: int
    start: int
    stop: int
    scaled: bool
    hidden: Tensor | None


Plan = tuple[Piece, ...]


def document_pieces(q_positions: Tensor, k_positions: Tensor, zones: Sequence[Visibility]) -> Plan:
    """Part 0, the documents' keys: k_positions [B, P], read by rows at q_positions [R, n].

    zones: "causal" alone, or "dense" and "middle" (read with scaled queries); their spans may have been made for more
    rows than these.
    """
    rows = q_positions.reshape(len(k_positions), -1)[:, :, None]  # [B, M * n, 1]
    pieces = []
    for scaled, zone in enumerate(zones):
        for start, stop, masked in zone.spans if scaled else _joined(zone.spans):
            seen = _sees(rows, k_positions[:, None, start:stop], zone) if masked else None
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


def own_pieces(q_positions: Tensor, k_positions: Tensor, documents: int, zones: Sequence[Visibility]) -> Plan:
    """Part 1, the branches' own keys laid side by side (`side_by_side`): a row sees those of its branch alone.

    q_positions [R, n], k_positions [R, T]. The window usually holds all of them: then nothing is scaled.
    """
    n, T, M = q_positions.shape[1], k_positions.shape[1], len(q_positions) // documents
    same = torch.eye(M, dtype=torch.bool, device=q_positions.device)[None, :, None, :, None]
    pieces = []
    for scaled, zone in enumerate(zones):
        seen = _sees(q_positions[:, :, None], k_positions[:, None], zone)  # [R, n, T]
        if scaled and not seen.any():
            continue
        hidden = ~(seen.view(documents, M, n, 1, T) & same).reshape(documents, 1, 1, M * n, M * T)
        pieces.append(Piece(1, 0, M * T, bool(scaled), hidden))
    return tuple(pieces)


def side_by_side(x: Tensor, documents: int) -> Tensor:
    """Keys or values of branches [R, H, T, D] -> [B, H, M * T, D]: the branches of a document, one after the other."""
    R, H, T, D = x.shape
    return x.reshape(documents, R // documents, H, T, D).transpose(1, 2).reshape(documents, H, -1, D)


def fused_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    pieces: Plan,
    scale: float,
    alpha: Tensor | None = None,
    empty_heads: str = "zero",
    limit: int | None = None,
    ranks: dist.ProcessGroup | None = None,
) -> Tensor:
    """Softmax attention of q [R, Hq, n, D] over the pieces of keys and values [B, H, T, D]; returns [R, Hq, n, D].

    alpha [H, D] or [R, H, D] scales the queries of scaled pieces; empty_heads as in `scaled_attention`. limit: scores
    held at a time (None: by device); longer pieces are read in blocks. ranks: processes with the same rows and the same
    part 1, each with a share of part 0: all get the attention over all shares, and the gradient that one process gets.
    """
    (R, Hq, n, D), (B, H) = q.shape, keys[0].shape[:2]
    M, G = R // B, Hq // H

    def rows(x: Tensor) -> Tensor:  # [R, Hq, n, D] -> [B, H, G * M * n, D]
        return x.reshape(B, M, H, G, n, D).permute(0, 2, 3, 1, 4, 5).reshape(B, H, G * M * n, D)

    dense, scaled, empty = rows(q), None, None
    if alpha is not None and (ranks or any(p.scaled for p in pieces)):  # ranks do alike, whatever their shares hold
        scaled = rows((q * alpha.repeat_interleave(G, -2).unsqueeze(-2)).to(q.dtype))
        if empty_heads == "drop":
            none = (alpha == 0).all(-1).expand(R, H)  # [R, H]: heads that drop the middle
            empty = none.view(B, M, H).permute(0, 2, 1)[:, :, None, :, None].expand(B, H, G, M, n)
            empty = empty.reshape(B, H, G * M * n, 1)
    limit = limit or SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"]
    block = max(64, limit // max(1, dense.shape[:3].numel()))
    shares = _groups([p for p in pieces if p.part == 0], block) if ranks else []
    groups = shares + _groups([p for p in pieces if p.part or not ranks], block)
    out = _Fused.apply(dense, scaled, empty, scale, groups, ranks, len(shares), M * n, len(keys), *keys, *values)
    return out.reshape(B, H, G, M, n, D).permute(0, 3, 1, 2, 4, 5).reshape(R, Hq, n, D).to(q.dtype)


def _groups(pieces: Sequence[Piece], block: int) -> list[list[Piece]]:
    """The pieces cut to at most `block` keys and gathered into groups of about as many."""
    groups: list[list[Piece]] = []
    held = block
    for p in pieces:
        for start in range(p.start, p.stop, block):
            stop = min(start + block, p.stop)
            hidden = None if p.hidden is None else p.hidden[..., start - p.start : stop - p.start]
            if held + stop - start > block:
                groups.append([])
                held = 0
            groups[-1].append(Piece(p.part, start, stop, p.scaled, hidden))
            held += stop - start
    return groups


class _Fused(torch.autograd.Function):
    """Online softmax over groups of pieces; the backward pass computes each group's probabilities anew from lse.

    A head that drops the middle (`empty`) has two softmaxes: the deployed one, without the middle, makes the output
    and every gradient but alpha's; the one with it, at logits of 0, makes alpha's straight-through gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, scaled: Tensor | None, empty: Tensor | None, scale: float,
        groups: list[list[Piece]], ranks: dist.ProcessGroup | None, shares: int, folded: int, parts: int, *kv: Tensor,
    ) -> Tensor:  # fmt: skip
        keys, values = kv[:parts], kv[parts:]
        state, full = None, None
        for number, group in enumerate(groups):  # the first `shares` of them are this rank's own
            if ranks and number == shares:
                state = _over_ranks(state, dense, values[0], ranks)
                full = None if empty is None else _over_ranks(full, dense, values[0], ranks)
            logits = _logits(dense, scaled, keys, group, scale, folded)
            deployed = logits if empty is None else logits.masked_fill(empty & _middle(group, logits), -torch.inf)
            state = _accumulate(state, deployed, values, group)
            if empty is not None:
                full = _accumulate(full, logits, values, group)
        assert state is not None
        out, lse = _finish(*state)
        both, lse_both = _finish(*full) if full is not None else (None, None)
        ctx.save_for_backward(dense, scaled, empty, out, lse, both, lse_both, *kv)
        ctx.scale, ctx.groups, ctx.folded, ctx.parts = scale, groups, folded, parts
        ctx.ranks, ctx.shares = ranks, shares
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        dense, scaled, empty, out, lse, both, lse_both, *kv = ctx.saved_tensors
        keys, values = kv[: ctx.parts], kv[ctx.parts :]
        d_kv: list[Tensor | None] = [
            torch.zeros_like(x, dtype=out.dtype) if need else None
            for x, need in zip(kv, ctx.needs_input_grad[9:], strict=True)
        ]
        d_queries: list[Tensor | None] = [None, None]
        d_rows = _operand(d_out, dense)
        delta = (d_out * out).sum(-1, keepdim=True)
        delta_both = delta if both is None else (d_out * both).sum(-1, keepdim=True)
        for number, group in enumerate(ctx.groups):
            if ctx.ranks and number == ctx.shares:
                d_queries = _summed(d_queries, dense, scaled, out.dtype, ctx.ranks)
            logits = _logits(dense, scaled, keys, group, ctx.scale, ctx.folded)
            d_weights = torch.cat([_product(d_rows, values[p.part][:, :, p.start : p.stop].mT) for p in group], -1)
            if empty is None:
                weights = logits.sub_(lse).exp_()
                d_logits = d_weights.sub_(delta).mul_(weights).mul_(ctx.scale)
            else:
                hidden = empty & _middle(group, logits)
                d_scaled_logits = (d_weights - delta_both) * (logits - lse_both).exp() * ctx.scale
                weights = logits.masked_fill_(hidden, -torch.inf).sub_(lse).exp_()
                d_logits = d_weights.sub_(delta).mul_(weights).mul_(ctx.scale)
                d_scaled_logits = _operand(torch.where(hidden, d_scaled_logits, d_logits), dense)
            d_logits, weights = _operand(d_logits, dense), _operand(weights, dense)
            d_scaled_logits = d_logits if empty is None else d_scaled_logits
            at = 0
            for p in group:
                columns = slice(at, at := at + p.stop - p.start)
                d_piece = (d_scaled_logits if p.scaled else d_logits)[..., columns]
                d_q = _product(d_piece, keys[p.part][:, :, p.start : p.stop])
                before = d_queries[p.scaled]
                d_queries[p.scaled] = d_q if before is None else before.add_(d_q)
                d_k, d_v = d_kv[p.part], d_kv[ctx.parts + p.part]
                if d_k is not None:
                    query = scaled if p.scaled else dense
                    d_k[:, :, p.start : p.stop] += _product(d_logits[..., columns].mT, query)
                if d_v is not None:
                    d_v[:, :, p.start : p.stop] += _product(weights[..., columns].mT, d_rows)
        d_dense, d_scaled = (None if d is None else d.to(dense.dtype) for d in d_queries)
        grads = [None if d is None else d.to(x.dtype) for d, x in zip(d_kv, kv, strict=True)]
        return d_dense, d_scaled, *[None] * 7, *grads


def _logits(
    dense: Tensor, scaled: Tensor | None, keys: Sequence[Tensor], group: list[Piece], scale: float, folded: int
) -> Tensor:
    """Scaled logits [B, H, G * M * n, keys of the group], -inf where a row does not see a key."""
    found = []
    for p in group:
        query = scaled if p.scaled else dense
        logits = _product(query, keys[p.part][:, :, p.start : p.stop].mT)  # type: ignore[arg-type]
        if p.hidden is not None:
            logits.unflatten(2, (-1, folded)).masked_fill_(p.hidden, -torch.inf)
        found.append(logits)
    return (torch.cat(found, -1) if len(found) > 1 else found[0]).mul_(scale)


def _operand(x: Tensor, model: Tensor) -> Tensor:
    """x in the type in which `_product` multiplies it with the model's tensors: cast once, not once a piece."""
    return x.to(model.dtype) if model.is_cuda and model.dtype in (torch.bfloat16, torch.float16) else x


def _middle(group: list[Piece], like: Tensor) -> Tensor:
    """Bool [keys of the group]: read with scaled queries."""
    flags = [torch.full((p.stop - p.start,), p.scaled, device=like.device) for p in group]
    return torch.cat(flags)


def _accumulate(
    state: tuple[Tensor, Tensor, Tensor] | None, logits: Tensor, values: Sequence[Tensor], group: list[Piece]
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a group into the online softmax (sum of weights * V, sum of weights, maximum)."""
    top = logits.amax(-1, keepdim=True)
    top = top if state is None else torch.maximum(top, state[2])
    safe = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weights = (logits - safe).exp_()
    total, out, at = weights.sum(-1, keepdim=True), None, 0
    weights = _operand(weights, values[0])
    for p in group:
        piece = _product(weights[..., at : (at := at + p.stop - p.start)], values[p.part][:, :, p.start : p.stop])
        out = piece if out is None else out.add_(piece)
    assert out is not None
    if state is not None:
        decay = (state[2] - safe).exp()
        total, out = total + state[1] * decay, out + state[0] * decay
    return out, total, top


def _finish(out: Tensor, total: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a row that sees nothing has the output 0, and lse = inf so that its weights are 0."""
    none = total == 0
    total = total.masked_fill(none, 1.0)
    return out / total, torch.where(none, torch.inf, top + total.log())


def _over_ranks(
    state: tuple[Tensor, Tensor, Tensor] | None, rows: Tensor, values: Tensor, ranks: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax over the shares of all ranks, from that over this rank's; None where no row sees its share."""
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


def _summed(
    d_queries: list[Tensor | None], dense: Tensor, scaled: Tensor | None, dtype: torch.dtype, ranks: dist.ProcessGroup
) -> list[Tensor | None]:
    """Gradients of plain and scaled queries, summed over the ranks' shares in one message."""
    found = [torch.zeros_like(dense, dtype=dtype) if d is None else d for d in d_queries[: 1 + (scaled is not None)]]
    sums = torch.stack(found)
    dist.all_reduce(sums, group=ranks)
    return [*sums.unbind(0), None][:2]
