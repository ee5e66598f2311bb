"""The slow, obvious form of Eq. 1: one sequence of context and answer in one pass, with dense [S, S] matrices.

It knows no blocks, no branches and no kept K/V. The tests of `branching` compare with it.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_train.forward.hook import run_decoder


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
    empty_heads: as in `attention.scaled_attention`.
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
        self.mean = mean
        self.longest, self.alpha, self.empty_heads = longest, alpha, empty_heads
        i, j = torch.arange(longest)[:, None], torch.arange(longest)[None]
        self.later = j > i  # [S, S]
        self.middle = (i >= context) & (j >= sink) & (i - j >= window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.alpha is None:
            return self._softmax(q @ k.mT * scale) @ v
        alpha = self.alpha[layer].repeat_interleave(group, 0)[:, None]  # [Hq, 1, D]
        if self.mean is not None:
            mean = self.mean[layer].repeat_interleave(group, 0)[:, None]  # [Hq, 1, D]
            middle = q @ (k * alpha + (1 - alpha) * mean).mT
            return self._softmax(torch.where(self.middle, middle, q @ k.mT) * scale) @ v
        literal = self._eq1(q, k, alpha, scale) @ v
        if self.empty_heads == "zero":
            return literal
        empty = (alpha == 0).all(-1, keepdim=True)  # [Hq, 1, 1]
        without = self._softmax((q @ k.mT * scale).masked_fill(self.middle, -torch.inf)) @ v
        # Straight-through: the value is `without`; alpha, and alpha alone, gets the gradient of Eq. 1 as written.
        to_alpha = self._eq1(q.detach(), k.detach(), alpha, scale) @ v.detach()
        return torch.where(empty, without + (to_alpha - to_alpha.detach()), literal)

    def _eq1(self, q: Tensor, k: Tensor, alpha: Tensor, scale: float) -> Tensor:
        return self._softmax(torch.where(self.middle, q @ (k * alpha).mT, q @ k.mT) * scale)

    def _softmax(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self.later, -torch.inf).softmax(-1)
