"""The slow, obvious form of `leank_train.forward.fused.fused_attention`: Eq. 1 in dense matrices."""

import torch
from torch import Tensor


def eq1(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, scale: float, plain: Tensor, middle: Tensor,
    empty_heads: str = "zero", mean: Tensor | None = None, sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Softmax over q k on the plain keys and (q * alpha) k on the middle, [R, Hq, n, D].

    q: [R, Hq, n, D].
    k, v: [R or 1, H, T, D].
    alpha: [H, D]; None for full attention.
    plain, middle: bool [R or 1, 1, n, T], disjoint, which keys each row reads in which way; each row reads one or more.
    empty_heads: as in `fused_attention`.
    mean: [H, D], the middle's keys are alpha * k + (1 - alpha) * mean; 0 by default.
    sinks: [Hq], a logit of each query head that the softmax counts in its denominator alone.
    softcap: c, with which a logit x is c tanh(x / c).
    """

    def softmax(logits: Tensor, seen: Tensor) -> Tensor:
        logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:-1], 1)], -1)
        return logits.softmax(-1)[..., : seen.shape[-1]]

    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if alpha is None:
        return softmax(q @ k.mT, plain | middle) @ v
    alpha, mean = (None if x is None else x.repeat_interleave(group, 0)[:, None] for x in (alpha, mean))  # [Hq, 1, D]

    def literal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scaled = k * alpha if mean is None else k * alpha + (1 - alpha) * mean
        return softmax(torch.where(middle, q @ scaled.mT, q @ k.mT), plain | middle) @ v

    if empty_heads == "zero":
        return literal(q, k, v)
    empty = (alpha == 0).all(-1, keepdim=True)  # [Hq, 1, 1]
    without = softmax(q @ k.mT, plain) @ v
    # Straight-through: the value is `without`; alpha, and alpha alone, gets the gradient of Eq. 1 as written.
    to_alpha = literal(q.detach(), k.detach(), v.detach())
    return torch.where(empty, without + (to_alpha - to_alpha.detach()), literal(q, k, v))
