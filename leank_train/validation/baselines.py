"""The scores of ThinK and of the static norm, from the keys and queries of branches.

Both observe the last queries of the context after RoPE, which `branch(..., obs_queries=32)` keeps. `channel_scores`
defines the scores.
"""

import torch
from torch import Tensor

from leank.channel_scores import best, query_key_scores, wide
from leank_train.forward.prefix import Branch, Prefix, to_device


def think_mask(prefix: Prefix, question: Branch, ratio: float) -> Tensor:
    """ThinK's masks, bool [R, L, H, D]: every head drops the share `ratio` of its channels, those of the lowest score.

    question: with queries (obs_queries of `branch`).
    """
    return best(context_scores(prefix, question, "squares"), ratio)


def context_scores(prefix: Prefix, question: Branch, group: str) -> Tensor:
    """ThinK's scores over each branch's whole context, [R, L, H, D].

    question: with queries (obs_queries of `branch`).
    group: how the scores of a group's query heads are joined, as in `query_key_scores`.

    Raises ValueError if the branch has no queries.
    """
    if question.queries is None:
        raise ValueError("the branch has kept no queries; call branch with obs_queries=32")
    layers = []
    for layer, queries in enumerate(question.queries):
        squares = _key_squares(prefix.keys[layer], prefix.k_positions)
        squares = squares.repeat_interleave(len(question.lengths) // len(prefix.lengths), 0)
        squares = squares + _key_squares(question.keys[layer], question.k_positions)
        layers.append(query_key_scores(queries, squares, group))
    return torch.stack(layers, 1)


def _key_squares(keys: Tensor, positions: Tensor) -> Tensor:
    """Sum of k^2 over tokens, [R, H, D]; keys [R, H, T, D], positions [R, T] with -1 for padding."""
    return (keys.to(wide(keys)).square() * to_device(positions >= 0, keys.device)[:, None, :, None]).sum(2)
