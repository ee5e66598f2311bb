"""PyramidInfer (arXiv 2405.12532, section 3): layer by layer, fewer of the tokens that recent ones attend to go on."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.slicing import RowPass, slicing, window_and_best
from leank.typed import Count, OneOf, Positive

SCHEDULES = ("cosine", "linear")


@method("pyramid_infer")
@dataclass(frozen=True)
class PyramidInfer(RowPass):
    """Pivotal contexts in the pass over the prompt.

    The recent tokens always stay. Their attention to what precedes them, averaged over heads, chooses what goes on from
    layer l of L: a share p(l / L) of it, where

      p(x) = decay + (1 - decay) (1 + cos(pi x)) / 2   (cosine)   or   decay + (1 - decay) (1 - x)   (linear)

    There is no budget: the shares say what is kept.

    Deviations
    - The paper gives top-p by recent attention and a p that decays with depth. The schedules and all defaults are those
      of the authors' code for Llama 3 8B, which multiplies the shares up from layer to layer. Its "linear" is never
      reached there: that code runs at a constant share.
    - The scores come from one more pass over the logits of the recent queries, in tiles, not from a T x T matrix.
    - K and V of new tokens all stay during decoding. The authors drop some in groups of 16.
    """

    free = "decay"
    # share of the prompt's last tokens that stay, in addition to the very last one
    recent: Annotated[float, Gt(0), Le(1)] = 0.2
    # share at depth 1, the end of the schedule, which starts at 1 at the first layer
    decay: Annotated[float, Ge(0), Le(1)] = 0.9
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "cosine"  # how the share falls with depth
    least: Count = 64  # a layer that would pass on no more than this of what precedes passes on all
    every: Positive = 1  # layers from one choice to the next
    sink: Count = 4  # first tokens that always stay
    newest: Annotated[float, Gt(0)] = 1.2  # weight of the newest recent query relative to the oldest, on a line

    def share(self, depth: float) -> float:
        """p(depth): share of what precedes the recent tokens that goes on from a layer at depth layer / layers."""
        fall = (1 + math.cos(math.pi * depth)) / 2 if self.schedule == "cosine" else 1 - depth
        return self.decay + (1 - self.decay) * fall

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        layers, columns = config.num_hidden_layers, [length]
        recent = self._recent(length)
        for index in range(layers - 1):
            columns.append(recent + self._passed(columns[-1] - recent, index, layers))
        return columns, columns

    def _recent(self, columns: int) -> int:
        return min(columns, 1 + int(columns * self.recent))

    def _passed(self, before: int, index: int, layers: int) -> int:
        """Of `before` tokens that precede the recent ones, how many go on from a layer."""
        keep = int(before * self.share(index / layers))
        return before if index % self.every or not self.least < keep < before else keep

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        columns, layers = ids.shape[1], model.config.get_text_config(decoder=True).num_hidden_layers
        recent = self._recent(columns)
        weights = torch.linspace(1, self.newest, recent, device=ids.device) / recent

        def choose(index: int, layer: PromptLayer) -> Tensor | None:
            sums, layer.column_sums = layer.column_sums, None
            assert sums is not None
            before = layer.keys.shape[2] - recent
            keep = self._passed(before, index, layers)
            if keep == before:
                return None
            scores = sums[0, :, :before].sum(0)  # ranks as the mean over heads does
            scores[: self.sink] = torch.inf
            return window_and_best(scores, keep, recent)

        with slicing(model, choose):
            return prefill(model, ids, None, room, obs_queries, column_sums=weights)
