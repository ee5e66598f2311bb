"""What all recipes share: where they learn, and what they leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypedDict

from lightning.pytorch.loggers import Logger
from torch import Tensor

from leank.backbone import Backbone
from leank.mask import ROUNDINGS, ChannelMask, check_ratio
from leank.shape import DecoderShape
from leank.typed import OneOf, Share
from leank_train.fitting import fit
from leank_train.run_folder import Run
from leank_train.running.preempt import Signals
from leank_train.running.recorder import Recorder
from leank_train.settings import RunConfig
from leank_train.stages import PruningConfig, Stage
from leank_train.validation import Validation
from leank_train.verdict import MASK, STAGE1


class Metrics(TypedDict, total=False):
    """The results of a training run; a run without validation has no "validation"."""

    pruning_ratio: float  # share of K channels that the mask prunes
    bytes: float  # share of dense's bytes that the middle of a layout of bits takes
    empty_heads: int  # empty_heads, heads: KV heads without kept channels, and all KV heads
    heads: int
    alpha_mean: float
    separation: dict[str, float]  # how far stage 1 has driven the scores apart (`Separation`); {} without a step
    distillation: dict[str, float]  # stage -> distillation loss of its last step
    verdict: dict[str, object]  # KL to dense of the mask and of its rivals, and doubts (`verdict`)
    seconds: dict[str, float]  # phase -> seconds
    config: str  # fingerprint of the settings
    validation: Validation


@dataclass(frozen=True)
class Training:
    """Where a recipe learns: the frozen model, and the folder of a run, from which every phase goes on."""

    current: Run
    backbone: Backbone
    means: Tensor | None  # [L, H, D], the keys that stand for pruned channels; None: 0
    logger: Logger | None
    signals: Signals

    def fit(self, stage: Stage, name: str) -> Recorder:
        """Run a stage; see `fitting.fit`."""
        return fit(self.current, stage, name, self.logger, self.signals)


@dataclass(frozen=True)
class Learned:
    """What a recipe leaves."""

    masks: Mapping[str, ChannelMask]  # what is saved, and compared in the verdict, by name; `MASK` is the run's
    scores: Mapping[str, Tensor]  # of alpha.safetensors
    alpha: Tensor  # [L, H, D], for the plots
    records: Mapping[str, Recorder]  # stage -> its course
    metrics: Metrics  # of this recipe alone

    def file(self, name: str) -> str:
        """Return the file of a mask in the run's folder."""
        first = f"stage1/mask_align{self.masks[name].metadata['alignment']}.safetensors"
        return {MASK: "mask.safetensors", STAGE1: first}.get(name, f"masks/{name}.safetensors")


@dataclass(frozen=True, kw_only=True)
class Recipe(RunConfig):
    """The settings of a run whose result this recipe learns."""

    where: ClassVar[str]  # settings of other recipes have no effect, as a message says it
    elsewhere: ClassVar[Mapping[str, object]]  # these settings, and the only value that each may have; ... = any

    def learn(self, training: Training) -> Learned:
        """Run all stages, and return the masks; every process does."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MaskPruning(PruningConfig):
    """The mask to learn."""

    ratio: Annotated[Share, "it is the share of channels to prune, e.g. 0.7"]  # share of K channels to prune
    rounding: Annotated[str, OneOf(*ROUNDINGS)] = "exact"  # see `ChannelMask.from_scores`
    # other ratios to learn, up to the highest: one order of channels, so that masks are part of each other
    nested: Sequence[Annotated[Share, "it is a share of channels to prune, e.g. 0.9"]] = ()


@dataclass(frozen=True, kw_only=True)
class Masks(Recipe):
    """A recipe of scores of channels, of which the best make a mask."""

    pruning: MaskPruning
    # other pruning ratios, for each of which the scores also give a mask
    extra_ratios: Sequence[Annotated[Share, "it is a share of channels to prune, e.g. 0.9"]] = ()

    def check_shape(self, shape: DecoderShape) -> None:
        super().check_shape(shape)
        pruning, found = self.pruning, {"pruning.ratio": [self.pruning.ratio], "extra_ratios": self.extra_ratios}
        for name, ratios in (found | {"pruning.nested": pruning.nested}).items():
            for ratio in ratios:
                check_ratio(shape, ratio, pruning.align, pruning.rounding, name)

    def cut(self, training: Training, scores: Tensor, ratio: float) -> ChannelMask:
        """Return the mask of the best channels by scores [L, H, D]."""
        origin, align, rounding = training.current.origin(training.backbone), self.pruning.align, self.pruning.rounding
        return ChannelMask.from_scores(scores, ratio, align, rounding, origin).with_means(training.means)

    def at_ratios(self, training: Training, scores: Tensor) -> dict[str, ChannelMask]:
        """Return the masks of the same scores at the other ratios, by name."""
        ratios = dict.fromkeys([*self.extra_ratios, *self.pruning.nested])
        return {f"mask_{100 * ratio:.12g}pct": self.cut(training, scores, ratio) for ratio in ratios}
