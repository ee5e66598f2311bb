"""Whether the heads of a layer look at the same tokens.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving", figure 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import normalize

from leank.data_gen.amount import amount
from leank.eval.inference.observe import received
from leank.eval.report.style import sheet
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, chosen_layers, distinct, only, row, values
from scripts.analyses.drawing import heat_map, legend, lines, whole_layers
from scripts.analyses.source import Source

PARTS = {"all": "all tokens", "middle": "without sink and window"}


@dataclass(frozen=True)
class HeadSimilarity(Analysis):
    """Cosine of the attention that two query heads of a layer give to the tokens, summed over the last queries.

    Most heads look at the first tokens and at the latest ones, whatever the text. So the cosine over the tokens between
    them, the only ones that can be evicted, stands beside the cosine over all.

    Settings
    task: str, default "niah_multikey_3": task of the sample.
    length: int, tokens, default 2048: of the sample.
    queries: int, default 32: last queries.
    sink, window: int, tokens, default 16 and 144: left out of the middle.
    layers: list of int or None, default None: whose pairs of heads are rows; None takes the first, the middle and the
      last.
    """

    task: str = "niah_multikey_3"
    length: Positive = 2048
    queries: Positive = 32
    sink: Count = 16
    window: Positive = 144
    layers: Sequence[Count] | None = None

    def measure(self, source: Source) -> Rows:
        """Rows "cosine" by pair of heads of the chosen layers, and "mean_cosine" of all layers; part says of what."""
        shown = chosen_layers(self.layers, source.config.num_hidden_layers)
        rows: Rows = []
        for index, layer in source.layers(self.task, self.length, 0, self.queries):
            assert layer.queries is not None
            given = received(layer.queries, layer.keys, scaling=layer.scaling, softmax=layer.softmax)[0]  # [Hq, T]
            end = given.shape[1] - self.window
            if end <= self.sink:
                held = amount(given.shape[1], "token")
                raise ValueError(f"sink={self.sink} and window={self.window} leave none of {held}")
            for part, some in (("all", given), ("middle", given[:, self.sink : end])):
                at: dict[str, Value] = {"layer": index, "task": self.task, "length": self.length, "part": part}
                unit = normalize(some.double(), dim=-1)
                cosine = unit @ unit.mT
                first, second = torch.triu_indices(len(cosine), len(cosine), offset=1).tolist()
                pairs = cosine[first, second].tolist()
                rows.append(row("mean_cosine", float(np.mean(pairs)) if pairs else None, "cosine", **at))
                if index in shown:
                    rows += [
                        row("cosine", x, "cosine", head=i, other_head=j, **at)
                        for i, j, x in zip(first, second, pairs, strict=True)
                    ]
        return rows

    def draw(self, rows: Rows) -> Figure:
        """The middle's cosine of every pair in the chosen layers above, the mean of all layers below."""
        pairs = only(rows, measure="cosine", part="middle")
        layers = distinct(pairs, "layer")
        figure = sheet(5)
        above, below = figure.subfigures(2, 1, height_ratios=(5, 4), squeeze=False).flat
        panels = above.subplots(1, len(layers), sharey=True, squeeze=False)[0]
        heads = 1 + max(int(one["other_head"] or 0) for one in pairs)
        for panel, layer in zip(panels, layers, strict=True):
            matrix = np.eye(heads)
            matrix[np.triu_indices(heads, 1)] = values(only(pairs, layer=layer))
            matrix = np.maximum(matrix, matrix.T)
            image = heat_map(panel, matrix, range(heads), range(heads), (0, 1), most=8)
            panel.set(title=f"layer {layer}", xlabel="query head", aspect="equal")
        panels[0].set_ylabel("query head")
        above.colorbar(image, ax=panels, label=f"cosine {PARTS['middle']}")
        axes = below.subplots()
        means = {label: only(rows, measure="mean_cosine", part=part) for part, label in PARTS.items()}
        lines(axes, {label: (values(some, "layer"), values(some)) for label, some in means.items()})
        axes.set(ylabel="mean cosine", ylim=(0, 1.03))
        whole_layers(axes)
        legend(below, axes)
        return figure
