"""The slow, obvious form of `leank_train.forward.attention.partial_attention`."""

import torch
from torch import Tensor

from leank_train.forward.plan import Visibility


def partial_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Visibility, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """`partial_attention` by one dense softmax over repeated keys; `block` has no effect."""
    (R, Hq, n, _), (B, H, T, _) = q.shape, k.shape
    seen = sees.mask(0, T).reshape(R, 1, n, T)
    k, v = (x.repeat_interleave(R // B, 0).repeat_interleave(Hq // H, 1) for x in (k, v))
    some = seen.any(-1)  # [R, 1, n]
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf).masked_fill(~some[..., None], 0.0)
    out = (logits.softmax(-1) @ v).masked_fill(~some[..., None], 0.0)
    return out, logits.logsumexp(-1).masked_fill(~some, -torch.inf)
