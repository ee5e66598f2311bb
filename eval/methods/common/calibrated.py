"""Static masks from calibration: mean channel scores over samples, one mask for all inputs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from data_gen.sample import Sample
from data_gen.tasks import task
from data_gen.tokens import TokenCounter
from eval.benchmarks.ruler import draw
from eval.inference.prefill import Prefill
from eval.methods.axes import Observe, Uniform
from leank_train.channel_scores import MeanScores, best
from leank_train.common.typed import Positive, Samples, Seed, Share


class Calibration(dict[tuple[object, ...], Tensor]):
    """What calibration found, by the settings that it depends on.

    Copies of a choice that `dataclasses.replace` makes share this object. A copy that differs in how much it prunes
    finds the scores there, so samples are read once. A copy that differs in its samples does not, and reads its own.
    """

    def __missing__(self, key: tuple[object, ...]) -> Tensor:
        raise RuntimeError(f"a choice with the settings {key} must be calibrated before it is used")


@dataclass(frozen=True)
class Calibrated(Uniform):
    """Base of choices whose mask is the same for all inputs and comes from calibration samples.

    Settings
    ratio: float in [0, 1), default 0.7: share of K channels pruned; floor(ratio * D) go in every head.
    task: str, default "niah_multikey_3": task of the samples.
    length: int, tokens, default 2048: longest sample.
    samples: int, default 8: number of samples.
    seed: int, default 7: seed of the samples.
    """

    ratio: Share = 0.7
    task: str = "niah_multikey_3"
    length: Positive = 2048
    samples: Samples = 8
    seed: Seed = 7
    _scores: Calibration = field(default_factory=Calibration, repr=False, compare=False)

    @property
    @abstractmethod
    def observed(self) -> int:
        """How many of a sample's last queries are observed."""

    @abstractmethod
    def scores(self, prefill: Prefill) -> Tensor:
        """How much each channel matters to the samples of one pass [B, L, H, D]; only ranks within a head count."""

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        """Every setting but the ratio: what the scores depend on."""
        return tuple(value for name, value in self.identity().items() if name != "ratio")

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        task(self.task)
        self._sample(TokenCounter(tokenizer), 0)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        if self.calibrated_on in self._scores:
            return
        counter, mean = TokenCounter(tokenizer), MeanScores()
        for index in range(self.samples):
            mean.add(self.scores(observe(self._sample(counter, index), self.observed)))
        self._scores[self.calibrated_on] = mean.scores

    def _sample(self, counter: TokenCounter, index: int) -> Sample:
        return draw(self.task, self.length, counter, self.seed, index)

    def mask(self) -> Tensor:
        """Kept channels, bool [L, H, D]. Raises RuntimeError before calibration."""
        return best(self._scores[self.calibrated_on], self.ratio)

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return self.mask()
