"""Steered lambda: stage 1 finds the weight of the L1 term that brings the mean score to the kept share of channels.

With a fixed lambda the outcome hangs on it: too small leaves scores around .4 and Top-s% arbitrary, too large empties
heads that mattered; and its right value changes with the objective, the ratio and the model. Steered, lambda follows
the mean score along a line from 1 to 1 - ratio. `separation` says how well the scores ended apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

AUTO = "auto"
START, LEAST, MOST = 0.02, 1e-4, 10.0  # lambda: the first value, and its limits
FALL = 0.6  # share of the steps over which the wanted mean falls
DAMPING = 20.0  # logarithm of lambda's factor for a step that moves the mean by 1 against its line
BETWEEN = (0.1, 0.9)  # scores that are neither kept nor pruned for sure
MOST_BETWEEN, LEAST_MARGIN = 0.3, 0.1  # beyond these Top-s% is arbitrary


def wanted_mean(step: int, steps: int, ratio: float) -> float:
    """The mean score to be reached after `step` of `steps` steps: from 1 in a line to 1 - ratio, then constant."""
    return 1.0 - ratio * min(1.0, step / (FALL * steps))


def learning_rate(steps: int) -> float:
    """Adam's learning rate for a stage of `steps` steps.

    Adam moves a score by about the learning rate a step, so that a score that is to fall from 1 to 0 needs a sum of
    learning rates above 1; many steps average out the noise of single documents at a lower rate.
    """
    return min(0.2, 0.15 * (25 / max(1, steps)) ** 0.63)


def gain(steps: int) -> float:
    """How strongly lambda answers a mean that is off by 1: the logarithm of its factor in one of `steps` steps."""
    return min(12.0, 10.0 * (25 / max(1, steps)) ** 0.73)


def steer(lam: Tensor, before: Tensor, after: Tensor, step: int, steps: int, ratio: float) -> None:
    """Change lambda, a float tensor, in place after `step` (from 1) of `steps` steps.

    before, after: mean scores around the step. log lambda moves by gain * off + DAMPING * (change of off), where off is
    the mean less the wanted one: lambda sets how fast scores fall, so without damping the mean would swing about its
    line.
    """
    off = after - wanted_mean(step, steps, ratio)
    change = off - (before - wanted_mean(step - 1, steps, ratio))
    lam.mul_(torch.exp(gain(steps) * off + DAMPING * change)).clamp_(LEAST, MOST)


@dataclass(frozen=True)
class Separation:
    """How well scores tell the channels to keep from those to prune.

    between: share of channels with scores in `BETWEEN`, 0 to 1.
    margin: median of the scores above the cut less the median of as many scores right below it, 0 to 1.
    """

    between: float
    margin: float

    @classmethod
    def of(cls, alpha: Tensor, ratio: float) -> Separation:
        """Of scores [L, H, D] cut at a pruning ratio in [0, 1)."""
        scores = alpha.detach().flatten().double().cpu().sort(descending=True).values
        kept = round(len(scores) * (1 - ratio))
        near = min(kept, len(scores) - kept)  # scores to look at on either side of the cut
        above, below = scores[kept - near : kept], scores[kept : kept + near]
        low, high = BETWEEN
        margin = float(above.median() - below.median()) if near else 1.0
        return cls(float(((scores > low) & (scores < high)).double().mean()), margin)

    @property
    def metrics(self) -> dict[str, float]:
        """Both numbers by name."""
        return asdict(self)

    def warning(self, ratio: float) -> str | None:
        """What to do where the cut at this ratio was arbitrary; None where it was not."""
        if self.between <= MOST_BETWEEN and self.margin >= LEAST_MARGIN:
            return None
        return (
            f"the cut at ratio={ratio:g} was arbitrary: {100 * self.between:.0f}% of the scores ended between "
            f"{BETWEEN[0]} and {BETWEEN[1]}, and the margin at the cut is {self.margin:.2f}; let lambda follow the "
            "ratio (stage1.lam=auto), or raise stage1.steps"
        )
