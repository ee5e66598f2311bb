"""Launches a round of Lethe (eval.methods.tokens.lethe_kernel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.choosing import block
from eval.cache.storage.upload import upload
from eval.methods.tokens import lethe_kernel

if TYPE_CHECKING:
    from eval.methods.tokens.lethe import Lethe


def rounds(
    settings: Lethe,
    scores: Tensor,
    length: Tensor,
    rows: np.ndarray,
    held: np.ndarray,
    sink: np.ndarray,
    window: np.ndarray,
    most: int,
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """A round of the rows that are due; the slow form is `Rounds._round`.

    scores: [B, H, columns] float32
    length: int64 [B, H] on the device, tokens of each head's middle
    rows: [R], the rows that are due
    held, sink, window: [R], tokens of each, in all and at both ends
    most: most tokens that a middle holds

    Returns what stays of all rows' middles, bool [B, H, most], and on the host for the rows that are due the breakpoint
    in tokens (`held` if there is none) and how many tokens of the middle stay. This waits for the device.
    """
    from eval.methods.tokens.lethe import bounds

    (batch, heads, columns), device = scores.shape, scores.device
    recent = (settings.recent_ratio * held).astype(np.int64)
    bounded, room = bounds(settings, sink, window)
    numbers = upload(np.stack([rows, held, sink, recent, bounded, room], 1).astype(np.int64), device)
    stay = torch.ones(batch, heads, most, dtype=torch.bool, device=device)
    total = torch.empty(len(rows), columns, dtype=torch.float32, device=device)
    result = torch.empty(len(rows), 2, dtype=torch.int64, device=device)
    lethe_kernel.rounds[(len(rows),)](
        *(scores, total, length, numbers, stay.view(torch.uint8), result, columns, most),
        *(settings.sparse_ratio, settings.limit, settings.min_sparsity),
        H=heads,
        TEXT=settings.reading == "text",
        SEGMENTS=settings.segments,
        BLOCK=block(int(held.max())),
    )
    found, stays = result.cpu().numpy().T
    return stay, found, stays
