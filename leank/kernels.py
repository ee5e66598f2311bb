"""The library's attention kernels: which of them a call should use, and the flash kernel with its log-sum-exp."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.bfloat16, torch.float16)
SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**27}  # attention scores held at a time; this sets the size of a key block
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities: flash runs from Ampere on, cuDNN is the fastest from Hopper on
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNELS = ("auto", "flash_attn", *_BACKENDS)  # of a prefill; flash_attn is the package of this name, the others SDPA's
# cuDNN makes a plan for every new shape, which takes 23 to 50 ms. On an H200 it then runs at about 600 TFLOP/s, and
# flash at 350. So cuDNN gains 1.2 ms per TFLOP, and a plan has paid for itself after this many operations.
CUDNN_FROM = 42e12  # FLOPs of all calls that use one plan


def cudnn_pays(q: Tensor, keys: int, calls: int, causal: bool = True) -> bool:
    """Whether cuDNN's kernel saves more time than its plan costs.

    q: [B, Hq, n, D], of which only the shape is read; keys: number of keys T >= n of each row.
    calls: number of calls of this shape that use the same plan.
    causal: the queries are the last n tokens, each of which sees the keys up to its own; otherwise all see all keys.
    """
    B, Hq, n, D = q.shape
    return 2 * calls * B * Hq * D * n * (2 * keys - (n if causal else 0)) >= CUDNN_FROM


def on_hopper(q: Tensor) -> bool:
    """Whether q lies on a Hopper GPU or a newer one."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) >= HOPPER


def kernel_order(kernel: str, q: Tensor, layers: int) -> list[SDPBackend]:
    """Order in which SDPA tries its backends for a prefill in `layers` layers; empty for the library's own order.

    kernel: one of `KERNELS` but flash_attn. A named backend comes first and the others follow. auto takes cuDNN or
        flash first on Hopper, whichever is faster (`cudnn_pays`), and the library's own order on other devices.
    q: [B, Hq, T, D], of which the shape and the device are read.
    """
    if kernel == "auto":
        if not on_hopper(q):
            return []
        kernel = "cudnn" if cudnn_pays(q, q.shape[2], layers) else "flash"
    return sorted(_BACKENDS.values(), key=lambda backend: backend != _BACKENDS[kernel])


def tried_in(order: Sequence[SDPBackend]) -> AbstractContextManager:
    """Context in which SDPA tries its backends in this order; an empty order leaves the library's."""
    return sdpa_kernel(list(order), set_priority=True) if order else nullcontext()


def flash_takes(q: Tensor) -> bool:
    """Whether the library's flash kernel accepts queries like q [..., D]: half precision on an Ampere GPU or newer."""
    if not q.is_cuda or q.dtype not in HALF or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= AMPERE


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, tuple[object, ...]]:
    """Attention by the library's flash kernel, with the log-sum-exp, which SDPA does not return.

    q: [B, Hq, n, D].
    k, v: [B, H, T, D] with any strides. On a CPU, H must be Hq. Few rows split the keys among the GPU's processors.
    scale: factor of the logits.
    causal: the last query sees every key, and each one before it a key less; on a CPU, n must then be T.
    Returns out [B, Hq, n, D] in q's type, lse [B, Hq, n] in float32 or wider, and what `flash_backward` needs.
    """
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
        return out, lse, ()
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1], tuple(found[2:8])  # lengths (None, None, n, T) and the state of an unused dropout


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Attention by cuDNN, with the log-sum-exp; by the library's flash kernel where cuDNN cannot run.

    q: [B, Hq, n, D]; k, v: [B, H, T, D] with any strides.
    scale: factor of the logits.
    causal: query i sees the keys up to i, and n = T; otherwise every query sees all keys.
    Returns out [B, Hq, n, D] in q's type, and lse [B, Hq, n] in float32.
    """
    gqa = q.shape[1] != k.shape[1]
    with tried_in([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        choice = torch.ops.aten._fused_sdp_choice.default(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    if choice != SDPBackend.CUDNN_ATTENTION.value:
        return flash_forward(q, k, v, scale, causal)[:2]
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = kernel(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, state: tuple[object, ...]
) -> Tensor:
    """Gradient of q through the keys k alone, where k may be a part of the keys that made out and lse.

    It is exact for each part: d logits = P * (d_out V^T - rowsum(d_out * out)) with P = exp(logits - lse) needs out and
    lse over all keys, and k and v of this part. The kernel also computes the gradients of k and v; they are dropped.

    d_out, out: [B, Hq, n, D] in q's type.
    lse: [B, Hq, n], inf in rows that see no key.
    state: third result of `flash_forward` for the same q, k and v.
    """
    if not q.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return kernel(d_out, q, k, v, out, lse, 0.0, False, scale=scale)[0]
    *lengths, seed, offset = state
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    return kernel(d_out, q, k, v, out, lse.contiguous(), *lengths, 0.0, False, seed, offset, scale=scale)[0]
