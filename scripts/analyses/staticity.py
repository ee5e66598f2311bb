"""Whether the same channels matter in every task and at every length.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, figure 1 (left, middle) and
appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import MinLen
from matplotlib.figure import Figure
from torch import Tensor

from leank.channel_scores import best, wide
from leank.eval.methods.channels.iap import interactions
from leank.eval.report.style import sheet
from leank.typed import Positive, Share
from scripts.analyses.analysis import Analysis, Rows, Value, distinct, only, row, values
from scripts.analyses.drawing import heat_map
from scripts.analyses.source import Source


@dataclass(frozen=True)
class Staticity(Analysis):
    """Pearson correlation between the channels' norm ratios of two tasks, or of two lengths.

      r_i = ||Q_[i] K_[i]^T||_F / ||Q K^T||_F       (appendix A, of the last `queries` queries and all keys)

    One vector r holds all layers, KV heads and channels; it is the mean over `samples`. Pearson's coefficient follows
    the few largest channels. So rows hold a second measure, too: of the channels that pruning `ratio` of every head by
    r keeps for one task, the share that it keeps for the other. Masks drawn at random share 1 - ratio.

    Deviation: the paper has one ratio for each query head. Here the query heads of a KV head share one, as they share
    the mask: both norms are over all their queries.

    Settings
    tasks: names of at least two tasks of data_gen: the five that are compared.
    length: int, tokens, default 2048: of the samples in the comparison of tasks.
    lengths: at least two ints, tokens: compared with one another.
    task: str, default "niah_multikey_3": of the samples in the comparison of lengths.
    samples: int, default 2: samples per task and length.
    queries: int, default 32: last queries of a prompt that are observed.
    ratio: float in [0, 1), default 0.7: share of channels that is pruned for the second measure.
    """

    tasks: Annotated[Sequence[str], MinLen(2)] = ("niah_single_2", "niah_multikey_3", "niah_multivalue", "vt", "fwe")
    length: Positive = 2048
    lengths: Annotated[Sequence[Positive], MinLen(2)] = (1024, 2048, 4096)
    task: str = "niah_multikey_3"
    samples: Positive = 2
    queries: Positive = 32
    ratio: Share = 0.7

    def measure(self, source: Source) -> Rows:
        """Rows "pearson" and "overlap" of every pair of tasks, then of every pair of lengths; axis says which."""
        found: dict[tuple[str, int], Tensor] = {}
        compared = {
            "tasks": [(name, self.length) for name in self.tasks],
            "lengths": [(self.task, length) for length in self.lengths],
        }
        for cell in dict.fromkeys(cell for cells in compared.values() for cell in cells):
            found[cell] = self._mean(source, *cell)
        return [
            one
            for axis, cells in compared.items()
            for one in self._compare(axis, {cell: found[cell] for cell in cells})
        ]

    def _mean(self, source: Source, task: str, length: int) -> Tensor:
        """Mean over samples of r, [L, H, D]."""
        each = [
            norm_ratios(layer.queries, layer.keys)
            for index in range(self.samples)
            for _, layer in source.layers(task, length, index, self.queries)
        ]
        return torch.stack(each).unflatten(0, (self.samples, -1)).mean(0).cpu()

    def _compare(self, axis: str, found: dict[tuple[str, int], Tensor]) -> Rows:
        rows = []
        for (task, length), a in found.items():
            for (other_task, other_length), b in found.items():
                at: dict[str, Value] = {
                    "task": task,
                    "length": length,
                    "other_task": other_task,
                    "other_length": other_length,
                }
                pearson = float(np.corrcoef(a.flatten(), b.flatten())[0, 1])
                both = best(a, self.ratio) & best(b, self.ratio)
                overlap = float(both.sum() / best(a, self.ratio).sum())
                rows.append(row("pearson", pearson, "correlation", axis=axis, **at))
                rows.append(row("overlap", overlap, "share of kept channels", axis=axis, **at))
        return rows

    def draw(self, rows: Rows) -> Figure:
        """Four heat maps: both measures between tasks and between lengths."""
        figure = sheet(6.4)
        panels = figure.subplots(2, 2, width_ratios=(5, 3))
        labels = {"pearson": "Pearson correlation", "overlap": f"common share, {100 * self.ratio:g}% pruned"}
        for line, (measure, label) in zip(panels, labels.items(), strict=True):
            for panel, (axis, name) in zip(line, (("tasks", "task"), ("lengths", "length")), strict=True):
                mine = only(rows, measure=measure, axis=axis)
                names = distinct(mine, name)
                matrix = np.array(values(mine)).reshape(len(names), len(names))
                shown = [f"{n:,}" if isinstance(n, int) else str(n) for n in names]
                image = heat_map(panel, matrix, shown, shown, (0, 1), numbers="{:.2f}")
                panel.set_title(axis)
                panel.tick_params(axis="x", rotation=35 if axis == "tasks" else 0)
            figure.colorbar(image, ax=line, label=label)
        return figure


def norm_ratios(queries: Tensor | None, keys: Tensor) -> Tensor:
    """r_i of every channel of one prompt's layer, [H, D].

    queries: [1, Hq, n, D].
    keys: [1, H, T, D].
    """
    assert queries is not None
    matrix, _ = interactions(queries.to(wide(queries)), keys.to(wide(keys)))  # M_ij = (k_i . k_j)(q_i . q_j)
    return (matrix.diagonal(dim1=-2, dim2=-1) / matrix.sum((-2, -1))[..., None]).sqrt()[0]
