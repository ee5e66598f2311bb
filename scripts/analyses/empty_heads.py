"""Where a mask's empty heads lie.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, appendix M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from leank.channel_scores import lowest_frequencies
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.eval.report.style import PALETTE, plain, sheet
from leank.typed import Positive
from scripts.analyses.analysis import Analysis, Rows, distinct, only, row, values
from scripts.analyses.drawing import heat_map
from scripts.analyses.source import Source


@dataclass(frozen=True)
class EmptyHeads(Analysis):
    """Kept channels of every KV head, and how many heads of each layer keep none.

    An empty head stores no middle, neither K nor V. The paper says that most lie in shallow layers (43% of Qwen's in
    the first five), and that they have a high share of high frequencies, w_hf. With a model, rows hold the mean w_hf
    of empty heads and of the others, too.

    Settings
    first: int, default 5: the first layers, whose share of the empty heads is a row of its own.
    task: str, default "vt": task of the sample on which w_hf is measured.
    length: int, tokens, default 2048: of that sample.
    queries: int, default 32: last queries of the sample.
    """

    first: Positive = 5
    task: str = "vt"
    length: Positive = 2048
    queries: Positive = 32

    def measure(self, source: Source) -> Rows:
        """Rows "kept" by head, "empty" by layer and of all layers, "empty_in_first", and "w_hf" by group of heads."""
        kept = source.need_mask().channels_per_head
        empty = kept == 0
        by_layer, total = empty.sum(1), int(empty.sum())
        rows = [
            row("kept", int(count), "channels", layer=layer, head=head)
            for layer, heads in enumerate(kept)
            for head, count in enumerate(heads)
        ]
        rows += [row("empty", int(count), "heads", layer=layer) for layer, count in enumerate(by_layer)]
        rows.append(row("empty", total, "heads"))
        early = int(by_layer[: self.first].sum()) / total if total else None
        rows.append(row("empty_in_first", early, "share of empty heads", layers=self.first))
        if source.model is None:
            return rows
        high = ~lowest_frequencies(source.config, 0.5).keep
        prompt = source.observe(source.ids(source.sample(self.task, self.length, 0)), self.queries)
        ratio = high_frequency_ratio(prompt, high, self.queries)
        for group, heads in (("empty", empty), ("others", ~empty)):
            found = ratio[heads & ratio.isfinite()]
            mean = float(found.mean()) if len(found) else None
            rows.append(row("w_hf", mean, "ratio of norms", task=self.task, length=self.length, group=group))
        return rows

    def draw(self, rows: Rows) -> Figure:
        """Empty heads of each layer above, the channels that every head keeps below."""
        figure = sheet(4.6)
        top, bottom = figure.subplots(2, 1, sharex=True)
        empty = [one for one in only(rows, measure="empty") if one["layer"] is not None]
        plain(top).bar(values(empty, "layer"), values(empty), color=PALETTE[1])
        top.set(ylabel="empty heads")
        kept = only(rows, measure="kept")
        layers, heads = distinct(kept, "layer"), distinct(kept, "head")
        image = heat_map(bottom, np.array(values(kept)).reshape(len(layers), len(heads)).T, layers, heads)
        bottom.set(xlabel="layer", ylabel="KV head")
        figure.colorbar(image, ax=bottom, label="kept channels")
        return figure
