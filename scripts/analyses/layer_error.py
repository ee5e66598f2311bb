"""How far pruned logits and attention outputs are from the full ones in each layer: IAP against ThinK.

"Rethinking KV Cache Pruning with Channel Interdependence for Efficient Long-Context Inference", figure 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import MinLen
from matplotlib.figure import Figure
from torch import Tensor

from leank.channel_scores import wide
from leank.eval.cache.attention import dense
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.channels.iap import IAP, interactions
from leank.eval.methods.channels.think import ThinK
from leank.eval.report.style import INK, PALETTE, sheet
from leank.typed import Positive, Share
from scripts.analyses.analysis import Analysis, Rows, Value, distinct, only, row, values
from scripts.analyses.drawing import legend, lines, whole_layers
from scripts.analyses.source import Source, full_attention

ERRORS = {"logits": "logits Q K^T", "outputs": "attention outputs"}


@dataclass(frozen=True)
class LayerError(Analysis):
    """Relative errors of every layer when a method prunes the channels of all its keys.

      logits    ||Q K^T - Q S K^T||_F / ||Q K^T||_F        (the paper's Eq. 2)
      outputs   ||O - O_S||_F / ||O||_F                    (O = softmax(Q K^T / sqrt(D)) V, causal)

    Q are the last `queries` queries. Both methods choose their channels in the full model's pass, so the error of a
    layer does not hold that of the layers below it.

    Settings
    task: str, default "niah_single_2": task of the samples, whose haystack is natural text.
    length: int, tokens, default 2048: of the samples.
    samples: int, default 4: samples; each is a curve.
    ratios: list of floats in [0, 1), default (0.4, 0.6): shares of the channels that are pruned.
    queries: int, default 32: last queries of a prompt, which the methods observe as well.
    """

    task: str = "niah_single_2"
    length: Positive = 2048
    samples: Positive = 4
    ratios: Annotated[Sequence[Share], MinLen(1)] = (0.4, 0.6)
    queries: Positive = 32

    def measure(self, source: Source) -> Rows:
        """Rows "logits" and "outputs" by layer, sample, ratio and method."""
        at: dict[str, Value] = {"task": self.task, "length": self.length}
        rows: Rows = []
        for sample in range(self.samples):
            prompt = source.observe(source.ids(source.sample(self.task, self.length, sample)), self.queries)
            for ratio in self.ratios:
                for name, rule in (("ThinK", ThinK(ratio, self.queries)), ("IAP", IAP(ratio, self.queries))):
                    keep = rule.keep_mask(prompt, source.config)[0]  # [L, H, D]
                    for index, layer in full_attention(prompt):
                        rows += [
                            row(measure, error, "relative error", layer=index, sample=sample, ratio=ratio,
                                method=name, **at)
                            for measure, error in errors(layer, keep[index], self.queries)
                        ]  # fmt: skip
        return rows

    def draw(self, rows: Rows) -> Figure:
        """By how much IAP's error is smaller than ThinK's: thin lines are samples, thick lines their mean."""
        figure = sheet(3.2)
        panels = figure.subplots(1, len(ERRORS), sharey=True)
        for panel, (measure, title) in zip(panels, ERRORS.items(), strict=True):
            layers, means = sorted({int(one["layer"] or 0) for one in rows}), {}
            for ratio, colour in zip(distinct(rows, "ratio"), PALETTE, strict=False):
                think, iap = (
                    np.array(values(only(rows, measure=measure, ratio=ratio, method=name))).reshape(-1, len(layers))
                    for name in ("ThinK", "IAP")
                )
                gain = 100 * (1 - iap / think)  # [samples, layers]
                panel.plot(layers, gain.T, color=colour, alpha=0.35, linewidth=0.7)
                means[f"{100 * float(ratio or 0):g}% of channels pruned"] = (layers, gain.mean(0))
            lines(panel, means)
            panel.axhline(0, color=INK, linewidth=0.8)
            panel.set_title(title)
            whole_layers(panel)
        panels[0].set_ylabel("IAP's error below ThinK's, %")
        legend(figure, panels[0])
        return figure


def errors(layer: PromptLayer, keep: Tensor, queries: int) -> Iterator[tuple[str, float]]:
    """Both relative errors of one prompt's layer, summed over heads, if only the channels keep [H, D] stay."""
    assert layer.queries is not None
    q, k = (x.to(wide(x)) for x in (layer.queries[:, :, -queries:], layer.keys))
    v, keep = layer.values.to(k.dtype), keep.to(k.device)
    matrix = interactions(q, k)[0][0]  # [H, D, D]
    gone = (~keep).to(k.dtype)
    lost = (gone[:, None] @ matrix @ gone[..., None]).sum()
    yield "logits", float((lost.clamp(min=0) / matrix.sum()).sqrt())
    full, pruned = (dense.attend(q, keys, v, layer.scaling, None, layer.softmax) for keys in (k, k * keep[:, None]))
    yield "outputs", float((full - pruned).norm() / full.norm())
