"""Where the last queries look in every layer, and how the ranks of tokens move on their way up.

"Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference", arXiv 2601.07667, section 3, figures 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import MinLen
from matplotlib.figure import Figure

from leank.eval.methods.prefill.asl import ASL, ranks
from leank.eval.report.style import PALETTE, sheet
from leank.typed import Positive
from scripts.analyses.analysis import Analysis, Rows, Value, distinct, only, row, values
from scripts.analyses.drawing import heat_map, legend, lines, whole_layers
from scripts.analyses.relative_variance import layer_scores
from scripts.analyses.source import Source

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Ranks(Analysis):
    """Attention of the last queries by place in the prompt, and the ranks of the tokens that the last layer prefers.

    Settings
    tasks: list of names, default ("niah_multikey_3", "niah_single_2"): one sample of each.
    length: int, tokens, default 2048: of the samples.
    top: int, default 128: how many tokens the last layer prefers.
    bins: int, default 64: equal parts of the prompt.
    window, kernel: int, tokens, default 32 and 7: last queries, and neighbours over which scores are pooled, as in ASL.
    """

    tasks: Annotated[Sequence[str], MinLen(1)] = ("niah_multikey_3", "niah_single_2")
    length: Positive = 2048
    top: Positive = 128
    bins: Positive = 64
    window: Positive = 32
    kernel: Positive = 7

    def measure(self, source: Source) -> Rows:
        """Rows of every task and layer.

        "attention" by bin: the share of the attention before the window; "top_share": the share of the layer's own
        first `top` tokens; "rank" by quantile: where the last layer's first `top` tokens rank, as a share of all.
        """
        rows: Rows = []
        for task in self.tasks:
            rule = ASL(self.top + self.window, 0.5, self.window, self.kernel)
            scores = layer_scores(source, rule, task, self.length, 0)
            tokens = len(scores[0])
            preferred = scores[-1].topk(self.top).indices
            place = torch.arange(tokens, device=scores[0].device) * self.bins // tokens
            for layer, score in enumerate(scores):
                at: dict[str, Value] = {"layer": layer, "task": task, "length": self.length}
                share = score.double() / score.double().sum()
                binned = torch.zeros(self.bins, dtype=torch.double, device=share.device).index_add(0, place, share)
                rows += [row("attention", x, "share", bin=i, **at) for i, x in enumerate(binned.tolist())]
                rows.append(row("top_share", float(share.topk(self.top).values.sum()), "share", **at))
                rank = (ranks(score)[preferred].double() / tokens).quantile(share.new_tensor(QUANTILES))
                rows += [
                    row("rank", x, "share of tokens", quantile=q, **at)
                    for q, x in zip(QUANTILES, rank.tolist(), strict=True)
                ]
        return rows

    def draw(self, rows: Rows) -> Figure:
        """Above, attention by place and layer of each task; below, ranks (left) and the first tokens' share (right)."""
        tasks = distinct(rows, "task")
        layers = sorted({int(one["layer"] or 0) for one in rows})
        figure = sheet(5.2)
        above, below = figure.subfigures(2, 1, height_ratios=(5, 4), squeeze=False).flat
        panels = above.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for panel, task in zip(panels, tasks, strict=True):
            mine = only(rows, measure="attention", task=task)
            matrix = np.array(values(mine)).reshape(len(layers), -1)
            shown = np.log10(matrix * matrix.shape[1] + 1e-3)
            places = [f"{round(100 * i / matrix.shape[1])}%" for i in range(matrix.shape[1])]
            image = heat_map(panel, shown, places, layers, (-2, 1.5), most=6)
            panel.set(title=task, xlabel="place in the prompt")
        panels[0].set_ylabel("layer")
        above.colorbar(image, ax=panels, label="attention, log10 of\nmultiples of uniform", extend="both")
        left, right = below.subplots(1, 2)
        of = {str(task): only(rows, measure="rank", task=task) for task in tasks}
        lines(left, {name: (layers, 100 * np.array(values(only(found, quantile=0.5)))) for name, found in of.items()})
        for found, colour in zip(of.values(), PALETTE, strict=False):
            low, high = (100 * np.array(values(only(found, quantile=q))) for q in (QUANTILES[0], QUANTILES[-1]))
            left.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
        left.set(ylabel=f"rank of the last layer's\nfirst {self.top}, % of tokens", ylim=(0, None))
        shares = {task: only(rows, measure="top_share", task=task) for task in tasks}
        lines(right, {str(task): (layers, 100 * np.array(values(found))) for task, found in shares.items()})
        right.set(ylabel=f"attention on the layer's\nfirst {self.top} tokens, %", ylim=(0, 103))
        for panel in (left, right):
            whole_layers(panel)
        legend(below, left)
        return figure
