"""The paper's recipe (section 3), `pruning.learns=scores`: scores of K's channels, in two stages.

stage 1   minimise  d(H_full, H_scaled) + lambda ||alpha||_1   over alpha [L, H, D], from all ones
stage 2   minimise  d(H_full, H_scaled)                        with beta = Top_{s%, r}(alpha), straight-through

The distance d of teacher and student is the stage's objective, a class of `leank_train.objective`. Beyond the paper,
lambda may be steered to the pruning ratio.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from leank.mask import ChannelMask
from leank.typed import OneOf
from leank_train.data import Batch
from leank_train.forward.branching import Branch, Prefix, student
from leank_train.objective import distill, steering
from leank_train.objective.steering import Separation
from leank_train.recipes.recipe import Learned, MaskPruning, Masks, Metrics, Training
from leank_train.settings import need
from leank_train.stages import Auto, Stage, StageConfig
from leank_train.verdict import MASK, STAGE1

log = logging.getLogger("leank_train")


@dataclass(frozen=True)
class Stage1Config(StageConfig):
    """The stage with a penalty."""

    lam: Annotated[float, Ge(0), Le(1000), "the paper has 0.06"] | Auto = 0.0  # "auto" steers it to the pruning ratio
    l1: Annotated[str, OneOf(*distill.L1_FORMS)] = "mean"  # the penalty; see `distill.l1_penalty`

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            self.lam != steering.AUTO or (self.l1, self.reduction) == ("mean", "official"),
            f"l1={self.l1!r} and stage1.reduction={self.reduction!r} with stage1.lam='auto': the limits of a steered "
            "lambda fit means; set stage1.l1=mean and stage1.reduction=official, or give a number",
        )


@dataclass(frozen=True)
class Stage2Config(StageConfig):
    """The stage under a mask."""

    straight_through: Annotated[str, OneOf(*distill.STRAIGHT_THROUGH)] = "binary"  # see `distill.straight_through`


@dataclass(frozen=True, kw_only=True)
class Paper(Masks):
    """A mask by scores of channels."""

    where: ClassVar = "without pruning.learns=factors or pruning.bytes"
    elsewhere: ClassVar = {
        "pruning.nested": [], "pruning.scales": "whole", "pruning.learns": ..., "pruning.bytes": ...
    }  # fmt: skip

    stage1: Stage1Config
    stage2: Stage2Config

    def learn(self, training: Training) -> Learned:
        """Run both stages; masks at other ratios are cut from the scores of stage 1, as stage 2 learns for one ratio.

        Beside the mask is that of stage 1 alone: what stage 2 is worth (appendix E).
        """
        backbone, pruning, how = training.backbone, self.pruning, (self.trainer, training.means)
        stage1 = Stage1(backbone, self.stage1, pruning, None, *how)  # alpha from all ones
        records = {"stage1": training.fit(stage1, "stage1")}
        stage2 = Stage2(backbone, self.stage2, pruning, stage1.alpha, *how)
        records["stage2"] = training.fit(stage2, "stage2")
        scores, alpha = (stage.alpha.detach().float().cpu().contiguous() for stage in (stage1, stage2))
        separation = Separation.of(scores, pruning.ratio)
        steps, steered = records["stage1"].steps, self.stage1.lam == steering.AUTO
        warning = separation.warning(pruning.ratio, steps[-1]["lam"] if steps and steered else None)
        if training.current.first and warning:
            log.warning("%s: %s", training.current.out, warning)
        masks = {MASK: self.cut(training, alpha, pruning.ratio), STAGE1: self.cut(training, scores, pruning.ratio)}
        metrics: Metrics = {"alpha_mean": float(alpha.mean()), "separation": asdict(separation)}
        saved = {"alpha": alpha, "stage1": scores}
        return Learned(masks | self.at_ratios(training, scores), saved, alpha, records, metrics)


class ScoreStage(Stage):
    """What both stages share: a student whose keys are scaled by scores."""

    pruning: MaskPruning
    learned = "a score for every key channel"

    def scores(self) -> Tensor:
        """Return what takes alpha's place in Eq. 1, [L, H, D]."""
        return self.alpha

    def student(self, prefix: Prefix, question: Branch, batch: Batch) -> Tensor:
        return student(
            self.backbone.model, prefix, question, batch.answers.ids, batch.answers.lengths, self.scores(),
            sink=self.pruning.sink, window=self.pruning.window, empty_heads=self.config.empty_heads,
        )  # fmt: skip


class Stage1(ScoreStage):
    """Learn alpha: distillation with the continuous scores, plus lambda * L1 (section 3.1)."""

    config: Stage1Config
    lam: Tensor | float

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if self.config.lam == steering.AUTO:
            self.register_buffer("lam", torch.tensor(steering.START))  # a buffer: checkpoints hold it
        else:
            self.lam = float(self.config.lam)

    def penalty(self) -> Tensor:
        return self.lam * distill.l1_penalty(self.alpha, self.config.l1)

    def training_step(self, batch: Batch, index: int) -> dict[str, Tensor]:
        found = super().training_step(batch, index)
        lam = self.lam.clone() if isinstance(self.lam, Tensor) else self.alpha.new_full((), self.lam)
        self.log("stage1/lam", lam)
        return {**found, "lam": lam}

    def optimizer_step(self, *given: Any, **more: Any) -> None:
        """Make a step of alpha, then steer lambda; it depends on alpha alone, so all ranks get the same."""
        step, before = self.trainer.global_step + 1, self.alpha.detach().mean()
        super().optimizer_step(*given, **more)
        if isinstance(self.lam, Tensor):
            after = self.alpha.detach().mean()
            steering.steer(self.lam, before, after, step, self.config.steps, self.pruning.ratio)


class Stage2(ScoreStage):
    """Learn alpha under the binary mask of a given ratio and alignment (section 3.2)."""

    config: Stage2Config
    learned = "which channels stay at the pruning ratio"

    def scores(self) -> Tensor:
        """Return beta = Top_{s%, r}(alpha), with alpha's gradient in the backward pass."""
        pruning = self.pruning
        beta = ChannelMask.from_scores(self.alpha, pruning.ratio, pruning.align, pruning.rounding).keep
        return distill.straight_through(self.alpha, beta.to(self.alpha.device), self.config.straight_through)
