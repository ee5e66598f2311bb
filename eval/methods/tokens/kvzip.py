"""KVzip (arXiv 2505.23416, section 3): the tokens stay that the model attends to while it repeats the prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import top
from leank.eval.cache.storage.sizes import Sizes, middle_columns, real_positions
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Scored


@method("kvzip")
@dataclass(frozen=True)
class KVzip(Scored):
    """All KV heads of all layers share one budget, by the scores of the pass `repeat`.

      kept = top L H B of {score_lhj : l = 1 ... L, h = 1 ... H, j = 1 ... T},   B the budget, the mean of a head

    Deviation: the authors and kvpress protect the first tokens alone.
    """

    @property
    def settled(self) -> bool:
        return False

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        """What the pass `repeat` found, [B, H, T]. Raises ValueError after any other pass."""
        if layer.repeated is None:
            raise ValueError("kvzip scores tokens by the pass `repeat`; add prefill={name: repeat}")
        return layer.repeated

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        scores = torch.stack([self.scores(layer, prefill.real, config) for layer in prefill.layers], 1)
        none_seen = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        position = real_positions(none_seen, scores.shape[-1], prefill.real)
        middle = middle_columns(position, sizes)
        count = torch.as_tensor(self.counts(prefill, sizes)[0], device=scores.device)
        if bool((middle.sum(-1) <= count).all()):
            return [None] * len(prefill.layers)
        inside = middle[:, None, None]
        flat = scores.masked_fill(~inside, -torch.inf).flatten(1)
        chosen = top(flat, count[:, None] * scores.shape[1] * scores.shape[2]).view_as(scores) & inside
        return list((chosen | ((position >= 0) & ~middle)[:, None, None]).unbind(1))
