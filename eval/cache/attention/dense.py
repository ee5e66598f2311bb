"""Dense causal attention for prompts: SDPA on real tokens only, so that no [T, T] mask is ever built for padding.

cuDNN's attention, SDPA's first choice on recent GPUs, plans for tens of milliseconds whenever a shape is new. Only
calls that are long enough to gain by it may use it (`leank.kernels.cudnn_pays`).
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from leank.eval.cache.attention.softmax import PLAIN, Softmax, written_out
from leank.eval.cache.storage.segment import round_up
from leank.eval.cache.storage.upload import upload
from leank.kernels import cudnn_forward, cudnn_pays, flash_forward, flash_takes

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Calls that use one of cuDNN's plans: those of all layers, and of later prompts that have the same shape. 84 calls are
# 2 to 3 prompts of an 8B decoder. A call then gains from 5e11 operations on.
CALLS_PER_PLAN = 84
ALIGNED = 8  # numbers: rows of a mask begin at multiples of it where SDPA is to take the mask without a copy


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, softmax: Softmax = PLAIN, lse: Tensor | None = None
) -> Tensor:
    """Causal attention in which the last query is the last key; q [B, Hq, Q, D], k, v [B, H, T, D], lse of `attend`."""
    (_, q_heads, new, _), length = q.shape, k.shape[2]
    if lse is not None:
        out, found = _with_lse(q, k, v, scaling)
        lse.copy_(found)
        return out
    if not softmax.plain:
        return _beyond_plain(q, k, v, scaling, softmax)
    if new == 1:
        return latest(q, k, v, scaling)
    gqa = q_heads != k.shape[1]
    with nullcontext() if cudnn_pays(q, length, CALLS_PER_PLAN) else sdpa_kernel(WITHOUT_PLANS):
        if new == length:
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        return scaled_dot_product_attention(q, k, v, causal_lower_right(new, length), scale=scaling, enable_gqa=gqa)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp [B, Hq, Q] from the kernel that `_causal` would run."""
    new, length = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if not flash_takes(q):  # such as on a CPU, for tests
        logits = (q.unflatten(1, (k.shape[1], -1)).float() @ k[:, :, None].float().mT * scale).flatten(1, 2)
        hidden = torch.ones(new, length, dtype=torch.bool, device=q.device).triu(length - new + 1)
        return _causal(q, k, v, scaling), logits.masked_fill_(hidden, -torch.inf).logsumexp(-1)
    if new == length and cudnn_pays(q, length, CALLS_PER_PLAN):
        return cudnn_forward(q, k, v, scale)
    return flash_forward(q, k, v, scale, causal=True)[:2]  # whose last query is the last key, too


def _beyond_plain(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, softmax: Softmax) -> Tensor:
    """Causal attention with soft-capped logits or attention sinks.

    A sink divides the output by 1 + exp(sink - lse), so the flash kernel's log-sum-exp is all that it needs.
    """
    if softmax.softcap is not None or softmax.sink_logits is None or not flash_takes(q):
        return written_out(q, k, v, scaling, softmax)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out, lse, _ = flash_forward(q, k, v, scale, causal=q.shape[2] > 1)
    share = (lse - softmax.sink_logits.to(lse.dtype)[:, None]).sigmoid()
    return (out * share[..., None]).to(q.dtype)


def latest(q: Tensor, k: Tensor, v: Tensor, scaling: float | None = None, real: Tensor | None = None) -> Tensor:
    """Attention of the last column's query alone.

    q: [B, Hq, 1, D]
    k, v: [B, H, T, D]
    scaling: factor of the logits, None = 1 / sqrt(D)
    real: [B, T] bool, False = padding, None = no padding; the query's own column always counts as real

    Returns [B, Hq, 1, D].
    """
    with sdpa_kernel(WITHOUT_PLANS):
        if real is None and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
            # Flash itself turns the heads of a group into query rows; only then does it split the keys over the GPU.
            return scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        grouped = q[:, :, 0].unflatten(1, (k.shape[1], -1))  # [B, H, G, D]: no kernel repeats K and V for a group
        bias = None if real is None else _bias(real, q.dtype)
        return scaled_dot_product_attention(grouped, k, v, bias, scale=scaling).flatten(1, 2)[:, :, None]


def _bias(real: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA adds to the logits of one query, [B, 1, 1, T]: -inf in padding.

    The last column counts as real, so that the output of a padding query is finite, too.
    """
    batch, length = real.shape
    bias = torch.zeros(batch, 1, 1, round_up(length, ALIGNED), dtype=dtype, device=real.device)
    bias[:, 0, 0, : length - 1].masked_fill_(~real[:, :-1], -torch.inf)
    return bias[..., :length]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    real: Tensor | None = None,
    softmax: Softmax = PLAIN,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last Q of T columns; rows of equal padding are computed together, without their padding.

    q: [B, Hq, Q, D]
    k, v: [B, H, T, D]
    scaling: factor of the logits, None = 1 / sqrt(D)
    real: [B, T] bool, False = padding, None = no padding
    softmax: the model's
    lse: [B, Hq, Q] float32 or None; takes each query's log-sum-exp, and stays as it is where the query is padding; the
        softmax must be plain

    Returns [B, Q, Hq, D], zero where the query is padding.
    """
    on_host = None if real is None else real.cpu().numpy()
    if on_host is None or on_host.all():
        return _causal(q, k, v, scaling, softmax, lse).transpose(1, 2)
    out = torch.zeros_like(q)
    starts = on_host.shape[1] - on_host.sum(1)
    if (on_host == (np.arange(on_host.shape[1]) >= starts[:, None])).all():
        _left_padded(q, k, v, scaling, softmax, starts, out, lse)
    else:
        _by_pattern(q, k, v, scaling, softmax, on_host, out, lse)
    return out.transpose(1, 2)


def _left_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    softmax: Softmax,
    starts: np.ndarray,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Fill out [B, Hq, Q, D] for rows whose real columns begin at starts [B].

    Neighbouring rows of one start are computed together from views, so that only the output is copied.
    """
    edges = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
    for first, last in pairwise(edges):
        start, rows = int(starts[first]), slice(first, last)
        padding = max(0, q.shape[2] - (k.shape[2] - start))  # among the queries
        if padding < q.shape[2]:
            some_q, some_lse = q[rows, :, padding:], None if lse is None else lse[rows, :, padding:]
            out[rows, :, padding:] = _causal(some_q, k[rows, :, start:], v[rows, :, start:], scaling, softmax, some_lse)


def _by_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    softmax: Softmax,
    real: np.ndarray,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Fill out [B, Hq, Q, D] for rows of any padding, real [B, T]; rows of equal padding are gathered together."""
    new, device = q.shape[2], q.device
    patterns, which = np.unique(real, axis=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        rows = upload(np.flatnonzero(which.reshape(-1) == i), device)
        columns, queries = (upload(np.flatnonzero(p), device) for p in (pattern, pattern[-new:]))
        if len(queries):
            q_real = q[rows][:, :, queries]
            out_rows = torch.zeros_like(q[rows])
            k_real, v_real = (x[rows][:, :, columns] for x in (k, v))
            some_lse = None if lse is None else lse.new_empty(q_real.shape[:3])
            out_rows[:, :, queries] = _causal(q_real, k_real, v_real, scaling, softmax, some_lse)
            out[rows] = out_rows
            if lse is not None and some_lse is not None:
                lse[rows[:, None], :, queries] = some_lse.transpose(1, 2)
