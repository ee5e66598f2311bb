"""Choices that are the same for all inputs and come from calibration samples, such as masks of mean channel scores."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import MeanScores, best
from leank.data_gen.task import Sample
from leank.data_gen.tasks import task
from leank.eval.benchmarks.ruler import draw
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Axis, Observe, Uniform
from leank.typed import Positive, Samples, Seed, Share


class Calibration(dict[tuple[object, ...], Tensor]):
    """What calibration found, by the settings that it depends on.

    Copies of a choice that `dataclasses.replace` makes share this object. A copy that differs in how much it prunes
    finds the scores there, so samples are read once. A copy that differs in its samples does not, and reads its own.
    """

    def __missing__(self, key: tuple[object, ...]) -> Tensor:
        raise RuntimeError(f"a choice with the settings {key} must be calibrated before it is used")


@dataclass(frozen=True)
class FromSamples(Axis):
    """Base of choices that are the same for all inputs and come from calibration samples."""

    task: str = "niah_multikey_3"  # task of the samples
    length: Positive = 2048  # longest sample, tokens
    samples: Samples = 8  # number of samples
    seed: Seed = 7  # seed of the samples
    _found: Calibration = field(default_factory=Calibration, repr=False, compare=False)

    @property
    def obs_queries(self) -> int:
        return 0

    @property
    def observed(self) -> int:
        """How many of a sample's last queries are observed: those of the setting `queries`, if there is one."""
        return getattr(self, "queries", 0)

    @abstractmethod
    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """What is found on the dense passes over the samples, which come one after the other."""

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        """Every setting but the ratio: what is found depends on them."""
        return tuple(value for name, value in self.identity().items() if name != "ratio")

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        task(self.task)
        self._sample(tokenizer, 0)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        if self.calibrated_on not in self._found:
            samples = (self._sample(tokenizer, index) for index in range(self.samples))
            self._found[self.calibrated_on] = self.of_samples(observe(sample, self.observed) for sample in samples)

    def _sample(self, tokenizer: PreTrainedTokenizerBase, index: int) -> Sample:
        return draw(self.task, self.length, tokenizer, self.seed, index)


@dataclass(frozen=True)
class Pruning(Axis):
    """Base of choices by which a share of every head goes."""

    ratio: Share = 0.7  # share of every head's channels or dimensions that go: floor(ratio * D)


@dataclass(frozen=True)
class Calibrated(FromSamples, Pruning, Uniform):
    """Base of choices of channels whose mask is the same for all inputs."""

    @abstractmethod
    def scores(self, prefill: Prefill) -> Tensor:
        """How much each channel matters to the samples of one pass [B, L, H, D]; only ranks within a head count."""

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        mean = MeanScores()
        for one in passes:
            mean.add(self.scores(one))
        return mean.scores

    def mask(self) -> Tensor:
        """Kept channels, bool [L, H, D]. Raises RuntimeError before calibration."""
        return best(self._found[self.calibrated_on], self.ratio)

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return self.mask()
