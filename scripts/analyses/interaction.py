"""How the channels of a head interact in its logits.

"Rethinking KV Cache Pruning with Channel Interdependence for Efficient Long-Context Inference", figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from leank.channel_scores import wide
from leank.eval.methods.channels.iap import interactions
from leank.eval.report.style import sheet
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, chosen_layers, distinct, only, row, values
from scripts.analyses.drawing import DIVERGING, heat_map, legend, lines, whole_layers
from scripts.analyses.source import Source

SHARES = {
    "off_diagonal": "of all |M|, off the diagonal",
    "extreme": "of the D largest |M|, off the diagonal",
    "concentrated": "of |M| off the diagonal, in a tenth of the channels",
}


@dataclass(frozen=True)
class Interaction(Analysis):
    """Interaction terms of channels i and j, M_ij = (k_i . k_j) (q_i . q_j), of the last queries and all keys.

    The rows of a head's matrix hold M_ij for i <= j, as shares of the largest |M|. Three shares sum up every layer,
    each the mean over KV heads and samples: how much of |M| lies off the diagonal; how many of the D largest |M_ij|
    (i <= j) do; and how much of what lies off the diagonal falls to the tenth of the channels that has most of it.

    Settings
    task: str, default "niah_single_2": task of the samples, whose haystack is natural text.
    length: int, tokens, default 2048: of the samples.
    samples: int, default 2: samples over which shares are averaged; matrices are of the first.
    queries: int, default 32: last queries of a prompt that are observed.
    layers: list of int or None, default None: whose matrices are rows; None takes the first, the middle and the last.
    head: int, default 0: KV head whose matrices are rows.
    """

    task: str = "niah_single_2"
    length: Positive = 2048
    samples: Positive = 2
    queries: Positive = 32
    layers: Sequence[Count] | None = None
    head: Count = 0

    def measure(self, source: Source) -> Rows:
        """Rows "interaction" of the chosen layers, and the three shares of every layer."""
        at: dict[str, Value] = {"task": self.task, "length": self.length}
        rows: Rows = []
        sums: dict[int, list[Tensor]] = {}
        shown = chosen_layers(self.layers, source.config.num_hidden_layers)
        for index in range(self.samples):
            for layer, found in source.layers(self.task, self.length, index, self.queries):
                assert found.queries is not None
                matrix = interactions(found.queries.to(wide(found.queries)), found.keys.to(wide(found.keys)))[0][0]
                sums.setdefault(layer, []).append(torch.stack(list(shares(matrix).values())).mean(1).cpu())
                if index == 0 and layer in shown:
                    if self.head >= len(matrix):
                        raise ValueError(f"head={self.head}: the model has the KV heads 0 to {len(matrix) - 1}")
                    scaled = (matrix[self.head] / matrix[self.head].abs().max()).tolist()
                    rows += [
                        row("interaction", scaled[i][j], "share of the largest", layer=layer, head=self.head,
                            channel=i, other=j, **at)
                        for i in range(len(scaled)) for j in range(i, len(scaled))
                    ]  # fmt: skip
        for layer, each in sums.items():
            mean = torch.stack(each).mean(0).tolist()
            rows += [row(name, share, "share", layer=layer, **at) for name, share in zip(SHARES, mean, strict=True)]
        return rows

    def draw(self, rows: Rows) -> Figure:
        """A heat map per chosen layer above, the shares by layer below."""
        terms = only(rows, measure="interaction")
        layers = distinct(terms, "layer")
        figure = sheet(5.4)
        above, below = figure.subfigures(2, 1, height_ratios=(5, 4), squeeze=False).flat
        panels = above.subplots(1, len(layers), sharey=True, squeeze=False)[0]
        dim = len(distinct(terms, "channel"))
        limit = max(0.01, float(np.quantile(np.abs(values(terms)), 0.995)))
        for panel, layer in zip(panels, layers, strict=True):
            matrix = np.zeros((dim, dim))
            matrix[np.triu_indices(dim)] = values(only(terms, layer=layer))
            matrix = np.triu(matrix) + np.triu(matrix, 1).T
            image = heat_map(panel, matrix, range(dim), range(dim), (-limit, limit), DIVERGING, most=5)
            panel.set(title=f"layer {layer}, KV head {terms[0]['head']}", xlabel="channel", aspect="equal")
        panels[0].set_ylabel("channel")
        above.colorbar(image, ax=panels, label="M, share of the largest |M|", extend="both")
        axes = below.subplots()
        mine = {label: only(rows, measure=name) for name, label in SHARES.items()}
        lines(axes, {label: (values(found, "layer"), 100 * np.array(values(found))) for label, found in mine.items()})
        axes.set(ylabel="%", ylim=(0, 103))
        whole_layers(axes)
        legend(below, axes, 2)
        return figure


def shares(matrix: Tensor) -> dict[str, Tensor]:
    """The shares of `SHARES` for matrices M [H, D, D], each [H]."""
    dim = matrix.shape[-1]
    size, diagonal = matrix.abs(), torch.eye(dim, dtype=torch.bool, device=matrix.device)
    off = size.masked_fill(diagonal, 0)
    row, column = torch.triu_indices(dim, dim, device=matrix.device)
    largest = size[:, row, column].topk(dim).indices
    involved = off.sum(-1).sort(-1, descending=True).values  # of each channel
    return {
        "off_diagonal": off.sum((-2, -1)) / size.sum((-2, -1)),
        "extreme": (row[largest] != column[largest]).to(matrix.dtype).mean(-1),
        "concentrated": involved[:, : max(1, dim // 10)].sum(-1) / involved.sum(-1),
    }
