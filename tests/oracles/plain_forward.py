"""The slow, obvious form of Eq. 1: one sequence of context and answer in one pass, with dense [S, S] matrices.

It knows no blocks, no branches and no kept K/V. The tests of `branching` compare with it.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_train.forward.hook import run_decoder
from tests.oracles.eq1 import eq1


def plain_forward(
    model: PreTrainedModel,
    ids: Tensor,
    context: int,
    alpha: Tensor | None = None,
    *,
    sink: int = 0,
    window: int = 1,
    empty_heads: str = "zero",
    mean: Tensor | None = None,
) -> Tensor:
    """Hidden states after the final norm, where context rows attend in full and answer rows by Eq. 1.

    ids: [S] tokens of context and answer.
    context: number of context tokens.
    alpha: [L, H, D]; None for full attention in all rows (the teacher).
    sink, window: tokens; the window counts the row itself.
    empty_heads: as in `fused.fused_attention`.
    mean: [L, H, D], the middle's keys are alpha * k + (1 - alpha) * mean; 0 by default.

    Returns [S, hidden].
    """
    state = _Plain(len(ids), context, alpha, sink, window, empty_heads, mean)
    return run_decoder(model, ids[None], torch.arange(len(ids), device=ids.device)[None], state)[0]


class _Plain:
    def __init__(
        self, longest: int, context: int, alpha: Tensor | None, sink: int, window: int, empty_heads: str,
        mean: Tensor | None,
    ) -> None:  # fmt: skip
        self.longest, self.alpha, self.empty_heads, self.mean = longest, alpha, empty_heads, mean
        i, j = torch.arange(longest)[:, None], torch.arange(longest)[None]
        self.middle = (i >= context) & (j >= sink) & (i - j >= window) & (j <= i)  # [S, S]
        self.plain = (j <= i) & ~self.middle

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        alpha, mean = (None if x is None else x[layer] for x in (self.alpha, self.mean))
        return eq1(q, k, v, alpha, scale, self.plain, self.middle, self.empty_heads, mean)
