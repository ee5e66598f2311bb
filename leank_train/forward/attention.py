"""Scaled attention (the paper's Eq. 1) in its readable form; `fused` computes the same in fewer launches.

It goes through the keys block by block, so that no [rows, all keys] matrix is ever kept.

Shapes of this package: R branches, B documents, M = R / B branches per document, Hq query heads, H KV heads,
G = Hq / H query heads per KV head (the group), n query tokens per branch, T keys, D head_dim. Branch r reads the keys
of document r // M, which are not copied.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leank.kernels import HALF, SCORES_AT_ONCE
from leank_train.forward.plan import Visibility

EMPTY_HEADS = ("drop", "zero")
LEAST_LOGIT = -60.0  # relative to the row's maximum: e^-60 = 9e-27 is lost in the rounding of a sum that holds 1


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys, and the log-sum-exp with which `merge` joins it to other parts.

    Both results are differentiable in q, k and v.

    q: [R, Hq, n, D].
    k, v: [B, H, T, D].
    scale: factor of the logits.
    sees: which keys each row sees.
    block: keys read at a time; None chooses by the kind of device (SCORES_AT_ONCE).

    Returns out [R, Hq, n, D] and lse [R, Hq, n] in float32 (float64 for float64 inputs). A row that sees no key has
    out = 0 and lse = -inf.
    """
    (R, Hq, n, _), (B, H) = q.shape, k.shape[:2]
    M, G = R // B, Hq // H
    # [R, Hq, n, D] -> [B, H, G * M * n, D]: all rows of a group and of a document's branches share one product
    rows = q.reshape(B, M, H, G, n, -1).permute(0, 2, 3, 1, 4, 5).reshape(B, H, G * M * n, -1)
    if block is None:
        block = max(64, SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"] // max(1, rows.shape[:3].numel()))
    out, lse = _PartialAttention.apply(rows, k, v, scale, sees, block)
    out = out.reshape(B, H, G, M, n, -1).permute(0, 3, 1, 2, 4, 5).reshape(R, Hq, n, -1)
    return out, lse.reshape(B, H, G, M, n).permute(0, 3, 1, 2, 4).reshape(R, Hq, n)


class _PartialAttention(torch.autograd.Function):
    """Online softmax over key blocks; the backward pass recomputes each block's probabilities from lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape[:-1] + v.shape[-1:], dtype=dtype)  # [B, H, rows, D]
        top = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)  # running maximum
        total = torch.zeros_like(top)
        for start, stop, masked in sees.blocks(block):
            logits = _logits(q, k, scale, sees, start, stop, masked)
            new = torch.maximum(top, logits.amax(-1))
            safe = new.masked_fill(new == -torch.inf, 0.0)  # -inf - -inf would be NaN
            weights, decay = exp_(logits.sub_(safe[..., None])), exp_(top - safe)
            total = total * decay + weights.sum(-1)
            out = out * decay[..., None] + product(weights, v[:, :, start:stop])
            top = new
        out /= total.masked_fill(total == 0, 1.0)[..., None]
        lse = top + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.sees, ctx.block = scale, sees, block
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows that see nothing get the probability 0
        # d logits = P * (d_out V^T - rowsum(d_out * out) + d_lse)
        shift = (d_lse - (d_out * out).sum(-1))[..., None]
        d_q = torch.zeros_like(q, dtype=out.dtype) if needs_q else None
        d_k = torch.zeros_like(k, dtype=out.dtype) if needs_k else None
        d_v = torch.zeros_like(v, dtype=out.dtype) if needs_v else None
        for start, stop, masked in ctx.sees.blocks(ctx.block):
            weights = exp_(_logits(q, k, ctx.scale, ctx.sees, start, stop, masked).sub_(lse[..., None]))
            if d_v is not None:
                d_v[:, :, start:stop] += product(weights.transpose(-1, -2), d_out.to(v.dtype))
            if d_q is None and d_k is None:
                continue
            d_logits = product(d_out, v[:, :, start:stop].transpose(-1, -2)).add_(shift).mul_(weights).mul_(ctx.scale)
            if d_q is not None:
                d_q += product(d_logits, k[:, :, start:stop])
            if d_k is not None:
                d_k[:, :, start:stop] += product(d_logits.transpose(-1, -2), q)
        d_q, d_k, d_v = (None if d is None else d.to(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v)))
        return d_q, d_k, d_v, None, None, None


def _logits(q: Tensor, k: Tensor, scale: float, sees: Visibility, start: int, stop: int, masked: bool) -> Tensor:
    """Logits times scale [B, H, G * M * n, stop - start], -inf where a row does not see a key."""
    logits = product(q, k[:, :, start:stop].transpose(-1, -2)).mul_(scale)
    if masked:
        seen = sees.mask(start, stop)  # [B, M * n, keys], the same for every head and every member of a group
        logits.unflatten(2, (-1, seen.shape[1])).masked_fill_(~seen[:, None, None], -torch.inf)
    return logits


def exp_(logits: Tensor) -> Tensor:
    """Exp in place, exactly 0 from LEAST_LOGIT down.

    On a CPU, exp takes 20 to 170 times as long where its result underflows (-inf included), and so does every product
    with a result below the normal range. A GPU has no such cost.

    logits: relative to the maximum or the log-sum-exp of their row.
    """
    if logits.is_cuda:
        return logits.exp_()
    return torch.threshold_(logits.clamp_(min=LEAST_LOGIT - 1).exp_(), math.exp(LEAST_LOGIT), 0.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Product of a and b, both [B, H, ., .], summed in at least float32.

    On a GPU, operands of a half-precision model stay in half precision.
    """
    if b.is_cuda and b.dtype in HALF:
        found = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return found.unflatten(0, b.shape[:2])
    dtype = torch.promote_types(b.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out1, out2: [..., n, D].
    lse1, lse2: [..., n], -inf in rows that see no key of the set.

    Returns out and lse over both sets.
    """
    top = torch.maximum(lse1, lse2).detach()  # cancels, so it needs no gradient
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight1, weight2 = (lse1 - top).exp(), (lse2 - top).exp()
    total = weight1 + weight2
    some = total.masked_fill(total == 0, 1.0)
    out = (out1 * weight1[..., None] + out2 * weight2[..., None]) / some[..., None]
    return out, (top + some.log()).masked_fill(total == 0, -torch.inf)


class Keys(NamedTuple):
    """Some keys of one layer, and which of them the rows see.

    k, v: [B, H, T, D].
    dense: the visible keys of sink and window.
    middle: the visible keys between them.
    """

    k: Tensor
    v: Tensor
    dense: Visibility
    middle: Visibility


def scaled_attention(
    q: Tensor, parts: Sequence[Keys], alpha: Tensor, scale: float, empty_heads: str, block: int | None = None
) -> Tensor:
    """Eq. 1 for the answer rows: logits q K^T on sink and window, (q * alpha) K^T on the middle, one softmax over both.

    q: [R, Hq, n, D].
    parts: disjoint sets of keys.
    alpha: [H, D] or [R, H, D], float or bool.
    scale: factor of the logits.
    empty_heads: what a head does with the middle if its alpha is 0 everywhere. "zero" is Eq. 1 as written: the logits
        are 0, so that every middle token keeps the weight e^0. "drop" leaves the middle out, as deployed (section 3.3);
        alpha still gets the gradient that "zero" would give it for the same gradient of the output.
    block: keys read at a time; None chooses by the kind of device (SCORES_AT_ONCE).

    Returns [R, Hq, n, D] in q's type. Raises ValueError for another empty_heads.
    """
    if empty_heads not in EMPTY_HEADS:
        raise ValueError(f"empty_heads={empty_heads!r} is unknown; use drop (as deployed) or zero (Eq. 1 as written)")
    group = q.shape[1] // parts[0].k.shape[1]
    dense = _attend(q, [(part.k, part.v, part.dense) for part in parts], scale, block)
    if not any(part.middle.spans for part in parts):
        return dense[0].to(q.dtype)
    scaled = (q * alpha.repeat_interleave(group, -2).unsqueeze(-2)).to(q.dtype)  # alpha -> [(R,) Hq, 1, D]
    if empty_heads == "zero":
        middle = _attend(scaled, [(part.k, part.v, part.middle) for part in parts], scale, block)
        return merge(*dense, *middle)[0].to(q.dtype)
    empty = (alpha == 0).all(-1)[..., None, None]  # [(R,) H, 1, 1]
    # The middle of a dropped head gives alpha its gradient, and nothing else. Its q and K get none, because alpha = 0
    # multiplies both. Its V and its dense part are detached here.
    values = (torch.where(empty, part.v.detach(), part.v) if part.v.requires_grad else part.v for part in parts)
    middle = _attend(scaled, [(p.k, v, p.middle) for p, v in zip(parts, values, strict=True)], scale, block)
    empty = empty.repeat_interleave(group, -3)  # [(R,) Hq, 1, 1]
    near = torch.where(empty, dense[0].detach(), dense[0]), torch.where(empty[..., 0], dense[1].detach(), dense[1])
    both = merge(*near, *middle)[0]
    return torch.where(empty, dense[0] + (both - both.detach()), both).to(q.dtype)


def _attend(
    q: Tensor, parts: Sequence[tuple[Tensor, Tensor, Visibility]], scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    """`partial_attention` over several parts, merged; a part that no row sees costs nothing."""
    seen = [part for part in parts if part[2].spans] or parts[:1]
    out, lse = partial_attention(q, *seen[0][:2], scale, seen[0][2], block)
    for k, v, sees in seen[1:]:
        out, lse = merge(out, lse, *partial_attention(q, k, v, scale, sees, block))
    return out, lse
