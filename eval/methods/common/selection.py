"""What the choices of tokens share: a budget of tokens, and the tokens of the middle that fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leank.eval.cache.storage.sizes import Sizes, middle_columns, real_positions
from leank.eval.inference.prefill import Prefill, PromptLayer

Scores = Callable[[PromptLayer, Tensor | None], Tensor]  # (layer, its real columns [B, T]) -> scores [B, H, T]
Choose = Callable[[Tensor, Tensor], Tensor]  # (scores [B, H, T], -inf outside the middle; count [B]) -> bool [B, H, T]


def middle_budget(budget: int, sizes: Sizes) -> int:
    """Tokens of the middle that a head may keep of `budget` tokens in all.

    Raises ValueError if sink and window alone exceed the budget.
    """
    left = budget - sizes.sink - sizes.window
    if left < 0:
        raise ValueError(
            f"budget={budget} is less than sink={sizes.sink} and window={sizes.window}, whose tokens always stay; "
            f"raise it to at least {budget - left}, or lower sink or window"
        )
    return left


def keep_chosen(
    prefill: Prefill, sizes: Sizes, counts: Sequence[int | Tensor], scores: Scores, choose: Choose
) -> list[Tensor | None]:
    """For each layer the tokens that stay, bool [B, H, T]: sink, window, and those chosen between them.

    counts: for each layer, how many tokens between sink and window stay: an int for all rows, or [B].
    scores: gives a layer's scores.
    choose: marks the tokens of that many per head.

    Returns None for a layer that keeps all its tokens and for one with sliding-window attention.
    """
    return [
        _keep_in_layer(layer, layer.real(prefill.real), sizes, count, scores, choose)
        if isinstance(layer, PromptLayer)
        else None
        for layer, count in zip(prefill.layers, counts, strict=True)
    ]


def _keep_in_layer(
    layer: PromptLayer, real: Tensor | None, sizes: Sizes, count: int | Tensor, scores: Scores, choose: Choose
) -> Tensor | None:
    none_seen = torch.zeros(len(layer.keys), dtype=torch.long, device=layer.keys.device)
    position = real_positions(none_seen, layer.keys.shape[2], real)
    middle = middle_columns(position, sizes)
    count = torch.as_tensor(count, device=middle.device).expand(len(middle))
    if bool((middle.sum(-1) <= count).all()):
        return None
    ends = (position >= 0) & ~middle
    candidates = scores(layer, real).masked_fill(~middle[:, None], -torch.inf)
    return choose(candidates, count) & middle[:, None] | ends[:, None]
