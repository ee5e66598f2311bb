"""How much the queries of an observation window vary.

"Rethinking KV Cache Pruning with Channel Interdependence for Efficient Long-Context Inference", figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from leank.channel_scores import wide
from leank.eval.report.style import PALETTE, plain, sheet
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, chosen_layers, distinct, only, row, values
from scripts.analyses.drawing import legend, lines, whole_layers
from scripts.analyses.source import Source


@dataclass(frozen=True)
class QuerySpread(Analysis):
    """Mean and standard deviation of every query channel, after RoPE, over the last queries of a prompt.

    The row "unsteady" of a layer is the share of its channels, over all query heads, whose deviation is larger than
    the size of their mean.

    Settings
    task: str, default "niah_single_2": task of the sample.
    length: int, tokens, default 2048: of the sample.
    queries: int, at least 2, default 32: last queries of the prompt.
    layers: list of int or None, default None: whose channels are rows; None takes the first, the middle and the last.
    head: int, default 0: query head whose channels are rows.
    """

    task: str = "niah_single_2"
    length: Positive = 2048
    queries: Positive = 32
    layers: Sequence[Count] | None = None
    head: Count = 0

    def measure(self, source: Source) -> Rows:
        """Rows "mean" and "deviation" by channel of the chosen layers, and "unsteady" of every layer."""
        if self.queries < 2:
            raise ValueError(f"queries={self.queries} have no deviation; observe at least 2")
        at: dict[str, Value] = {"task": self.task, "length": self.length}
        shown = chosen_layers(self.layers, source.config.num_hidden_layers)
        rows: Rows = []
        for layer, found in source.layers(self.task, self.length, 0, self.queries):
            assert found.queries is not None
            queries = found.queries[0].to(wide(found.queries))  # [Hq, n, D]
            mean, deviation = queries.mean(1), queries.std(1)
            if layer in shown:
                if self.head >= len(queries):
                    raise ValueError(f"head={self.head}: the model has the query heads 0 to {len(queries) - 1}")
                rows += [
                    row(name, value, "activation", layer=layer, head=self.head, channel=channel, **at)
                    for name, found_ in (("mean", mean), ("deviation", deviation))
                    for channel, value in enumerate(found_[self.head].tolist())
                ]
            rows.append(
                row("unsteady", float((deviation > mean.abs()).double().mean()), "share of channels", layer=layer, **at)
            )
        return rows

    def draw(self, rows: Rows) -> Figure:
        """A panel of means with their deviations per chosen layer, and the share of unsteady channels by layer."""
        layers = distinct(only(rows, measure="mean"), "layer")
        figure = sheet(1.5 * len(layers) + 1.7)
        *panels, last = figure.subplots(len(layers) + 1, 1)
        for panel, layer in zip(panels, layers, strict=True):
            mean, deviation = (only(rows, measure=name, layer=layer) for name in ("mean", "deviation"))
            channel, middle, reach = np.array(values(mean, "channel")), np.array(values(mean)), values(deviation)
            plain(panel).bar(channel, reach, color=PALETTE[1], alpha=0.6, label="standard deviation")
            panel.bar(channel, middle, color=PALETTE[0], width=0.45, label="mean")
            panel.set(ylabel=f"layer {layer}", xlim=(-1, len(channel)))
        panels[-1].set_xlabel(f"channel of query head {self.head}")
        unsteady = only(rows, measure="unsteady")
        lines(last, {"unsteady": (values(unsteady, "layer"), 100 * np.array(values(unsteady)))})
        last.set(ylabel="deviation > |mean|,\n% of channels", ylim=(0, 103))
        whole_layers(last)
        legend(figure, panels[0])
        return figure
