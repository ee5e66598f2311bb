"""Masks by factors, `pruning.learns=factors`: a mask's loss is the closed form's, corrected as that of a layout is.

Without a step (stage1.steps=0, stage2.steps=0) the closed form itself orders the channels.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from leank.allocation import Grid, channel_scores
from leank.precision import WHOLE
from leank_train.closed_form import closed_form
from leank_train.forward.stored import LEAST
from leank_train.recipes.layouts import OF_SCORES, LayoutStage
from leank_train.recipes.recipe import Learned, Masks, Training
from leank_train.verdict import CLOSED_FORM, MASK


@dataclass(frozen=True, kw_only=True)
class Factors(Masks):
    """Masks at several ratios from one order of channels."""

    where: ClassVar = "on masks by factors or of the closed form, without pruning.bytes"
    elsewhere: ClassVar = {
        **OF_SCORES, "pruning.learns": ..., "pruning.scales": "whole", "pruning.bytes": ...
    }  # fmt: skip

    def learn(self, training: Training) -> Learned:
        """Correct the closed form by factors, whose order of channels is also cut beside theirs."""
        pruning, records = self.pruning, {}
        closed = closed_form(training.current, training.backbone, training.means, training.signals)
        scores = first = channel_scores(closed.keys[..., 0], closed.empty, pruning.align)
        if self.stage1.steps:
            stage = MaskStage(
                training.backbone, self.stage1, pruning, closed.of_masks, 1 - max([pruning.ratio, *pruning.nested]),
                parallel=self.trainer, mean_keys=training.means,
            )  # fmt: skip
            records["stage1"] = training.fit(stage, "stage1")
            scores = stage.channel_scores()
        masks = {MASK: self.cut(training, scores, pruning.ratio), **self.at_ratios(training, scores)}
        if self.stage1.steps:
            masks[CLOSED_FORM] = self.cut(training, first, pruning.ratio)
        return Learned(masks, {"alpha": scores}, scores, records, {"alpha_mean": float(scores.mean())})


class MaskStage(LayoutStage):
    """Learn the same factors for masks: a channel of K has 0 bits or all, and a budget is a share of K's channels.

    V costs nothing, since a pruning ratio does not count it. A channel that gains too little fades out by Eq. 1.
    """

    key_bits = (0, LEAST)  # the width from which nothing fades
    value_bits = (WHOLE, WHOLE)
    rounds = False

    def grid(self, dim: int) -> Grid:
        return Grid.of_masks()

    def channel_scores(self) -> Tensor:
        """Return the scores of channels, [L, H, D], of which the highest make the mask of any ratio."""
        losses = self.losses()
        return channel_scores(losses.keys[..., 0], losses.empty, self.pruning.align)
