"""KeyDiff (arXiv 2504.15364, section 3): the tokens whose keys are least like the others; no query is looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import PreTrainedConfig

from leank.channel_scores import wide
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.segment import Segment
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Evicting


@method("keydiff")
@dataclass(frozen=True)
class KeyDiff(Evicting):
    """Every KV head keeps the tokens whose keys lie furthest from the mean direction of its keys.

      score_j = -cos(k_j, a),   a = mean over the tokens i held of k_i / ||k_i||

    Deviations
    - The paper goes through the prompt block by block and evicts after each. Here the prompt is read whole and cut
      once, as kvpress does without its block-wise wrapper, and a is the mean over all of it.
    - While decoding, tokens leave whenever `flush` of them have left the window, and a is the mean over the middle's
      tokens alone, in the channels that they keep. Under a mask with mean keys, all keys lack these.
    """

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        there = torch.ones_like(layer.keys[:, 0, :, 0], dtype=torch.bool) if real is None else real
        return unlike(layer.keys, there[:, None])

    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> Unlike:
        return Unlike(heavy)


class Unlike(HeavyHitters):
    """The `heavy` tokens of a head's middle whose keys are least like the mean direction of the middle's keys stay."""

    def ranking(self, prompt: Segment, tail: Segment, sink: int) -> Tensor:
        found = torch.zeros_like(self.scores)
        for row, head in np.argwhere(prompt.length + tail.length > self.heavy).tolist():
            keys = torch.cat([part.read(row, head)[0] for part in (prompt, tail)])
            there = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
            found[row, head, sink : sink + len(keys)] = unlike(keys, there)
        return found


def unlike(keys: Tensor, there: Tensor) -> Tensor:
    """-cos of keys [..., n, D] with their mean direction, [..., n]; there: bool, broadcast to [..., n], what counts."""
    keys = keys.to(wide(keys))
    each = normalize(keys, dim=-1) * there[..., None]
    anchor = each.sum(-2, keepdim=True) / there.sum(-1)[..., None, None]
    return -cosine_similarity(keys, anchor, dim=-1)
