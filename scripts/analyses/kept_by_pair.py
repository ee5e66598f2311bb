"""How much a mask keeps of each RoPE pair.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, section 5.1, figures 7 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from leank.eval.methods.channels.think import ThinK
from leank.eval.report.style import sheet
from leank.rotary import mean_by_pair, rotary_pairs
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, distinct, only, row, values
from scripts.analyses.drawing import heat_map, legend, lines
from scripts.analyses.source import Source


@dataclass(frozen=True)
class KeptByPair(Analysis):
    """Share of the kept channels in each RoPE pair: over all layers and KV heads, and in each layer.

    Pair p of D / 2 has the frequency theta^(-2p / D). Without a model it rotates the channels p and p + D / 2, and with
    one those that the model says. ThinK at the mask's pruning ratio stands beside it then, as in the paper's figures.

    Settings
    task: str, default "niah_multikey_3": task of the samples that ThinK sees.
    length: int, tokens, default 2048: of those samples.
    samples: int, default 2: how many; 0 leaves ThinK out.
    """

    task: str = "niah_multikey_3"
    length: Positive = 2048
    samples: Count = 2

    def measure(self, source: Source) -> Rows:
        """Rows "kept" by method and pair, of each layer and, with layer None, of all layers."""
        mask = source.need_mask()
        layers, _, dim = mask.keep.shape
        pairs = (torch.arange(dim) % (dim // 2)).expand(layers, dim)
        if source.model is not None:
            pairs = rotary_pairs(source.config)
        rows = _rows("mask", mask.keep, pairs)
        if source.model is not None and self.samples:
            rule = ThinK(mask.pruning_ratio)
            prompts = [source.ids(source.sample(self.task, self.length, index)) for index in range(self.samples)]
            masks = [rule.keep_mask(source.observe(ids, rule.obs_queries), source.config) for ids in prompts]
            mean = torch.stack([keep[0].double().cpu() for keep in masks]).mean(0)
            rows += _rows("ThinK", mean, pairs, task=self.task, length=self.length)
        return rows

    def draw(self, rows: Rows) -> Figure:
        """The share of each pair above, the mask's layers below."""
        figure = sheet(5.2)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
        mine = only(rows, layer=None)
        lines(top, {str(name): _points(only(mine, method=name)) for name in distinct(mine, "method")}, markersize=3)
        top.set(ylabel="kept channels, %", ylim=(0, None))
        top.axvline(len(_points(only(mine, method="mask"))[0]) / 2 - 0.5, color="grey", linewidth=0.8, linestyle="--")
        of_mask = [one for one in rows if one["method"] == "mask" and one["layer"] is not None]
        layers, pairs = distinct(of_mask, "layer"), distinct(of_mask, "pair")
        matrix = 100 * np.array(values(of_mask)).reshape(len(layers), len(pairs))
        image = heat_map(bottom, matrix, pairs, layers, (0, 100))
        bottom.set(xlabel="RoPE pair (0 = highest frequency; dashed: half of them)", ylabel="layer")
        figure.colorbar(image, ax=bottom, label="kept channels of the mask, %")
        legend(figure, top)
        return figure


def _points(rows: Rows) -> tuple[list[float], np.ndarray]:
    return values(rows, "pair"), 100 * np.array(values(rows))


def _rows(method: str, keep: Tensor, pairs: Tensor, **at: str | int) -> Rows:
    """Rows of a mask, or of a mean of masks, [L, H, D]; pairs: [L, D], the pair of each channel."""
    by_layer = mean_by_pair(keep, pairs)  # [L, pairs]
    places: list[tuple[int | None, Tensor]] = [(None, by_layer.mean(0)), *enumerate(by_layer)]
    return [
        row("kept", float(share), "share of channels", layer=layer, method=method, pair=pair, **at)
        for layer, shares in places
        for pair, share in enumerate(shares)
    ]
