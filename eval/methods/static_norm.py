"""LeanK's preliminary static mask (section 2.2): mean channel norms over calibration samples, one for all inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from data_gen.sample import Sample
from data_gen.tasks import task
from data_gen.tokens import TokenCounter
from eval.benchmarks.ruler import draw
from eval.methods.axes import Channels, Observe
from eval.methods.think import check_observed, observed
from eval.prefill import Prefill
from leank_train.baselines import StaticNorm as Norms


@dataclass(frozen=True)
class StaticNorm(Channels):
    """ratio: share of K channels pruned. task, length, samples, seed: what to calibrate on (the paper: 100 samples of
    niah_multikey_3 at 64K). queries: how many of a sample's last queries count."""

    ratio: float = 0.7
    task: str = "niah_multikey_3"
    length: int = 2048
    samples: int = 8
    seed: int = 7
    queries: int = 32
    _found: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def check(self, config: Any, tokenizer: Any) -> None:
        check_observed(self.ratio, self.queries)
        task(self.task)
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be at least 1 to calibrate static_norm")
        self._sample(TokenCounter(tokenizer), 0)

    def identity(self) -> dict[str, Any]:
        names = ("ratio", "task", "length", "samples", "seed", "queries")
        return {name: getattr(self, name) for name in names}

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        if self._found:
            return
        norms, counter = Norms(), TokenCounter(tokenizer)
        for index in range(self.samples):
            norms.add(*observed(observe(self._sample(counter, index), self.queries), self.queries))
        self._found["keep"] = norms.mask(self.ratio).keep

    def _sample(self, counter: TokenCounter, index: int) -> Sample:
        return draw(self.task, self.length, counter, self.seed, index)

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        if not self._found:
            raise RuntimeError("static_norm must be calibrated before it is used")
        return self._found["keep"]
