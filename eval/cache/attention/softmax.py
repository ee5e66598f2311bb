"""The softmax of a model's attention: plain, over soft-capped logits (Gemma 2), or beside attention sinks (GPT-OSS)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leank.kernels import SCORES_AT_ONCE

LOG2_E = math.log2(math.e)  # what a launch multiplies logits by, because kernels compute 2^x, not e^x
UNKNOWN = ("position_bias", "indices", "block_indices", "sinks")  # arguments of some models that are not implemented


class Softmax(NamedTuple):
    """How logits become weights."""

    softcap: float | None = None  # c, with which a logit x becomes c tanh(x / c); None = x stays x
    # [Hq], a learned logit per query head that takes its share of the weight and adds nothing to the output (an
    # "attention sink"); None = no such share
    sink_logits: Tensor | None = None

    @classmethod
    def of(cls, layer: object, options: Mapping[str, Any]) -> Softmax:
        """The softmax that a layer of a model asks for by the keyword arguments of its attention; layer: for messages.

        Raises ValueError for an argument that changes the attention in a way that is not implemented here.
        """
        for name in UNKNOWN:
            if options.get(name) is not None:
                raise ValueError(
                    f"layer {layer} of the model hands {name} to its attention, which a compressed cache does not "
                    'know; use another model, or model.set_attn_implementation("eager") without this cache'
                )
        return cls(options.get("softcap"), options.get("s_aux"))

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can compute this softmax, or None if it is plain."""
        if self.softcap is not None:
            return "the kernel has no soft-capped logits, this model's attention has"
        return None if self.sink_logits is None else "the kernel has no attention sinks, this model's attention has"

    @property
    def plain(self) -> bool:
        """Whether this is the ordinary softmax."""
        return self.softcap is None and self.sink_logits is None

    def cap(self, logits: Tensor) -> Tensor:
        """The logits, soft-capped; they must be scaled and not masked yet."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def weights(self, logits: Tensor) -> Tensor:
        """Weights of capped, masked logits [..., Hq, Q, T]; NaN without sinks in a row that sees nothing."""
        if self.sink_logits is None:
            return logits.softmax(-1)
        sink = self.sink_logits.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


PLAIN = Softmax()


def beside_sinks(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Attention whose softmax has sinks, from that over the keys alone: a sink divides it by 1 + exp(sink - lse).

    out: [..., Q, D]; lse: [..., Q, 1], log-sum-exp over the keys; sink_logits: of each query, or broadcast; None = none
    """
    return out if sink_logits is None else out * (lse - sink_logits).sigmoid()


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    softmax: Softmax,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of any softmax in plain PyTorch, a block of queries at a time, in float32 or wider; differentiable.

    q: [B, Hq, Q, D]; k, v: [B, H, T, D]
    scaling: factor of the logits, None = 1 / sqrt(D)
    mask: [B or 1, Hq or 1, Q, T], bool, True = seen, or numbers that are added to the logits; None = causal, where the
        last query belongs to the last key
    dropout: share of weights that become zero
    Returns [B, Hq, Q, D] in q's dtype, zero where a query sees nothing.
    """
    (batch, q_heads, new, dim), (heads, length) = q.shape, k.shape[1:3]
    wide, scale = torch.promote_types(q.dtype, torch.float32), dim**-0.5 if scaling is None else scaling
    grouped, keys, values = q.unflatten(1, (heads, -1)).to(wide), k[:, :, None].to(wide), v[:, :, None].to(wide)
    column = torch.arange(length, device=q.device)
    block = max(1, SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"] // (batch * q_heads * length))
    out = []
    for start in range(0, new, block):
        stop = min(new, start + block)
        end = length if mask is not None else length - new + stop  # keys that the block's last query sees
        logits = grouped[..., start:stop, :] @ keys[..., :end, :].mT * scale
        logits = softmax.cap(logits.flatten(1, 2))  # [B, Hq, block, end]
        if mask is None:
            logits = logits.masked_fill(column[:end] > column[length - new + start : end, None], -torch.inf)
        elif mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask[..., start:stop, :length], -torch.inf)
        else:
            logits = logits + mask[..., start:stop, :length]
        empty = logits.amax(-1, keepdim=True) == -torch.inf  # neither values nor gradients may become NaN
        weight = softmax.weights(logits.masked_fill(empty, 0)).masked_fill(empty, 0)
        weight = torch.dropout(weight, dropout, train=True).unflatten(1, (heads, -1))
        out.append((weight @ values[..., :end, :]).flatten(1, 2))
    return torch.cat(out, 2).to(q.dtype)
