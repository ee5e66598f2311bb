"""The two registrations that let a transformers model run on a compressed cache; no model class is patched.

`ATTENTION` names an attention implementation that is correct with any cache: a CompressedLayer computes its own
attention, plain key tensors go through SDPA.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from eval.cache import dense

ATTENTION = "leank"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, Hq, Q, D]; key is a layer that attends by itself, such as a CompressedLayer, or a tensor
    [B, H, T, D]. Returns ([B, Q, Hq, D], None)."""
    if not isinstance(key, Tensor):
        return key.attend(query, attention_mask, scaling), None
    if dropout or (attention_mask is not None and attention_mask.ndim == 4) or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    real = None if attention_mask is None else attention_mask[:, : key.shape[2]].bool()
    return dense.attend(query, key, value, scaling, real), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The 2-D padding mask [B, T] as it is, where attention is plainly causal; else SDPA's dense mask (sliding
    windows)."""
    plain = mask_function is causal_mask_function and isinstance(q_offset, int) and kv_length == q_offset + q_length
    if plain and kv_offset == 0:
        return None if attention_mask is None else attention_mask[:, :kv_length]
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)
