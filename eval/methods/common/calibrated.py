"""Static masks from calibration: mean channel scores over samples, one mask for all inputs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from data_gen.sample import Sample
from data_gen.tasks import task
from data_gen.tokens import TokenCounter
from eval.benchmarks.ruler import draw
from eval.inference.prefill import Prefill
from eval.methods.axes import Observe, Uniform
from leank_train.channel_scores import MeanScores
from leank_train.common.typed import Positive, Seed, Share


@dataclass(frozen=True)
class Calibrated(Uniform):
    """ratio: share of K channels pruned, floor(ratio * D) of every head. task, length, samples, seed: what to calibrate
    on.
    """

    ratio: Share = 0.7
    task: str = "niah_multikey_3"
    length: Positive = 2048
    samples: Positive = 8
    seed: Seed = 7
    _seen: MeanScores = field(default_factory=MeanScores, repr=False, compare=False)

    @property
    @abstractmethod
    def observed(self) -> int:
        """How many of a sample's last queries to look at."""

    def check(self, config: Any, tokenizer: Any) -> None:
        task(self.task)
        self._sample(TokenCounter(tokenizer), 0)

    def identity(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.name.startswith("_")}

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        if self._seen.samples:
            return
        counter = TokenCounter(tokenizer)
        for index in range(self.samples):
            self._seen.add(self.scores(observe(self._sample(counter, index), self.observed)))

    def _sample(self, counter: TokenCounter, index: int) -> Sample:
        return draw(self.task, self.length, counter, self.seed, index)

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        return self._seen.mask(self.ratio)

    @abstractmethod
    def scores(self, prefill: Prefill) -> Tensor:
        """How much each channel matters to the samples of one pass [B, L, H, D]; only ranks within a head count."""
