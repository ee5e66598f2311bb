"""The share of high frequencies in every head's logits, and what happens if heads stream by it.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, section 5.2, figure 8; appendix D,
table 11.
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

from leank.channel_scores import lowest_frequencies
from leank.data_gen.amount import amount
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.eval.report.style import INK, PALETTE, plain, sheet
from leank.typed import Count, Positive, Share
from scripts.analyses.analysis import Analysis, Rows, distinct, only, row, values
from scripts.analyses.answers import known
from scripts.analyses.drawing import heat_map
from scripts.analyses.source import Source

DENSE, RANDOM = "dense", "random"


@dataclass(frozen=True)
class HighFrequencyRatio(Analysis):
    """w_hf of every KV head, and how often the model in which heads of the highest or lowest w_hf stream is right.

      w_hf = ||q_high K_high^T||_F / ||q K^T||_F

    `eval.methods.tokens.duo_attention` defines it. A streaming head reads the sink and the window alone. Random heads,
    equally many, are the control.

    Deviation: the paper has RULER's recall of free replies. Here an answer counts if greedy decoding writes all of it,
    which needs no decoding to know (`answers.known`).

    Settings
    task: str, default "vt": task of the sample on which w_hf is measured.
    tasks: list of names, default ("vt", "niah_multikey_3"): tasks on which the models are compared.
    length: int, tokens, default 2048: of all samples.
    samples: int, default 4: samples per task.
    shares: list of floats in [0, 1), default (0.25, 0.5): shares of the heads that stream.
    trials: int, default 4: draws of random heads.
    queries: int, default 32: last queries of the sample on which w_hf is measured.
    sink, window: int, tokens, default 16 and 144: what a streaming head reads.
    """

    task: str = "vt"
    tasks: Annotated[Sequence[str], MinLen(1)] = ("vt", "niah_multikey_3")
    length: Positive = 2048
    samples: Positive = 4
    shares: Annotated[Sequence[Share], MinLen(1)] = (0.25, 0.5)
    trials: Positive = 4
    queries: Positive = 32
    sink: Count = 16
    window: Positive = 144

    def measure(self, source: Source) -> Rows:
        """Rows "w_hf" of every head, and "exact" by task, order of the heads, share and trial."""
        high = ~lowest_frequencies(source.config, 0.5).keep
        prompt = source.observe(source.ids(source.sample(self.task, self.length, 0)), self.queries)
        ratio = high_frequency_ratio(prompt, high, self.queries)
        rows = [
            row("w_hf", value if np.isfinite(value) else None, "ratio of norms", layer=layer, head=head,
                task=self.task, length=self.length)
            for layer, heads in enumerate(ratio.tolist()) for head, value in enumerate(heads)
        ]  # fmt: skip
        chosen = self._chosen(ratio)
        keep = ~torch.stack([heads for *_, heads in chosen])[..., None].expand(-1, -1, -1, high.shape[-1])
        for task in self.tasks:
            exact = torch.zeros(len(chosen), dtype=torch.float64)
            for index in range(1, 1 + self.samples):  # sample 0 is the one on which w_hf was measured
                sample = source.sample(task, self.length, index)
                exact += 100 * known(source, sample, keep, self.sink, self.window, "drop").exact / self.samples
            rows += [
                row("exact", value, "%", task=task, length=self.length, order=order, share=share, trial=trial)
                for (order, share, trial, _), value in zip(chosen, exact.tolist(), strict=True)
            ]
        return rows

    def _chosen(self, ratio: Tensor) -> list[tuple[str, float, int, Tensor]]:
        """Order, share, trial, and the heads [L, H] that stream; none of them in the dense model, which is first."""
        there = ratio.isfinite()  # not so in layers with sliding-window attention
        orders = [("highest", 0, -ratio), ("lowest", 0, ratio)]
        orders += [
            (RANDOM, trial, torch.rand(ratio.shape, generator=torch.Generator().manual_seed(trial)))
            for trial in range(self.trials)
        ]
        chosen = [(DENSE, 0.0, 0, torch.zeros_like(there))]
        for share in self.shares:
            count = int(share * int(there.sum()) + 0.5)
            for order, trial, score in orders:
                place = score.masked_fill(~there, torch.inf).flatten().argsort(stable=True).argsort()
                chosen.append((order, share, trial, (place < count).view_as(there)))
        return chosen

    def draw(self, rows: Rows) -> Figure:
        """w_hf of every head, and the exact answers by share of streaming heads."""
        figure = sheet(3.4)
        left, right = figure.subplots(1, 2, width_ratios=(4, 5))
        ratios, exact = only(rows, measure="w_hf"), only(rows, measure="exact")
        layers, heads = distinct(ratios, "layer"), distinct(ratios, "head")
        image = heat_map(left, np.array(values(ratios)).reshape(len(layers), len(heads)), heads, layers, (0, 1))
        left.set(xlabel="KV head", ylabel="layer")
        figure.colorbar(image, ax=left, label="w_hf")
        dense = np.mean(values(only(exact, order=DENSE)))
        shares = [share for share in distinct(exact, "share") if share]
        plain(right)
        for number, (order, colour) in enumerate(zip(("highest", "lowest", RANDOM), PALETTE, strict=False)):
            each = [self._by_trial(only(exact, order=order, share=share)) for share in shares]
            x = np.arange(len(shares)) + 0.27 * (number - 1)
            right.bar(x, [trials.mean() for trials in each], 0.25, color=colour, label=f"{order} w_hf"
                      if order != RANDOM else f"random heads (dots: {amount(len(each[0]), 'draw')})")  # fmt: skip
            if order == RANDOM:
                for at, trials in zip(x, each, strict=True):
                    right.plot([at] * len(trials), trials, ".", color=INK, markersize=4)
        right.axhline(float(dense), color=INK, linewidth=1, linestyle="--", label="dense")
        right.set_xticks(range(len(shares)), [f"{100 * float(share):g}% of heads stream" for share in shares])
        right.set(ylabel="exact answers, %, mean over tasks", ylim=(0, 103))
        figure.legend(*right.get_legend_handles_labels(), loc="outside upper left", ncols=4)
        return figure

    def _by_trial(self, rows: Rows) -> np.ndarray:
        """The mean over tasks of every trial."""
        return np.array([np.mean(values(only(rows, trial=trial))) for trial in distinct(rows, "trial")])
