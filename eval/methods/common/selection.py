"""What the choices on the tokens axis share: a budget of tokens, and the best of the middle within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.store import Sizes, middle_columns, real_positions
from eval.inference.models import shape_of
from eval.inference.prefill import Prefill, PromptLayer
from leank_train.channel_scores import top

Scores = Callable[[PromptLayer, Tensor | None], Tensor]  # (layer, its real columns [B, T]) -> scores [B, H, T]


def spare(budget: int, sizes: Sizes) -> int:
    """Tokens of the middle that a head may keep of `budget` in all. Raises ValueError if sink and window are more."""
    left = budget - sizes.sink - sizes.window
    if left < 0:
        raise ValueError(
            f"budget={budget} is less than sink={sizes.sink} and the last {sizes.window} tokens, which always stay; "
            f"raise it to at least {budget - left}, or lower sink or window"
        )
    return left


def budgeted(budget: int, config: Any, sizes: Sizes) -> np.ndarray:
    """The same budget in every head, as Tokens.kept."""
    return np.full(shape_of(config)[:2], spare(budget, sizes))


def keep_best(prefill: Prefill, sizes: Sizes, counts: Sequence[int | Tensor], scores: Scores) -> list[Tensor | None]:
    """Of every layer the tokens that stay, bool [B, H, T]: sink, window, and of those between the highest scores.

    counts: of every layer how many between stay, in all rows or [B]. Of equal scores the earlier token's comes first.
    None = all, and layers whose own attention slides.
    """
    kept: list[Tensor | None] = []
    for layer, count in zip(prefill.layers, counts, strict=True):
        if not isinstance(layer, PromptLayer):
            kept.append(None)
            continue
        real, columns = layer.real(prefill.real), layer.keys.shape[2]
        position = real_positions(
            torch.zeros(len(layer.keys), dtype=torch.long, device=layer.keys.device), columns, real
        )
        middle = middle_columns(position, sizes)
        count = torch.as_tensor(count, device=middle.device).expand(len(middle))
        if bool((middle.sum(-1) <= count).all()):
            kept.append(None)
            continue
        others = (position >= 0) & ~middle
        kept.append(highest(scores(layer, real), middle, count) | others[:, None])
    return kept


def highest(scores: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The `count` [B] highest scores [B, H, T] of the columns `among` [B, T] in every head, bool [B, H, T]."""
    return top(scores.masked_fill(~among[:, None], -torch.inf), count[:, None, None]) & among[:, None]
