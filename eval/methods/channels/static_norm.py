"""LeanK's preliminary static mask (section 2.2): mean channel norms over calibration samples, one for all inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eval.inference.prefill import Prefill
from eval.methods.channels.think import think_scores
from eval.methods.common.calibrated import Calibrated
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class StaticNorm(Calibrated):
    """Mean over samples and group of ||q_j|| ||k_j||, ThinK's score; the paper: 100 samples of niah_multikey_3 at 64K.

    queries: how many of a sample's last queries count.
    """

    queries: Positive = 32

    @property
    def observed(self) -> int:
        return self.queries

    def scores(self, prefill: Prefill) -> Tensor:
        return think_scores(prefill, self.queries, "norms")
