"""Steered lambda: stage 1 finds the weight of the L1 term that brings the mean score to the kept share of channels.

With a fixed lambda, the result depends on its value. A small one leaves scores around .4, so that Top-s% is arbitrary;
a large one empties heads that matter. The right value changes with the objective, the ratio and the model. A steered
lambda makes the mean score follow a line from 1 to 1 - ratio. `Separation` measures how far apart the scores ended.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

AUTO = "auto"
START, LEAST, MOST = 0.02, 1e-4, 10.0  # the first value of lambda, and its limits
FALL = 0.6  # share of the steps during which the wanted mean falls
# The logarithm of lambda's factor for a step that moves the mean by 1 away from its line. Without it, stages of 20 to
# 200 steps left a smaller margin at the cut (docs/lab/masks.md, number of steps).
DAMPING = 20.0
BETWEEN = (0.1, 0.9)  # scores in between are neither clearly kept nor clearly pruned
MOST_BETWEEN, LEAST_MARGIN = 0.3, 0.1  # beyond these Top-s% is arbitrary


def wanted_mean(step: int, steps: int, ratio: float) -> float:
    """Return the mean score to reach after `step` of `steps` steps: a line from 1 to 1 - ratio, then constant."""
    return 1.0 - ratio * min(1.0, step / (FALL * steps))


def learning_rate(steps: int) -> float:
    """Return Adam's learning rate for a stage of `steps` steps.

    Adam moves a score by about the learning rate per step. A score can fall from 1 to 0 only if the learning rates of
    all steps sum to more than 1. With many steps, a lower rate averages out the noise of single documents.
    """
    return min(0.2, 0.15 * (25 / max(1, steps)) ** 0.63)


def momentum(steps: int) -> float:
    """Return Adam's first beta for a stage of `steps` steps: it remembers at most the last tenth of them.

    Adam's usual 0.9 remembers ten steps. In a stage of 20 to 40 steps the mean would go on falling after lambda had
    been lowered, through its line and to 0, and no order of the channels would be left. From 100 steps on it is 0.9.
    """
    return min(0.9, max(0.5, 1 - 10 / max(1, steps)))


def gain(steps: int) -> float:
    """Return the logarithm of lambda's factor in one of `steps` steps for a mean that is off its line by 1."""
    return min(12.0, 10.0 * (25 / max(1, steps)) ** 0.73)


def steer(lam: Tensor, before: Tensor, after: Tensor, step: int, steps: int, ratio: float) -> None:
    """Change lambda, a scalar, in place after step number `step` (from 1) of `steps`.

    With off = mean - wanted mean, log lambda changes by gain * off + DAMPING * (change of off in this step). Lambda
    sets how fast scores fall, so the second term is meant to keep the mean from swinging about its line.
    before, after: mean scores before and after the step.
    """
    off = after - wanted_mean(step, steps, ratio)
    change = off - (before - wanted_mean(step - 1, steps, ratio))
    lam.mul_(torch.exp(gain(steps) * off + DAMPING * change)).clamp_(LEAST, MOST)


@dataclass(frozen=True)
class Separation:
    """How well scores tell the channels to keep from those to prune."""

    between: float  # share of channels with scores in `BETWEEN`, 0 to 1
    margin: float  # median of the scores above the cut less the median of as many scores right below it, 0 to 1

    @classmethod
    def of(cls, alpha: Tensor, ratio: float) -> Self:
        """Measure scores [L, H, D] that are cut at a pruning ratio in [0, 1)."""
        scores = alpha.detach().flatten().double().cpu().sort(descending=True).values
        kept = round(len(scores) * (1 - ratio))
        near = min(kept, len(scores) - kept)  # scores to look at on either side of the cut
        above, below = scores[kept - near : kept], scores[kept : kept + near]
        low, high = BETWEEN
        margin = float(above.median() - below.median()) if near else 1.0
        return cls(float(((scores > low) & (scores < high)).double().mean()), margin)

    def warning(self, ratio: float, steered: float | None = None) -> str | None:
        """Return why the cut at this ratio was arbitrary, and a cure; None if not; steered: the last lambda, if so."""
        if self.between <= MOST_BETWEEN and self.margin >= LEAST_MARGIN:
            return None
        if steered is None:
            cure = "let lambda follow the ratio (stage1.lam=auto), or raise stage1.steps"
        elif steered < MOST:
            cure = "raise stage1.steps"
        else:
            cure = (
                f"the steered lambda stands at its limit of {MOST:g}, too little against this loss: take "
                f"stage1.objective=kl, raise stage1.steps, or give stage1.lam a number above {MOST:g}"
            )
        return (
            f"the cut at ratio={ratio:g} was arbitrary: {100 * self.between:.0f}% of the scores ended between "
            f"{BETWEEN[0]} and {BETWEEN[1]}, and the margin at the cut is {self.margin:.2f}; {cure}"
        )
