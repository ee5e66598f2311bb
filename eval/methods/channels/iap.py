"""IAP: channels are pruned one by one, with regard to how they interact.

"Rethinking KV Cache Pruning with Channel Interdependence for Efficient Long-Context Inference", anonymous ACL
submission without an arXiv number or public code: Algorithm 1 and section 3.3, for all heads, layers and rows at once.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import pruned, top
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Uniform, method
from leank.eval.methods.common.observed import seen
from leank.shape import kv_shape
from leank.typed import Count, Positive, Share


@method("iap")
@dataclass(frozen=True)
class IAP(Uniform):
    """Prune the set B of channels that greedily keeps the error of the observed logits small.

      E(B)    = ||Q K^T - Q S K^T||_F^2 = sum of M_ij over i, j in B,   M_ij = (k_i . k_j) (q_i . q_j)        (Eq. 3)
      Delta_i = M_ii + sum of M_ij over j in B, j != i                                                        (Eq. 4)

    q_i, k_i are columns of Q [n, D], the last `queries` queries, and of K [T - recent, D]. Each step moves the channel
    i of the smallest M_ii + interaction * sum of M_ij into B. An interaction of 2 ranks by what i adds to E(B): its own
    Delta_i and the growth of the others'. An interaction of 1 ranks by Delta_i alone, as Eq. 4 reads. An interaction of
    0 is ThinK's choice.

    Salient channels (section 3.3) are those of the largest ||k_i|| in a head, and are never pruned: as many as exceed
    mean + standard deviation, at least floor(salient_min * D) and at most floor(salient_max * D).

    Deviations, all but the last where the paper is silent
    - Under GQA, Q holds the queries of all the heads of a group, so E is their summed error.
    - The standard deviation is that of a sample (D - 1). Norms are of the keys that are scored.
    - The paper's [a, b] of [3, 7] or [5, 10] have no unit; they are read as percent of D. It sets [0, 0] for short
      caches.
    - Keys that the tokens axis dropped do not count.
    - The paper has one recent size, of the keys that stay whole and are not scored. Here the cache's window stays
      whole, and `recent` keys are not scored.

    Cost per KV head: T D^2 for the Gram matrix of K, n G D^2 for that of Q, then floor(ratio * D) steps of O(D), each
    one batched operation for all rows, layers and heads. M takes D^2 numbers per head meanwhile.
    """

    ratio: Share = 0.7  # share of K channels pruned; floor(ratio * D) go in every head
    queries: Positive = 32  # last queries of the prompt that are observed
    recent: Count = 32  # last keys that are not scored
    salient_min: Share = 0.03  # least share of channels that is protected
    salient_max: Share = 0.07  # largest share of channels that is protected
    interaction: Annotated[float, Ge(0)] = 2.0  # weight of the interaction with the channels already pruned

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        dim = kv_shape(config)[2]
        kept, low, high = dim - pruned(dim, self.ratio), self.salient_min, self.salient_max
        if low > high:
            raise ValueError(f"salient_min={low} must be at most salient_max={high}")
        if int(high * dim) > kept:
            raise ValueError(
                f"salient_max={high} protects more than the {kept} of {dim} channels that ratio={self.ratio} keeps"
            )

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        found = [interactions(s.queries(self.queries), s.keys) for s in seen(prefill, self.queries, self.recent)]
        matrix, norms = (torch.stack(x, 1) for x in zip(*found, strict=True))  # [B, L, H, D, D], [B, L, H, D]
        protected = salient(norms, self.salient_min, self.salient_max)
        return ~greedy(matrix, pruned(norms.shape[-1], self.ratio), protected, self.interaction)


def interactions(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """M of Eq. 3 [B, H, D, D], summed over a group, and ||k_i|| [B, H, D]; queries [B, Hq, n, D]."""
    stacked = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, H, G * n, D]
    of_keys = keys.mT @ keys
    return of_keys * (stacked.mT @ stacked), of_keys.diagonal(dim1=-2, dim2=-1).sqrt()


def salient(norms: Tensor, low: float, high: float) -> Tensor:
    """Channels to protect, bool like norms [..., D] (section 3.3)."""
    dim = norms.shape[-1]
    marked = norms > norms.mean(-1, keepdim=True) + norms.std(-1, keepdim=True)
    return top(norms, marked.sum(-1, keepdim=True).clamp(int(low * dim), int(high * dim)))


def greedy(matrix: Tensor, count: int, protected: Tensor, interaction: float = 2.0) -> Tensor:
    """Algorithm 1: the `count` channels to drop, bool [..., D], none that is protected; matrix: M, [..., D, D]."""
    dropped = torch.zeros_like(protected)
    score = matrix.diagonal(dim1=-2, dim2=-1).masked_fill(protected, torch.inf)
    for _ in range(count):
        worst = score.argmin(-1, keepdim=True)
        dropped.scatter_(-1, worst, True)
        edges = torch.take_along_dim(matrix, worst[..., None], -2).squeeze(-2)  # M_ij of the one dropped
        score = (score + interaction * edges).scatter(-1, worst, torch.inf)
    return dropped
