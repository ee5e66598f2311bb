"""Launches a round of Lethe (eval.methods.tokens.lethe_kernel)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.choosing import block
from leank.eval.cache.storage.upload import upload
from leank.eval.methods.tokens import lethe_kernel


def rounds(
    scores: Tensor,
    length: Tensor,
    numbers: np.ndarray,
    most: int,
    *,
    sparse_ratio: float,
    limit: int,
    min_sparsity: float,
    segments: int,
    text: bool,
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """A round of the rows that are due; the slow form is `Rounds._round`.

    scores: [B, H, columns] float32
    length: int64 [B, H] on the device, tokens of each head's middle
    numbers: [R, 6] as in `lethe_kernel.rounds`, of the rows that are due
    most: most tokens that a middle holds
    sparse_ratio, limit, min_sparsity, segments: the settings of `Lethe`
    text: whether Algorithm 1 is read as its text has it

    Returns what stays of all rows' middles, bool [B, H, most], and on the host for the rows that are due the breakpoint
    in tokens (those held if there is none) and how many tokens of the middle stay. This waits for the device.
    """
    (batch, heads, columns), rows, device = scores.shape, len(numbers), scores.device
    stay = torch.ones(batch, heads, most, dtype=torch.bool, device=device)
    total = torch.empty(rows, columns, dtype=torch.float32, device=device)
    result = torch.empty(rows, 2, dtype=torch.int64, device=device)
    lethe_kernel.rounds[(rows,)](
        *(
            scores,
            total,
            length,
            upload(numbers.astype(np.int64), device),
            stay.view(torch.uint8),
            result,
            columns,
            most,
        ),
        *(sparse_ratio, limit, float(min_sparsity)),
        H=heads,
        TEXT=text,
        SEGMENTS=segments,
        BLOCK=block(int(numbers[:, 1].max())),
    )
    found, stays = result.cpu().numpy().T
    return stay, found, stays
