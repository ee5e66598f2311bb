"""ThinK (arXiv 2407.21018, section 3.2; ThinKV is its appendix D): channels by queries and keys, for each sample."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import GROUPS, best, pruned, query_key_scores
from leank.eval.cache.attention.softmax import written_out
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Uniform, method
from leank.eval.methods.common.observed import Seen, seen
from leank.shape import kv_shape
from leank.typed import OneOf, Positive, Share


@method("think")
@dataclass(frozen=True)
class ThinK(Uniform):
    """Every head keeps the channels that contribute most to the observed logits.

      Score[j]   = ||Q[-S_obs:, j] K[:, j]^T||_F = ||q_j|| ||k_j||
      Score_v[j] = ||softmax(Q[-S_obs:] K^T / sqrt(D)) V[:, j]||_F                                      (Eq. 3)

    K and V are those that the tokens axis kept, the most recent included. How many of these stay whole is the cache's
    window (32 in the paper, with sink 0).

    Deviations
    - The paper keeps floor((1 - ratio) * D) channels. Its code drops floor(ratio * D), and so does this.
    - Under GQA the paper's code works on repeated KV heads, each with channels of its own. Here a KV head is held once.
    - Generated keys are pruned when they leave the window; the paper keeps them whole for ever.
    - Eq. 3 has no causal mask. Here the observed queries do not see past themselves.
    """

    ratio: Share = 0.7  # share of K channels pruned; floor(ratio * D) go in every head
    queries: Positive = 32  # S_obs, last queries of the prompt that are observed
    # what is averaged over the query heads of a KV head; mean and sum choose alike
    group: Annotated[str, OneOf(*GROUPS)] = "squares"
    values: Share = 0.0  # share of V channels pruned (ThinKV)

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return best(think_scores(prefill, self.queries, self.group), self.ratio)

    def keep_value_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor | None:
        if not self.values:
            return None
        scores = [value_scores(layer, self.queries, self.group) for layer in seen(prefill, self.queries)]
        return best(torch.stack(scores, 1), self.values)

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = super().kept_counts(config, length)
        return k, v - pruned(kv_shape(config)[2], self.values)


def think_scores(prefill: Prefill, queries: int, group: str) -> Tensor:
    """Score[j] of every K channel, up to what the channels of a head share; [B, L, H, D]."""
    layers = seen(prefill, queries)
    return torch.stack([query_key_scores(s.queries(queries), s.keys.square().sum(2), group) for s in layers], 1)


def value_scores(seen_layer: Seen, queries: int, group: str) -> Tensor:
    """Score_v[j] of every V channel of a layer (Eq. 3), [B, H, D]; `group` is that of `query_key_scores`."""
    k, q, layer = seen_layer.keys, seen_layer.queries(queries), seen_layer.layer
    members, observed = q.shape[1] // k.shape[1], q.shape[2]
    place = torch.arange(k.shape[2], device=k.device)
    visible = seen_layer.stays[:, :, None] & (place <= place[-observed:, None])  # [B, 1 or H, n, T]
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(members, 1)
    # a query that sees none of the keys that stay adds nothing
    outputs = written_out(q, k, layer.values, layer.scaling, layer.softmax, visible)  # [B, Hq, n, D]
    energy = outputs.unflatten(1, (-1, members)).square().sum(3)  # [B, H, G, D]
    return energy.mean(2) if group == "squares" else energy.sqrt().mean(2)
