"""Dense causal attention for prompts: SDPA on real tokens only, so that no [T, T] mask is ever built for padding.

cuDNN's attention, SDPA's first choice on recent GPUs, plans for tens of milliseconds whenever a shape is new. Only
calls that are long enough to gain by it may use it (`leank.kernels.cudnn_pays`).
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from leank.eval.cache.attention.softmax import PLAIN, Softmax, beside_sinks, written_out
from leank.eval.cache.storage.segment import round_up
from leank.eval.cache.storage.sizes import equal_rows
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
    """Causal attention with soft-capped logits or sinks."""
    if softmax.softcap is not None or softmax.sink_logits is None or not flash_takes(q):
        return written_out(q, k, v, scaling, softmax)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out, lse, _ = flash_forward(q, k, v, scale, causal=q.shape[2] > 1)
    return beside_sinks(out, lse[..., None], softmax.sink_logits[:, None, None].to(lse.dtype)).to(q.dtype)


def latest(q: Tensor, k: Tensor, v: Tensor, scaling: float | None = None, real: Tensor | None = None) -> Tensor:
    """Attention [B, Hq, 1, D] of the last column's query alone, which always counts as real; see `attend`."""
    with sdpa_kernel(WITHOUT_PLANS):
        if real is None and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
            # Flash itself turns the heads of a group into query rows; only then does it split the keys over the GPU.
            return scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        grouped = q[:, :, 0].unflatten(1, (k.shape[1], -1))  # [B, H, G, D]: no kernel repeats K and V for a group
        bias = None if real is None else _bias(real, q.dtype)
        return scaled_dot_product_attention(grouped, k, v, bias, scale=scaling).flatten(1, 2)[:, :, None]


def _bias(real: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA adds to one query's logits, [B, 1, 1, T]: -inf in padding, but for the last column: all is finite."""
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
    """Causal attention of the last Q of T columns; neighbours of equal padding are computed together, without it.

    q: [B, Hq, Q, D]; k, v: [B, H, T, D]
    scaling: factor of the logits, None = 1 / sqrt(D)
    real: [B, T] bool, False = padding, None = no padding
    lse: [B, Hq, Q] float32 or None; takes each query's log-sum-exp of a plain softmax, but where the query is padding
    Returns [B, Q, Hq, D], zero where the query is padding.
    """
    if real is None or bool(real.all()):
        return _causal(q, k, v, scaling, softmax, lse).transpose(1, 2)
    out, before = torch.zeros_like(q), k.shape[2] - q.shape[2]  # columns before the first query's
    for rows, columns in equal_rows(real):
        if isinstance(columns, slice):
            queries: slice | Tensor = slice(max(0, columns.start - before), max(0, columns.stop - before))
        else:
            queries = columns[columns >= before] - before
        some_q = q[rows][:, :, queries]
        if some_q.shape[2]:
            some_lse = None if lse is None else lse.new_empty(some_q.shape[:3])
            some_k, some_v = k[rows][:, :, columns], v[rows][:, :, columns]
            out[rows][:, :, queries] = _causal(some_q, some_k, some_v, scaling, softmax, some_lse)
            if lse is not None and some_lse is not None:
                lse[rows][:, :, queries] = some_lse
    return out.transpose(1, 2)
