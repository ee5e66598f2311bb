"""Launches of what chooses the tokens that stay (eval.cache.storage.kernels.choosing)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from leank.eval.cache.storage.kernels import choosing

BLOCK = 1024  # most tokens that a program looks at together


def block(tokens: int) -> int:
    """How many of a head's tokens are looked at together."""
    return min(BLOCK, max(64, triton.next_power_of_2(tokens)))


def heaviest(ranked: Tensor, length: Tensor, count: int) -> Tensor:
    """The `count` tokens of each head that rank highest; the slow form is `eviction.largest`.

    ranked: [B, H, n] float32, with numbers side by side
    length: int64 [B, H] on the device, each head's own tokens, at most n

    Returns bool [B, H, n]; what it says past a head's own tokens is undefined.
    """
    stay = torch.empty(ranked.shape, dtype=torch.bool, device=ranked.device)
    choosing.heaviest[(length.numel(),)](
        *(ranked, stay.view(torch.uint8), length, ranked.stride(0), ranked.stride(1), count, ranked.shape[-1]),
        H=ranked.shape[1],
        BLOCK=block(ranked.shape[-1]),
    )
    return stay
