"""KeyDiff (arXiv 2504.15364, section 3): the tokens whose keys are least like the others; no query is looked at."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import PreTrainedConfig

from leank.channel_scores import wide
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Scored


@method("keydiff")
@dataclass(frozen=True)
class KeyDiff(Scored):
    """Every KV head keeps the tokens whose keys lie furthest from the mean direction of its keys.

      score_j = -cos(k_j, a),   a = mean over the prompt's tokens i of k_i / ||k_i||

    Deviation: the paper goes through the prompt block by block and evicts after each, and while decoding. Here the
    prompt is read whole and cut once, as kvpress does without its block-wise wrapper.
    """

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        keys = layer.keys.to(wide(layer.keys))
        there = torch.ones_like(keys[:, 0, :, 0]) if real is None else real.to(keys)
        each = normalize(keys, dim=-1) * there[:, None, :, None]
        anchor = each.sum(2, keepdim=True) / there.sum(-1)[:, None, None, None]
        return -cosine_similarity(keys, anchor, dim=-1)
