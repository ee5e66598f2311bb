"""What the stages of all recipes share: their settings, and a Lightning module over one frozen decoder.

A stage minimises the distance of teacher and student at the answer tokens, its objective (`leank_train.objective`);
a recipe (`leank_train.recipes`) says what the student reads.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import lightning as L
import torch
import torch.distributed as dist
from annotated_types import Gt, Le
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from leank.backbone import Backbone
from leank.typed import Checked, Count, OneOf, Positive
from leank_train.data import Batch, Ragged
from leank_train.forward.branching import Branch, Prefix, branch, prefill
from leank_train.forward.fused import EMPTY_HEADS
from leank_train.forward.plan import to_device
from leank_train.forward.sequence_parallel import prefill_in_shares
from leank_train.objective import distill, steering
from leank_train.objective.base import objectives
from leank_train.running.parallel import TrainerConfig

Auto = Annotated[str, OneOf(steering.AUTO)]
OBJECTIVES = objectives()


@dataclass(frozen=True)
class StageConfig(Checked):
    """Settings of one stage; `stage1` and `stage2` of conf hold the paper's values and name the official code's."""

    steps: Count  # optimizer steps; 0 skips the stage, 0 in both takes the scores of the closed form
    # Adam's learning rate, or "auto", which chooses it and Adam's momentum by the number of steps
    lr: Annotated[float, Gt(0), Le(1), "scores lie in [0, 1], and the paper has 0.02"] | Auto
    schedule: Annotated[str, OneOf(*distill.SCHEDULES)] = "official"  # of the learning rate; see `distill.lr_factor`
    reduction: Annotated[str, OneOf(*distill.REDUCTIONS)] = "official"  # of the distance; see `l2.L2`
    clamp: bool = True  # whether alpha stays in [0, 1]
    empty_heads: Annotated[str, OneOf(*EMPTY_HEADS)] = "zero"  # what Eq. 1 does for a head without channels
    objective: Annotated[str, OneOf(*OBJECTIVES)] = "l2"  # a name in `leank_train.objective`


@dataclass(frozen=True, kw_only=True)
class PruningConfig(Checked):
    """What any recipe is told of the middle."""

    align: Positive = 32  # channels of a block, which is kept, or has one width, as a whole
    sink: Count = 128  # sink, window: first and last tokens that keep all channels
    window: Positive = 1024
    # what a pruned channel has in the middle: "none" is 0 (the paper), "mean" its mean over calibration documents
    # (`ChannelMask.mean_keys`), which a mask's file then holds
    compensation: Annotated[str, OneOf("none", "mean")] = "none"

    @property
    def packed(self) -> bool:
        """Whether scales are packed (`leank.precision`), which those of layouts may be."""
        return False


def read_documents(
    model: PreTrainedModel, documents: Ragged, kernel: str, sink: int = 0, ranks: dist.ProcessGroup | None = None
) -> Prefix:
    """Prefill documents; kernel, sink, ranks: as in `read`."""
    if ranks is None:
        return prefill(model, documents.ids, documents.lengths, kernel)
    return prefill_in_shares(model, documents.ids, documents.lengths, ranks, kernel, sink)


def read(
    model: PreTrainedModel, batch: Batch, kernel: str, mean_keys: Tensor | None, sink: int = 0,
    ranks: dist.ProcessGroup | None = None,
) -> tuple[Prefix, Branch, Tensor]:  # fmt: skip
    """Read a batch once, whatever scores its students have: documents, questions, the teacher's answers [R, N, hidden].

    kernel: of the prefill; mean_keys: [L, H, D], what stands for pruned channels; None for 0.
    sink: token behind which the cells of a layout begin; it matters for documents in shares alone.
    ranks: the processes that hold a share of each document; None if this one holds all.
    """
    prompts = batch.prompts
    prefix = read_documents(model, batch.documents, kernel, sink, ranks)
    teacher = branch(model, prefix, prompts.ids, prompts.lengths)
    full = distill.answer_rows(teacher.hidden, batch.question_lengths, batch.answers.ids.shape[1])
    if mean_keys is not None:
        prefix = prefix.center_(mean_keys)
    return prefix, teacher.cut(batch.question_lengths), full


class Stage(L.LightningModule):
    """The frozen decoder, alpha, Adam, and the distillation loss of Eq. 1; a subclass has the student."""

    backbone: Backbone
    learned: str  # what, as the progress line says it

    def __init__(
        self, backbone: Backbone, config: StageConfig, pruning: PruningConfig, alpha: Tensor | None = None,
        parallel: TrainerConfig | None = None, mean_keys: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Make alpha, the only parameter: a copy of scores [L, H, D], ones by default.

        parallel: how processes share the work; one process by default.
        mean_keys: [L, H, D], what stands for pruned channels; 0 by default.
        """
        super().__init__()
        self.objective = OBJECTIVES[config.objective](backbone.model, config.reduction)
        # not a child of the module: a frozen decoder belongs in no checkpoint and in no optimizer
        self.__dict__["backbone"] = backbone
        self.config, self.pruning, self.parallel = config, pruning, parallel or TrainerConfig()
        self.mean_keys = mean_keys
        self.ranks: dist.ProcessGroup | None = None
        self._loss_of_all_ranks: Tensor | None = None  # from `training_step` to `backward`
        self.alpha = torch.nn.Parameter(torch.ones(backbone.shape) if alpha is None else alpha.detach().clone())

    def setup(self, stage: str) -> None:
        """Group the ranks of a context; the processes have met by now."""
        self.ranks = self.parallel.context_ranks()

    def finish(self) -> None:
        """Make alpha what the stage leaves; called once, after the last step."""

    @property
    def result(self) -> Tensor:
        """What the stage leaves, of which `done.ckpt` has a copy."""
        return self.alpha

    def like_alpha(self, scores: Tensor) -> Tensor:
        """Return scores of a checkpoint in alpha's shape. Raises RuntimeError for scores that alpha cannot have."""
        if not torch.equal(scores.clamp(0, 1) if self.config.clamp else scores.nan_to_num(), scores):  # NaN is not NaN
            raise RuntimeError("scores are not finite, or not in [0, 1]")
        return scores.view_as(self.alpha)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise RuntimeError for another alpha than a stage can have had."""
        self.like_alpha(checkpoint["state_dict"]["alpha"])

    def penalty(self) -> Tensor:
        """Return the regulariser of the loss."""
        return self.alpha.new_zeros(())

    def distillation(self, batch: Batch) -> Tensor:
        """Return the distance of student and teacher at the answer tokens."""
        model = self.backbone.model
        prefix, question, full = read(
            model, batch, self.parallel.prefill_kernel, self.mean_keys, self.pruning.sink, self.ranks
        )
        return self.objective.distance(full, self.student(prefix, question, batch), batch.answers.lengths)

    def student(self, prefix: Prefix, question: Branch, batch: Batch) -> Tensor:
        """Return the student's rows of the answers, [R, N, hidden]."""
        raise NotImplementedError

    def training_step(self, batch: Batch, index: int) -> dict[str, Tensor]:
        """Return the loss of one batch, and the values that a run records."""
        distillation, penalty = self.distillation(batch), self.penalty()
        distillation, mean, tokens = self._over_ranks(batch, distillation)
        values = {"distillation": mean, "penalty": penalty.detach()}
        values |= {"alpha_mean": self.alpha.detach().mean(), "tokens": tokens}
        self.log_dict({f"{type(self).__name__.lower()}/{k}": v for k, v in values.items()})
        self.log("loss", mean, prog_bar=True, logger=False)
        self.log("alpha", values["alpha_mean"], prog_bar=True, logger=False)
        self._loss_of_all_ranks = mean + penalty.detach()
        return {"loss": distillation + penalty, **values}

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the backward pass; raise ValueError if the loss of all ranks is not finite."""
        factor = self.objective.factor
        distill.backward(loss * factor, self._loss_of_all_ranks)
        if factor != 1.0 and self.alpha.grad is not None:
            self.alpha.grad.div_(factor)

    def _over_ranks(self, batch: Batch, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weigh this rank's loss, so that the mean over ranks is the loss of all their documents in one batch.

        DDP gives every rank the same weight, and ranks differ in answer tokens, which the loss is a mean over.
        Returns the weighed loss, its mean over ranks, and the document tokens of all ranks.
        """
        tokens = to_device(batch.documents.lengths.sum().float(), loss.device)
        if self.trainer.world_size == 1:
            return loss, loss.detach(), tokens
        lengths = batch.answers.lengths
        counted = lengths.sum() if self.config.reduction == "official" else torch.ones_like(lengths).sum()
        counted = to_device(counted.to(loss.dtype), loss.device)
        gathered = self.all_gather(torch.stack([counted, loss.detach(), tokens.to(loss)]))  # [ranks, 3]
        assert isinstance(gathered, Tensor)
        counts, losses, all_tokens = gathered.unbind(1)
        share = counts / counts.sum()
        tokens = all_tokens.sum() / self.parallel.sequence_parallel  # the ranks of a context have the same ones
        return loss * share[self.trainer.global_rank] * len(share), (losses * share).sum(), tokens

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return Adam (the paper's choice), and the schedule of its learning rate."""
        lr, steps = self.config.lr, self.config.steps
        auto = lr == steering.AUTO
        rate, momentum = (steering.learning_rate(steps), steering.momentum(steps)) if auto else (float(lr), 0.9)
        optimizer = torch.optim.Adam([self.alpha], lr=rate, betas=(momentum, 0.999))
        factor = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: distill.lr_factor(step, steps, self.config.schedule)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": factor, "interval": "step"}}

    def optimizer_step(self, *given: Any, **more: Any) -> None:
        """Make a step, then clamp alpha to [0, 1] if the config says so."""
        super().optimizer_step(*given, **more)
        if self.config.clamp:
            with torch.no_grad():
                self.alpha.clamp_(0.0, 1.0)
