"""PyramidInfer (arXiv 2405.12532): layer by layer, fewer of the tokens go on that recent tokens attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor
from transformers import PreTrainedModel

from eval.inference.observe import received
from eval.inference.prefill import Prefill, PromptLayer, prefill
from eval.methods.common.slicing import RowPass, slicing, window_and_best
from leank_train.common.typed import Count, OneOf, Positive

SCHEDULES = ("cosine", "linear")


@dataclass(frozen=True)
class PyramidInfer(RowPass):
    """Pivotal contexts, in the pass over the prompt. recent: share of the prompt's last tokens that always stay, the
    last one besides, and whose attention to what precedes them, mean over heads, chooses; the newest of them count
    `newest` times as much as the oldest. decay: share of what precedes them that the last layer would pass on, from 1
    at the first along a cosine or a line (schedule). least: what precedes them never gets fewer than this. every:
    layers from one choice to the next. sink: first tokens that always stay.

    The paper gives top-p by recent attention and a p that decays with depth; the schedules and all defaults are those
    of the authors' code for Llama 3 8B, which multiplies the shares up from layer to layer (its "linear" is never
    reached there: it runs at a constant share). There is no budget: the shares say what is kept. Apart from the
    authors': attention runs a block of queries at a time, not as one T x T matrix; K and V of new tokens all stay
    during decoding, where the authors drop some in groups of 16.
    """

    free = "decay"
    recent: Annotated[float, Gt(0), Le(1)] = 0.2
    decay: Annotated[float, Gt(0), Le(1)] = 0.9
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "cosine"
    least: Count = 64
    every: Positive = 1
    sink: Count = 4
    newest: Annotated[float, Gt(0)] = 1.2

    def share(self, depth: float) -> float:
        """Share of what precedes the recent tokens that goes on from a layer at depth layer / layers."""
        fall = (1 + math.cos(math.pi * depth)) / 2 if self.schedule == "cosine" else 1 - depth
        return self.decay + (1 - self.decay) * fall

    def kept_counts(self, config: Any, length: int) -> tuple[list[int], list[int]]:
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
            assert layer.queries is not None
            queries = layer.queries
            layer.queries = queries[:, :, -obs_queries:].clone() if obs_queries else None  # the rest is large
            before = layer.keys.shape[2] - recent
            keep = self._passed(before, index, layers)
            if keep == before:
                return None
            each = received(queries, layer.keys, weights, scaling=layer.scaling, softmax=layer.softmax)
            scores = each[0, :, :before].mean(0)
            scores[: self.sink] = torch.inf
            return window_and_best(scores, keep, recent)

        with slicing(model, choose):
            return prefill(model, ids, None, room, max(recent, obs_queries))
