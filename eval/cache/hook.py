"""The two registrations that let a transformers model run on a compressed cache; no model class is patched.

`ATTENTION` names an attention implementation that is correct with any cache: a CompressedLayer computes its own
attention, plain key tensors go through SDPA, or through plain PyTorch where the model's softmax is not plain.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from leank.data_gen.amount import amount
from leank.eval.cache.attention import dense
from leank.eval.cache.attention.softmax import Softmax, written_out

ATTENTION = "leank"
logger = logging.get_logger(__name__)


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
    """The attention function of the implementation "leank".

    query: [B, Hq, Q, D]; value: [B, H, T, D]
    key: [B, H, T, D], or a cache layer that attends by itself, such as a CompressedLayer
    attention_mask: [B, T] padding mask, or a mask that SDPA takes, None = causal
    scaling: factor of the logits, None = 1 / sqrt(D); dropout: share of weights that become zero
    Returns ([B, Q, Hq, D], None). Raises ValueError for a kind of attention that is not implemented.
    """
    softmax = Softmax.of(getattr(module, "layer_idx", "?"), kwargs)
    if kwargs.get("output_attentions"):
        logger.warning_once(
            'attention "leank" returns no weights, so output_attentions gives none: read the text with the model\'s '
            "own attention, and without a compressed cache"
        )
    if not isinstance(key, Tensor):
        positions = kwargs.get("position_ids") if kwargs.get("use_cache") is False else None
        if positions is not None and key.get_seq_length() > query.shape[2] and bool((positions[..., 0] == 0).any()):
            raise ValueError(
                "use_cache=False hands over the whole conversation at every step, and this cache holds it already: "
                "leave use_cache on, and call cache.reset() before another conversation"
            )
        if dropout:
            raise ValueError(
                f"attention dropout of {dropout:g} in training mode: a compressed cache drops none; call model.eval()"
            )
        return key.attend(query, attention_mask, scaling, softmax).contiguous(), None  # some models take a view of it
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[-1] not in (1, key.shape[2]):
        raise ValueError(
            f"a 4-D attention_mask of {amount(attention_mask.shape[-1], 'column')} came to a layer that holds "
            f"{amount(key.shape[2], 'key')} (sliding window): give a 2-D padding mask"
        )
    causal = getattr(module, "is_causal", True)
    if causal and not dropout and (attention_mask is None or attention_mask.ndim == 2):
        real = None if attention_mask is None else attention_mask[:, : key.shape[2]].bool()
        return dense.attend(query, key, value, scaling, real, softmax).contiguous(), None
    if attention_mask is None or attention_mask.ndim == 2:
        attention_mask = _spelled_out(attention_mask, query, key) if causal or attention_mask is not None else None
    if softmax.plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is None:
        raise ValueError("attention that is not causal has no soft-capped logits and no attention sinks here")
    return written_out(query, key, value, scaling, softmax, attention_mask, dropout).transpose(1, 2).contiguous(), None


def _spelled_out(real: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The causal mask [1 or B, 1, Q, T], True = seen, for a padding mask real [B, >= T], None = no padding."""
    new, length = query.shape[2], key.shape[2]
    causal = torch.ones(new, length, dtype=torch.bool, device=key.device).tril(length - new)
    return causal[None, None] if real is None else causal & real[:, None, None, :length].bool()


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor | bool] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of the implementation "leank"; its parameters are those of transformers' mask functions.

    Where attention is plainly causal, it returns the 2-D padding mask [B, T] unchanged. Elsewhere, for sliding windows
    and static caches, it returns SDPA's dense mask. `attention` takes a missing mask to say that the last query
    belongs to the last key, so SDPA may omit the mask only there; a static cache has free slots behind its last token.
    """
    aligned = isinstance(q_offset, int) and kv_offset + kv_length == q_offset + q_length
    if aligned and mask_function is causal_mask_function and kv_offset == 0:
        return None if attention_mask is None else attention_mask[:, :kv_length]
    kwargs["allow_is_causal_skip"] = aligned and kwargs.get("allow_is_causal_skip", True)
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)
