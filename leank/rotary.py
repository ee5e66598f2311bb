"""Which channels of a key RoPE rotates together, and in which of them the frequencies are highest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leank.shape import kv_shape

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

# Models of transformers that rotate the channels 2p and 2p + 1; all others rotate p and p + D / 2.
INTERLEAVED = frozenset(
    ("blt", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text")
)


def rotary_pairs(config: PreTrainedConfig) -> Tensor:
    """Return the pair that rotates each channel, int64 [L, D], -1 = none; pair 0 has the highest frequency."""
    layers, _, dim = kv_shape(config)
    interleaved = config.model_type in INTERLEAVED
    rows = []
    for rope in layer_ropes(config):
        width = int(dim * float(str(rope.get("partial_rotary_factor") or 1.0)))
        channel = torch.arange(dim)
        pair = channel // 2 if interleaved else channel % max(1, width // 2)
        rows.append(pair.masked_fill(channel >= width, -1))
    return torch.stack(rows).expand(layers, dim)


def layer_ropes(config: PreTrainedConfig) -> list[Mapping[str, object]]:
    """Return RoPE's parameters of every layer, of which some models have other ones for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [rope[kind] if isinstance(rope.get(kind), Mapping) else rope for kind in kinds]


def rotates_halves(config: PreTrainedConfig) -> bool:
    """Whether every layer rotates all channels, p together with p + D / 2, at the same frequencies."""
    ropes = layer_ropes(config)
    whole = all((rope.get("partial_rotary_factor") or 1.0) == 1.0 for rope in ropes)
    return whole and config.model_type not in INTERLEAVED and all(rope == ropes[0] for rope in ropes)


def mean_by_pair(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of values [L, H, D] over heads and each pair's channels, [L, pairs]; NaN where one lacks."""
    member = (pairs[..., None] == torch.arange(int(pairs.max()) + 1)).to(torch.float64)  # [L, D, pairs]
    return torch.einsum("ld,ldp->lp", values.double().mean(1), member) / member.sum(1)
