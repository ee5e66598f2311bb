"""Whether a few channels of K, and of V, are larger than the others.

"ThinK: Thinner Key Cache by Query-Driven Pruning", arXiv 2407.21018, appendix A, figure 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from leank.channel_scores import wide
from leank.eval.report.style import PALETTE, plain, sheet
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, chosen_layers, distinct, only, row, values
from scripts.analyses.drawing import legend, lines, whole_layers
from scripts.analyses.source import Source

PARTS = ("K", "V")


@dataclass(frozen=True)
class Magnitudes(Analysis):
    """Mean size of every channel over a prompt's tokens, of K after RoPE and of V.

    "spread" sums up a head: the standard deviation of its channels' mean sizes over their mean. The paper's figure has
    every token; here the first and the last decile over tokens stand beside the mean.

    Settings
    task: str, default "niah_single_2": task of the sample, whose haystack is natural text.
    length: int, tokens, default 2048: of the sample.
    layers: list of int or None, default None: whose channels are rows; None takes the first, the middle and the last.
    head: int, default 0: KV head whose channels are rows.
    """

    task: str = "niah_single_2"
    length: Positive = 2048
    layers: Sequence[Count] | None = None
    head: Count = 0

    def measure(self, source: Source) -> Rows:
        """Rows "mean", "low" and "high" by part (K or V) and channel of the chosen layers, and "spread" by head."""
        shown = chosen_layers(self.layers, source.config.num_hidden_layers)
        rows: Rows = []
        for layer, found in source.layers(self.task, self.length, 0, 0):
            for part, held in zip(PARTS, (found.keys, found.values), strict=True):
                at: dict[str, Value] = {"layer": layer, "task": self.task, "length": self.length, "part": part}
                size = held[0].to(wide(held)).abs()  # [H, T, D]
                mean = size.mean(1)
                spread = (mean.std(-1) / mean.mean(-1)).tolist()
                rows += [row("spread", x, "deviation over mean", head=head, **at) for head, x in enumerate(spread)]
                if layer not in shown:
                    continue
                if self.head >= len(size):
                    raise ValueError(f"head={self.head}: the model has the KV heads 0 to {len(size) - 1}")
                # one channel at a time: torch.quantile takes no more than 2^24 numbers
                deciles = size.new_tensor([0.1, 0.9])
                low, high = torch.stack([channel.quantile(deciles) for channel in size[self.head].T], 1)
                rows += [
                    row(name, x, "activation", head=self.head, channel=channel, **at)
                    for name, each in (("mean", mean[self.head]), ("low", low), ("high", high))
                    for channel, x in enumerate(each.tolist())
                ]
        return rows

    def draw(self, rows: Rows) -> Figure:
        """Channels of K (left) and V (right) per chosen layer, and the spread of every layer below."""
        layers = distinct(only(rows, measure="mean"), "layer")
        figure = sheet(1.4 * len(layers) + 2.1)
        above, below = figure.subfigures(2, 1, height_ratios=(1.4 * len(layers), 1.9), squeeze=False).flat
        panels = above.subplots(len(layers), 2, squeeze=False, sharex=True)
        for line, layer in zip(panels, layers, strict=True):
            for panel, part, colour in zip(line, PARTS, PALETTE, strict=False):
                mean, low, high = (only(rows, measure=m, layer=layer, part=part) for m in ("mean", "low", "high"))
                channel = values(mean, "channel")
                plain(panel).bar(channel, values(mean), color=colour, width=0.9)
                panel.vlines(channel, values(low), values(high), color="grey", linewidth=0.6)
                panel.set_title(f"|{part}|, layer {layer}, KV head {mean[0]['head']}")
        for panel in panels[-1]:
            panel.set_xlabel("channel (grey: 10% to 90% of tokens)")
        axes, found = below.subplots(), {}
        for part in PARTS:
            spread = only(rows, measure="spread", part=part)
            places = sorted({int(one["layer"] or 0) for one in spread})
            found[part] = (places, np.array(values(spread)).reshape(len(places), -1).mean(1))
        lines(axes, found)
        axes.set(ylabel="spread of channels,\ndeviation / mean", ylim=(0, None))
        whole_layers(axes)
        legend(below, axes)
        return figure
