"""Scaled attention (the paper's Eq. 1), blockwise over keys, so that no [rows, all keys] matrix is ever kept.

Shapes: R branches (rows of a batch of queries), B documents, M = R / B branches per document, Hq query heads, H KV
heads, G = Hq / H (the group), n query tokens per branch, T keys, D head_dim. Keys of B documents serve queries of
R = B * M branches without being copied: branch r reads document r // M.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leank_train.forward.prefix import to_device

ZONES = ("causal", "dense", "middle")
EMPTY_HEADS = ("drop", "zero")
HALF = (torch.bfloat16, torch.float16)
LEAST_LOGIT = -60.0  # below its row's maximum: e^-60 = 9e-27 is far below the rounding error of a sum that holds 1
SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**27}  # attention scores held at a time, which sets the size of a key block


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: q_positions [B, M * n], k_positions [B, T] (-1 = padding), and the zone.

    Position i sees position j <= i: all of them ("causal"), those with j < sink or i - j < window ("dense"), or the
    others ("middle"). The window slides with every position, unless start [B, M * n] says where each query's window
    begins: then those with j < sink or j >= start are "dense". `spans` are (start, stop, masked) ranges of key indices:
    keys in no span are seen by nobody, and only masked spans differ from row to row. Build it with `visibility`, once
    per pass; every layer uses it.
    """

    q_positions: Tensor
    k_positions: Tensor
    zone: str
    sink: int
    window: int
    spans: tuple[tuple[int, int, bool], ...]
    start: Tensor | None = None

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether position i sees position j, broadcast; asks for zone, sink and window alone."""
        causal = (j >= 0) & (j <= i)
        if self.zone == "causal":
            return causal
        recent = i - j < self.window if self.start is None else j >= to_device(self.start, i.device).view(i.shape)
        dense = (j < self.sink) | recent
        return causal & (dense if self.zone == "dense" else ~dense)

    def mask(self, start: int, stop: int) -> Tensor:
        """Bool [B, M * n, stop - start], True = seen."""
        return self.sees(self.q_positions[:, :, None], self.k_positions[:, None, start:stop])

    def blocks(self, block: int) -> Iterator[tuple[int, int, bool]]:
        """The spans, cut into pieces of at most `block` keys."""
        for start, stop, masked in self.spans:
            for first in range(start, stop, block):
                yield first, min(first + block, stop), masked


def visibility(
    q_positions: Tensor, k_positions: Tensor, zone: str, sink: int = 0, window: int = 1, start: Tensor | None = None
) -> Visibility:
    """Plan one zone for queries at q_positions [R, n] and keys at k_positions [B, T] (-1 = padding); B divides R.

    start: first position of each query's window [R, n], None = the window slides and `window` says how long it is.

    The zones "dense" and "middle" of the same sink (>= 0) and window (>= 1) are disjoint and together are "causal".
    Raises ValueError for an unknown zone, or a sink or window out of range.
    """
    if zone not in ZONES:
        raise ValueError(f"zone={zone!r} is unknown; use one of {', '.join(ZONES)}")
    if sink < 0 or window < 1:
        raise ValueError(f"sink={sink}, window={window}: the sink must be at least 0, the window (self included) 1")
    folded = q_positions.reshape(k_positions.shape[0], -1)  # [B, M * n]
    plan = Visibility(folded, k_positions, zone, sink, window, (), None if start is None else start.view(folded.shape))
    if start is not None:
        seen = plan.sees(folded[:, :, None], k_positions[:, None])  # [B, M * n, T]
        return replace(plan, spans=_spans(~seen.any(1), seen.all(1)))
    low, high = folded.amin(1, keepdim=True), folded.amax(1, keepdim=True)  # [B, 1]
    # A key is seen by an interval of query positions, so the lowest and the highest row decide for those between.
    at_low, at_high = plan.sees(low, k_positions), plan.sees(high, k_positions)  # [B, T]
    unseen = ~at_high
    if zone == "dense":  # a key can lie within the window of rows between the lowest and the highest only
        unseen &= (k_positions < 0) | (k_positions > high) | (low - k_positions >= window)
    return replace(plan, spans=_spans(unseen, at_low & at_high))


def _spans(unseen: Tensor, seen: Tensor) -> tuple[tuple[int, int, bool], ...]:
    """(start, stop, masked) of the keys that any query sees; unseen, seen [B, T]: by no query, by all of them."""
    kind = torch.where(unseen.all(0), 0, torch.where(seen.all(0), 1, 2))
    kinds, counts = (x.tolist() for x in torch.unique_consecutive(kind, return_counts=True))
    stops = torch.tensor(counts).cumsum(0).tolist()
    return tuple((b - c, b, k == 2) for k, c, b in zip(kinds, counts, stops, strict=True) if k)


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible part of the keys, and the log-sum-exp that lets parts be merged.

    q [R, Hq, n, D]; k, v [B, H, T, D]; scale multiplies the logits; block: keys at a time (None: by memory).
    Returns out [R, Hq, n, D] and lse [R, Hq, n], in float32 (float64 for float64 inputs); a row that sees no key has
    out = 0 and lse = -inf. Differentiable in q, k, v, through out and lse; only those of k, v that require a gradient
    cost memory for one.
    """
    (R, Hq, n, _), (B, H) = q.shape, k.shape[:2]
    M, G = R // B, Hq // H
    # [R, Hq, n, D] -> [B, H, G * M * n, D]: the group's and the branches' rows read the same keys in one product
    rows = q.reshape(B, M, H, G, n, -1).permute(0, 2, 3, 1, 4, 5).reshape(B, H, G * M * n, -1)
    if block is None:
        block = max(64, SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"] // max(1, rows.shape[:3].numel()))
    out, lse = _PartialAttention.apply(rows, k, v, scale, sees, block)
    out = out.reshape(B, H, G, M, n, -1).permute(0, 3, 1, 2, 4, 5).reshape(R, Hq, n, -1)
    return out, lse.reshape(B, H, G, M, n).permute(0, 3, 1, 2, 4).reshape(R, Hq, n)


def partial_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """`partial_attention` by one dense softmax over repeated keys; `block` has no effect. The oracle of its tests."""
    (R, Hq, n, _), (B, H, T, _) = q.shape, k.shape
    seen = sees.mask(0, T).reshape(R, 1, n, T)
    k, v = (x.repeat_interleave(R // B, 0).repeat_interleave(Hq // H, 1) for x in (k, v))
    some = seen.any(-1)  # [R, 1, n]
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf).masked_fill(~some[..., None], 0.0)
    out = (logits.softmax(-1) @ v).masked_fill(~some[..., None], 0.0)
    return out, logits.logsumexp(-1).masked_fill(~some, -torch.inf)


class _PartialAttention(torch.autograd.Function):
    """Online softmax over key blocks; the backward pass computes each block's probabilities anew from lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int) -> Any:
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
        lse = top + total.masked_fill(total == 0, 1.0).log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.sees, ctx.block = scale, sees, block
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
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
    """Scaled logits [B, H, G * M * n, stop - start], -inf where a row does not see a key."""
    logits = product(q, k[:, :, start:stop].transpose(-1, -2)).mul_(scale)
    if masked:
        seen = sees.mask(start, stop)  # [B, M * n, keys], the same for every head and every member of a group
        logits.unflatten(2, (-1, seen.shape[1])).masked_fill_(~seen[:, None, None], -torch.inf)
    return logits


def exp_(logits: Tensor) -> Tensor:
    """Exp in place, of logits relative to the maximum or the log-sum-exp of their row; exactly 0 from LEAST_LOGIT down.

    A CPU takes 20 to 170 times as long for exp where the result underflows (-inf included), and for every product with
    a result below the normal range; a GPU does not.
    """
    if logits.is_cuda:
        return logits.exp_()
    return torch.threshold_(logits.clamp_(min=LEAST_LOGIT - 1).exp_(), math.exp(LEAST_LOGIT), 0.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b over [B, H, ., .] in at least float32; on a GPU, operands of a half-precision model stay in its type."""
    if b.is_cuda and b.dtype in HALF:
        found = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return found.unflatten(0, b.shape[:2])
    dtype = torch.promote_types(b.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


def flash_takes(q: Tensor) -> bool:
    """Whether the library's flash kernel takes queries like q [..., D]: half precision on a GPU of 8.0 or newer."""
    if not q.is_cuda or q.dtype not in HALF or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Attention by the library's flash kernel: out [B, Hq, n, D] in q's type, lse [B, Hq, n], and what backward wants.

    q [B, Hq, n, D]; k, v [B, H, T, D], strided as they like; on a CPU Hq = H. causal: n = T. Unlike
    F.scaled_dot_product_attention it hands out the log-sum-exp (float32, float64 for float64), so that parts can be
    merged; for few rows it splits the keys among the GPU's processors by itself.
    """
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
        return out, lse, ()
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1], tuple(found[2:8])  # lengths (None, None, n, T) and the state of an unused dropout


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, rest: tuple[Any, ...]
) -> Tensor:
    """Gradient of q through the keys k alone, given out and lse over all keys (inf: the row sees none).

    Exact, part by part: d logits = P * (d_out V^T - rowsum(d_out * out)) with P = exp(logits - lse) asks for no more.
    d_out and out as q; rest: of `flash_forward` for the same q, k, v. The kernel makes the gradients of k and v as
    well: they are dropped.
    """
    if not q.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return kernel(d_out, q, k, v, out, lse, 0.0, False, scale=scale)[0]
    *lengths, seed, offset = rest
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    return kernel(d_out, q, k, v, out, lse.contiguous(), *lengths, 0.0, False, seed, offset, scale=scale)[0]


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: outs [..., n, D], lses [..., n], either may be -inf."""
    top = torch.maximum(lse1, lse2).detach()  # cancels, so it needs no gradient
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight1, weight2 = (lse1 - top).exp(), (lse2 - top).exp()
    total = weight1 + weight2
    some = total.masked_fill(total == 0, 1.0)
    out = (out1 * weight1[..., None] + out2 * weight2[..., None]) / some[..., None]
    return out, (top + some.log()).masked_fill(total == 0, -torch.inf)


class Keys(NamedTuple):
    """A part of the keys of one layer: k, v [B, H, T, D] and what the queries see of it, the middle apart."""

    k: Tensor
    v: Tensor
    dense: Visibility
    middle: Visibility


def scaled_attention(
    q: Tensor, parts: Sequence[Keys], alpha: Tensor, scale: float, empty_heads: str, block: int | None = None
) -> Tensor:
    """Eq. 1 for the answer rows: logits q K^T on sink and window, (q * alpha) K^T on the middle, one softmax over both.

    q [R, Hq, n, D]; parts: disjoint keys; alpha [H, D] or [R, H, D], float or bool; returns [R, Hq, n, D] like q.
    empty_heads says what a head whose alpha is 0 everywhere does with the middle: "zero", Eq. 1 as written, leaves
    logits of 0 and so a weight on every middle token; "drop" leaves the middle out, as deployed (section 3.3). Dropped
    heads still get a gradient to alpha: the one that "zero" gives to alpha, for the same gradient of the output.
    Raises ValueError for another empty_heads.
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
    # What a dropped head does with the middle may teach alpha, nothing else. Its q and K get no gradient there, as
    # alpha = 0 multiplies both; its V and its dense part are cut off here.
    values = (torch.where(empty, part.v.detach(), part.v) if part.v.requires_grad else part.v for part in parts)
    middle = _attend(scaled, [(p.k, v, p.middle) for p, v in zip(parts, values, strict=True)], scale, block)
    empty = empty.repeat_interleave(group, -3)  # [(R,) Hq, 1, 1]
    near = torch.where(empty, dense[0].detach(), dense[0]), torch.where(empty[..., 0], dense[1].detach(), dense[1])
    both = merge(*near, *middle)[0]
    return torch.where(empty, dense[0] + (both - both.detach()), both).to(q.dtype)


def _attend(
    q: Tensor, parts: Sequence[tuple[Tensor, Tensor, Visibility]], scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    """partial_attention over several parts, merged; parts of which nothing is seen cost nothing."""
    seen = [part for part in parts if part[2].spans] or parts[:1]
    out, lse = partial_attention(q, *seen[0][:2], scale, seen[0][2], block)
    for k, v, sees in seen[1:]:
        out, lse = merge(out, lse, *partial_attention(q, k, v, scale, sees, block))
    return out, lse
