"""Dense causal attention for prompts: SDPA on real tokens only, so that no [T, T] mask is ever built for padding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Causal attention in which the last query is the last key: q [B, Hq, Q, D], k, v [B, H, T, D]."""
    gqa, new, length = q.shape[1] != k.shape[1], q.shape[2], k.shape[2]
    if new == 1:
        return scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=gqa)
    if new == length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    return scaled_dot_product_attention(q, k, v, causal_lower_right(new, length), scale=scaling, enable_gqa=gqa)


def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None = None, real: Tensor | None = None) -> Tensor:
    """Causal attention of the last Q of T columns.

    q [B, Hq, Q, D]; k, v [B, H, T, D]; real [B, T] bool, False = padding, None = all real. Returns [B, Q, Hq, D],
    zero where the query is padding. Rows of equal padding are computed together, without their padding.
    """
    if real is None or bool(real.all()):
        return _causal(q, k, v, scaling).transpose(1, 2)
    new, device = q.shape[2], q.device
    out = torch.zeros_like(q)
    patterns, which = np.unique(real.cpu().numpy(), axis=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        rows = torch.from_numpy(np.nonzero(which.reshape(-1) == i)[0]).to(device)
        columns, queries = (torch.from_numpy(np.nonzero(p)[0]).to(device) for p in (pattern, pattern[-new:]))
        if len(queries):
            q_real = q[rows][:, :, queries]
            out_rows = torch.zeros_like(q[rows])
            out_rows[:, :, queries] = _causal(q_real, k[rows][:, :, columns], v[rows][:, :, columns], scaling)
            out[rows] = out_rows
    return out.transpose(1, 2)
