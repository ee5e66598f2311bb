"""LeanK's preliminary static mask: mean channel norms over calibration samples, one mask for all inputs.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, section 2.2 and appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eval.inference.prefill import Prefill
from eval.methods.channels.think import think_scores
from eval.methods.common.calibrated import Calibrated
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class StaticNorm(Calibrated):
    """Every head keeps the channels of the largest mean ThinK score.

      Score[j] = mean over samples and query heads of the group of ||q_j|| ||k_j||

    Deviations
    - The paper has 100 samples of niah_multikey_3 at 64K; the defaults here are 8 at 2K.
    - Raw norms are averaged. Appendix A divides them by the norm of QK^T for each sample and head.

    Settings
    ratio: float in [0, 1), default 0.7: share of K channels pruned; floor(ratio * D) go in every head.
    task: str, default "niah_multikey_3": task of the samples.
    length: int, tokens, default 2048: longest sample.
    samples: int, default 8: number of samples.
    seed: int, default 7: seed of the samples.
    queries: int, default 32: last queries of a sample that are observed.
    """

    queries: Positive = 32

    @property
    def observed(self) -> int:
        return self.queries

    def scores(self, prefill: Prefill) -> Tensor:
        return think_scores(prefill, self.queries, "norms")
