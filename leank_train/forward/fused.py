"""Attention of one pass over all its keys in one autograd node, with few launches.

The plan of the pass says what is read (`leank_train.forward.plan`). A layer is a handful of products around a softmax.
The library's flash kernel reads the long ranges that every row sees whole. In the softmax, one column stands for such a
range: its log-sum-exp. Eq. 1 in dense matrices, with which the tests compare it, is tests/oracles/eq1.py.

Shapes of this package: R branches, B documents, M = R / B branches per document, Hq query heads, H KV heads,
G = Hq / H query heads per KV head (the group), n query tokens per branch, T keys, D head_dim. Branch r reads the keys
of document r // M, which are not copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from leank.eval.cache.attention.softmax import PLAIN, Softmax, beside_sinks
from leank.kernels import HALF, SCORES_AT_ONCE, flash_backward, flash_forward, flash_takes
from leank_train.forward.plan import JoinedPieces, KeyBlock, Layout, Piece, Plan

EMPTY_HEADS = ("drop", "zero")
LEAST_LOGIT = -60.0  # relative to the row's maximum: e^-60 = 9e-27 is lost in the rounding of a sum that holds 1
FLASH_FROM = 512  # keys; the flash kernel reads ranges of at least so many, shorter ones cost less in a joint product


def side_by_side(x: Tensor, documents: int) -> Tensor:
    """Keys or values of branches [R, H, T, D] -> [B, H, M * T, D], the branches of a document one after the other."""
    R, H, T, D = x.shape
    return x.reshape(documents, R // documents, H, T, D).transpose(1, 2).reshape(documents, H, -1, D)


def fused_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    plan: Plan,
    scale: float,
    alpha: Tensor | None = None,
    empty_heads: str = "zero",
    limit: int | None = None,
    ranks: dist.ProcessGroup | None = None,
    flash_from: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Softmax attention over the pieces of a plan, Eq. 1 where alpha is given.

    q: [R, Hq, n, D].
    keys, values: [B, H, T, D] per part of the plan; T differs between parts. The flash kernel needs equal D of both.
    plan: which ranges of the parts the rows read, and with which query.
    scale: factor of the logits; alpha: [H, D], scales the queries of scaled pieces.
    empty_heads: what a head does with the middle if its alpha is 0 everywhere. "zero" is Eq. 1 as written: the logits
        are 0, so that every middle token keeps the weight e^0. "drop" leaves the middle out, as deployed (section 3.3);
        alpha still gets the gradient that "zero" would give it for the same gradient of the output.
    limit: attention scores held at a time, beyond which keys are read in blocks; None chooses by device.
    ranks: processes that hold a share of part 0 each, and otherwise the same. All get the output and the gradient that
        one process with all of part 0 would get.
    flash_from: keys from which the flash kernel reads a piece; None chooses by device and type.
    softmax: how logits become weights. It gets no gradient. The flash kernel has no soft-capped logits.
    Returns [R, Hq, n, D] in q's type.
    """
    (R, Hq, n, D), (B, H) = q.shape, keys[0].shape[:2]
    M, G = R // B, Hq // H
    dense = q.reshape(B, M, H, G, n, D).permute(0, 2, 3, 1, 4, 5).reshape(B, H, G * M * n, D)
    factor, empty = None, None
    if alpha is not None and (ranks or plan.scales):  # all ranks must do the same, whatever their shares hold
        factor = alpha[:, None]  # [H, 1, D]
        if empty_heads == "drop":
            empty = (factor == 0).all(-1, keepdim=True)  # [H, 1, 1]: heads that drop the middle
    if flash_from is None and flash_takes(q):
        flash_from = FLASH_FROM
    if keys[0].requires_grad or values[0].requires_grad or softmax.softcap is not None:
        flash_from = None  # with the flash kernel, backward knows the gradient of q alone
    sinks = None
    if softmax.sink_logits is not None:  # [H, G * M * n, 1]
        wide = torch.promote_types(q.dtype, torch.float32)
        sinks = softmax.sink_logits.detach().to(wide).view(H, G, 1).repeat_interleave(M * n, 1)
    limit = limit or SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"]
    layout = plan.layout(max(64, limit // max(1, dense.shape[:3].numel())), flash_from, ranks is not None)
    out = _Fused.apply(
        dense, factor, empty, scale, softmax.softcap, sinks, layout, ranks, M * n, len(keys), *keys, *values
    )
    return out.reshape(B, H, G, M, n, -1).permute(0, 3, 1, 2, 4, 5).reshape(R, Hq, n, -1)


def exp_(logits: Tensor) -> Tensor:
    """Exp in place, exactly 0 from LEAST_LOGIT down, of logits relative to the maximum or log-sum-exp of their row.

    On a CPU, exp takes 20 to 170 times as long where its result underflows (-inf included), and so does every product
    with a result below the normal range. A GPU has no such cost.
    """
    if logits.is_cuda:
        return logits.exp_()
    return torch.threshold_(logits.clamp_(min=LEAST_LOGIT - 1).exp_(), math.exp(LEAST_LOGIT), 0.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Product of a and b [B, H, ., .], summed in at least float32; operands of half precision stay such on a GPU."""
    if b.is_cuda and b.dtype in HALF:
        found = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return found.unflatten(0, b.shape[:2])
    dtype = torch.promote_types(b.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


def _read(tensors: Sequence[Tensor], joined: JoinedPieces) -> Tensor:
    """The keys or values of joined pieces, [B, H, width, D]."""
    found = [tensors[p.part][:, :, p.start : p.stop] for p in joined.pieces]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


class _Fused(torch.autograd.Function):
    """Online softmax over the blocks; the backward pass recomputes each block's probabilities from lse.

    A head that drops the middle (`empty`) has two softmaxes. The deployed one, without the middle, makes the output and
    all gradients but that of alpha. The other one, with the middle at logits of 0, makes alpha's straight-through
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, factor: Tensor | None, empty: Tensor | None, scale: float, softcap: float | None,
        sinks: Tensor | None, layout: Layout, ranks: dist.ProcessGroup | None, folded: int, parts: int, *kv: Tensor,
    ) -> Tensor:  # fmt: skip
        keys, values = kv[:parts], kv[parts:]
        scaled = None if factor is None else (dense * factor).to(dense.dtype)
        state, full, rests = None, None, []
        for number, block in enumerate(layout.blocks):
            if ranks and number == layout.shares:
                state = _over_ranks(state, dense, values[0], ranks)
                full = None if empty is None else _over_ranks(full, dense, values[0], ranks)
            found = []
            for p in block.flash:
                k, v = (x[p.part][:, :, p.start : p.stop] for x in (keys, values))
                found.append(flash_forward(scaled if p.scaled else dense, k, v, scale))  # type: ignore[arg-type]
            rests.append([rest for _, _, rest in found])
            outs, lses = [out for out, _, _ in found], [lse[..., None] for _, lse, _ in found]
            logits = _logits(dense, scaled, keys, block, scale, softcap, folded, lses)
            deployed = logits if empty is None else logits.masked_fill(empty & block.middle(logits), -torch.inf)
            state = _accumulate(state, deployed, values, block, outs)
            if empty is not None:
                full = _accumulate(full, logits, values, block, outs)
        assert state is not None
        out, lse = _finish(*state, sinks)
        both, lse_both = _finish(*full, sinks) if full is not None else (None, None)
        ctx.save_for_backward(dense, scaled, factor, empty, out, lse, both, lse_both, *kv)
        ctx.scale, ctx.softcap, ctx.layout, ctx.folded, ctx.parts = scale, softcap, layout, folded, parts
        ctx.ranks, ctx.rests = ranks, rests
        return out.to(dense.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        dense, scaled, factor, empty, out, lse, both, lse_both, *kv = ctx.saved_tensors
        needs, keys, values, scale = ctx.needs_input_grad, kv[: ctx.parts], kv[ctx.parts :], ctx.scale
        d_kv: list[Tensor | None] = [None] * len(kv)
        d_queries: list[Tensor | None] = [None, None]  # of plain and of scaled queries
        delta = (d_out * out).sum(-1, keepdim=True)
        delta_both = delta if both is None else (d_out * both).sum(-1, keepdim=True)
        # the flash kernel needs out and lse of the softmax that gives the gradient: for scaled queries, with the middle
        wholes = [(out, lse), (out, lse) if both is None else (both, lse_both)]
        if ctx.layout.flashes:
            wholes = [(x.to(dense.dtype), y.squeeze(-1)) for x, y in wholes]
        for number, (block, rests) in enumerate(zip(ctx.layout.blocks, ctx.rests, strict=True)):
            if ctx.ranks and number == ctx.layout.shares:
                d_queries = _summed(d_queries, dense, scaled, out.dtype, ctx.ranks)
            if block.joined:
                logits = _logits(dense, scaled, keys, block, scale, ctx.softcap, ctx.folded)
                spreads = [product(d_out, _read(values, joined).mT) for joined in block.spreads]
                d_weights = torch.cat(spreads, -1) if len(spreads) > 1 else spreads[0]
                weights, d_logits, d_taught = _through_softmax(
                    logits, d_weights, block, empty, (delta, lse), (delta_both, lse_both), scale, ctx.softcap
                )
                d_logits = _operand(d_logits, dense)
                d_taught = d_logits if d_taught is None else _operand(d_taught, dense)
                at = 0
                for joined in block.joined:
                    d_joined = (d_taught if joined.scaled else d_logits)[..., at : at + joined.width]
                    if joined.scaled or needs[0]:
                        _add(d_queries, joined.scaled, product(d_joined, _read(keys, joined)))
                    for p in joined.pieces:
                        columns = slice(at, at := at + p.width)
                        for row, left, right in (
                            (p.part, d_logits, scaled if p.scaled else dense), (ctx.parts + p.part, weights, d_out)
                        ):  # fmt: skip
                            if needs[10 + row]:
                                _add(d_kv, row, product(left[..., columns].mT, right), p, kv[row].shape[2])
            for p, rest in zip(block.flash, rests, strict=True):
                if p.scaled or needs[0]:
                    k, v = (x[p.part][:, :, p.start : p.stop] for x in (keys, values))
                    query, (whole, total) = scaled if p.scaled else dense, wholes[p.scaled]
                    d_q = flash_backward(d_out, query, k, v, whole, total, scale, rest)
                    _add(d_queries, p.scaled, d_q.to(out.dtype))
        grads = [None if d is None else d.to(x.dtype) for d, x in zip(d_kv, kv, strict=True)]
        return *_through_factor(d_queries, dense, factor, needs), *[None] * 8, *grads


def _through_softmax(
    logits: Tensor, d_weights: Tensor, block: KeyBlock, empty: Tensor | None, deployed: tuple[Tensor, Tensor],
    taught: tuple[Tensor, Tensor], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Weights, gradient of the logits, and the gradient that teaches alpha if heads are empty; overwrites its inputs.

    deployed, taught: rowsum(d_out * out) and lse of the softmax without and with the middle of empty heads.
    """
    delta, lse = deployed
    slope: float | Tensor = scale
    if softcap is not None:  # d tanh(x) = 1 - tanh(x)^2, which is 0 where a row does not see a key
        slope = (logits / softcap).clamp_(min=-1).square_().neg_().add_(1).mul_(scale)
    if empty is None:
        weights = exp_(logits.sub_(lse))
        return weights, d_weights.sub_(delta).mul_(weights).mul_(slope), None
    hidden = empty & block.middle(logits)[: logits.shape[-1]]
    d_taught = (d_weights - taught[0]) * exp_(logits - taught[1]) * slope
    weights = exp_(logits.masked_fill_(hidden, -torch.inf).sub_(lse))
    d_logits = d_weights.sub_(delta).mul_(weights).mul_(slope)
    return weights, d_logits, torch.where(hidden, d_taught, d_logits)


def _through_factor(
    d_queries: Sequence[Tensor | None], dense: Tensor, factor: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of dense and factor, from those of plain queries (dense) and of scaled ones (dense * factor)."""
    (d_dense, d_scaled), d_factor = d_queries, None
    if d_scaled is not None:
        assert factor is not None
        d_factor = (d_scaled * dense).sum_to_size(factor.shape).to(factor.dtype) if needs[1] else None
        if needs[0]:
            d_dense = d_scaled * factor if d_dense is None else d_dense.addcmul_(d_scaled, factor)
    return None if d_dense is None else d_dense.to(dense.dtype), d_factor


def _add(sums: list[Tensor | None], at: int, found: Tensor, piece: Piece | None = None, length: int = 0) -> None:
    """Add `found` to sums[at]: to the rows of a piece of `length` keys, or to all."""
    before = sums[at]
    if piece is None or piece.width == length:
        sums[at] = found if before is None else before.add_(found)
        return
    if before is None:
        before = sums[at] = found.new_zeros(*found.shape[:2], length, found.shape[3])
    before[:, :, piece.start : piece.stop] += found


def _logits(
    dense: Tensor, scaled: Tensor | None, keys: Sequence[Tensor], block: KeyBlock, scale: float,
    softcap: float | None, folded: int, lses: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Logits times scale, soft-capped, -inf where a row does not see a key, then the lses.

    Returns [B, H, G * M * n, joined keys + lses].
    """
    found = []
    for joined in block.joined:
        logits = product(scaled if joined.scaled else dense, _read(keys, joined).mT)  # type: ignore[arg-type]
        if softcap is not None:
            logits = logits.mul_(scale / softcap).tanh_().mul_(softcap / scale)
        if joined.hidden is not None:
            logits.unflatten(2, (-1, folded)).masked_fill_(joined.hidden, -torch.inf)
        found.append(logits)
    found += [lse / scale for lse in lses]
    return (torch.cat(found, -1) if len(found) > 1 else found[0]).mul_(scale)


def _operand(x: Tensor, model: Tensor) -> Tensor:
    """X in the type in which `product` multiplies it with the model's tensors: one cast instead of one per piece."""
    return x.to(model.dtype) if model.is_cuda and model.dtype in HALF else x


def _accumulate(
    state: tuple[Tensor, Tensor, Tensor] | None, logits: Tensor, values: Sequence[Tensor], block: KeyBlock,
    outs: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Add a block to the online softmax: (sum of weights * V, sum of weights, maximum); outs: of its flash pieces."""
    top = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min / 4)  # -inf - -inf would be NaN
    top = top if state is None else torch.maximum(top, state[2])
    weights = exp_(logits - top)
    total, out, at = weights.sum(-1, keepdim=True), None, 0
    operand = _operand(weights, values[0])
    for joined in block.spreads:
        found = product(operand[..., at : (at := at + joined.width)], _read(values, joined))
        out = found if out is None else out.add_(found)
    for flash in outs:
        weight = weights[..., at : (at := at + 1)]
        out = weight * flash if out is None else out.addcmul_(weight, flash)
    assert out is not None
    if state is not None:
        decay = exp_(state[2] - top)
        total, out = total + state[1] * decay, out + state[0] * decay
    return out, total, top


def _finish(out: Tensor, total: Tensor, top: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, which counts the sinks [H, G * M * n, 1], keys whose values are 0.

    A row that sees no key has the output 0 and a finite lse, so that its weights are 0.
    """
    total = total.clamp_(min=torch.finfo(total.dtype).tiny)
    out, lse = out / total, total.log().add_(top)
    return beside_sinks(out, lse, sinks), lse if sinks is None else torch.logaddexp(lse, sinks)


def _over_ranks(
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


def _summed(
    d_queries: list[Tensor | None], dense: Tensor, scaled: Tensor | None, dtype: torch.dtype, ranks: dist.ProcessGroup
) -> list[Tensor | None]:
    """Gradients of plain and of scaled queries, summed over the ranks in one message."""
    found = [torch.zeros_like(dense, dtype=dtype) if d is None else d for d in d_queries[: 1 + (scaled is not None)]]
    sums = torch.stack(found)
    dist.all_reduce(sums, group=ranks)
    return [*sums.unbind(0), None][:2]
