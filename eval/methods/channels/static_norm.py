"""LeanK's preliminary static mask, one for all inputs (arXiv 2508.02215, section 2.2 and appendix A)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import method
from leank.eval.methods.channels.think import think_scores
from leank.eval.methods.common.calibrated import Calibrated
from leank.eval.methods.common.observed import seen
from leank.typed import Positive


@method("static_norm")
@dataclass(frozen=True)
class StaticNorm(Calibrated):
    """Every head keeps the channels of the largest mean ThinK score.

      Score[j] = mean over samples and query heads of the group of ||q_j|| ||k_j||

    Deviations (`papers/static_norm` has the paper's settings)
    - The paper has 100 samples of niah_multikey_3 at 64K; the defaults here are 8 at 2K.
    - Raw norms are averaged by default. Appendix A divides them by the norm of QK^T per sample and head: `relative`.
    """

    queries: Positive = 32  # last queries of a sample that are observed
    relative: bool = False  # whether a query head's norms of one sample are divided by its ||Q K^T||_F first

    def scores(self, prefill: Prefill) -> Tensor:
        if not self.relative:
            return think_scores(prefill, self.queries, "norms")
        return torch.stack([relative_norms(s.queries(self.queries), s.keys) for s in seen(prefill, self.queries)], 1)


def relative_norms(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean over a group of ||q_j|| ||k_j|| / ||Q K^T||_F, [B, H, D], of queries [B, Hq, n, D] and keys [B, H, T, D]."""
    q = queries.unflatten(1, (keys.shape[1], -1))  # [B, H, G, n, D]
    both = (q.mT @ q) * (keys.mT @ keys)[:, :, None]  # its sum is ||Q K^T||_F^2, its diagonal ||q_j||^2 ||k_j||^2
    return (both.diagonal(dim1=-2, dim2=-1) / both.sum((-2, -1))[..., None]).sqrt().mean(2)
