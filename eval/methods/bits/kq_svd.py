"""KQ-SVD: every head stores its keys by the coordinates from which its logits come back best.

"KQ-SVD: Compressing the KV Cache with Provable Guarantees on Attention Fidelity", arXiv 2512.05916.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from leank.channel_scores import pruned, wide
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import method
from leank.eval.methods.bits.pca import Coordinates, LowRank
from leank.eval.methods.common.observed import seen


@method("kq_svd")
@dataclass(frozen=True)
class KQSVD(LowRank):
    """A key k is stored as its r = D - floor(ratio D) coordinates k A, which queries read as q B.

      A = K^+ U,   B = K^T U

    U are the r largest left singular vectors of K Q^T. K holds all keys, after RoPE, of the calibration samples in one
    KV head, and Q all queries of its group. K A (Q B)^T = U U^T K Q^T is the best approximation of K Q^T of rank r, so
    no projection of keys alone, such as that of `pca`, has logits nearer to those of the samples.

    With G = K^T K, M = Q^T Q and the r largest eigenvectors E of G^1/2 M G^1/2, it is A = G^-1/2 E and B = G^1/2 E; so
    samples are held as two matrices [D, D]. A and B serve all prompts, so they count as weights and not as cache.

    Deviations
    - The paper stores V by coordinates, too, of which W_o makes the outputs; here V stays as it is.
    - The paper gives a layer the rank that leaves a wanted error; here r is the same in all heads.
    - Plain PyTorch reads keys back as k A B^T and does not project q: answers are the method's, time is not.
    """

    @property
    def observed(self) -> int:
        """All queries of a sample."""
        return self.length

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """G and M of all samples, [2, L, H, D, D], float64."""
        total = torch.zeros(())
        for prefill in passes:
            moments = []
            for one in seen(prefill):
                keys, queries = one.keys[0].double(), one.queries(self.length)[0].double()
                queries = queries.unflatten(0, (len(keys), -1)).flatten(1, 2)  # those of a group in a row
                moments.append(torch.stack([keys.mT @ keys, queries.mT @ queries]).cpu())
            total = total + torch.stack(moments, 1)
        return total

    def projections(self) -> tuple[Tensor, Tensor]:
        """A and B of every head, each [L, H, D, r], float64. Raises RuntimeError before calibration."""
        of_keys, of_queries = self._found[self.calibrated_on]
        values, vectors = torch.linalg.eigh(of_keys)
        dim = values.shape[-1]
        root = values.clamp(min=0).sqrt()
        inverse = torch.where(values > 1e-12 * values[..., -1:], 1 / root, 0)  # directions without keys have none
        half, back = ((vectors * x[..., None, :]) @ vectors.mT for x in (root, inverse))
        best = torch.linalg.eigh(half @ of_queries @ half).eigenvectors.flip(-1)[..., : dim - pruned(dim, self.ratio)]
        return back @ best, half @ best

    def of_layer(self, index: int, prefill: Prefill) -> Projected:
        stored, read = self.projections()
        return Projected(stored[index], read[index])


@dataclass(frozen=True)
class Projected(Coordinates):
    """The codec of one layer: `basis` is A [H, D, r], `read` is B [H, D, r]."""

    read: Tensor

    def decode(self, records: Tensor, rows: np.ndarray) -> Tensor:
        return records.to(wide(records)) @ self.read.to(wide(records)).mT

    def to(self, device: torch.device) -> Self:
        return replace(self, basis=self.basis.to(device), read=self.read.to(device))
