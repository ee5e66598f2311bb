"""At which layer ASL selects tokens, by task.

"Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference", arXiv 2601.07667, appendix D.4, figures 9, 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import MinLen
from matplotlib.figure import Figure

from leank.eval.methods.prefill.asl import ASL
from leank.eval.report.style import sheet
from leank.typed import Positive
from scripts.analyses.analysis import Analysis, Rows, distinct, only, row, values
from scripts.analyses.drawing import heat_map
from scripts.analyses.relative_variance import TASKS, layer_scores, lookback, relative_variances, third
from scripts.analyses.source import Source


@dataclass(frozen=True)
class SelectionLayers(Analysis):
    """The first layer whose relative variance falls below tau, for every sample; None where none does.

    Settings
    tasks: list of names: the tasks that are compared.
    length: int, tokens, default 1024: of the samples.
    samples: int, default 4: samples per task.
    thresholds: list of floats in (0, 1), default (0.3, 0.6, 0.9): values of tau; the paper takes 0.3.
    budget: int, tokens, default 256: as in ASL; less than the shortest prompt has.
    window, kernel: int, tokens, default 32 and 7: as in ASL.
    observed: int of at least 2, or None, default None: L_obs; None as in `relative_variance`.
    first: int or None, default None: L_min; None takes a third of the layers.
    """

    tasks: Annotated[Sequence[str], MinLen(1)] = TASKS
    length: Positive = 1024
    samples: Positive = 4
    thresholds: Annotated[Sequence[float], MinLen(1)] = (0.3, 0.6, 0.9)
    budget: Positive = 256
    window: Positive = 32
    kernel: Positive = 7
    observed: Positive | None = None
    first: Positive | None = None

    def measure(self, source: Source) -> Rows:
        """Rows by task, sample and threshold.

        "selection_layer": the layer, or None for never; "whole_layers": how many layers read all tokens, which are
        those up to the selection, or all of the model where none selects.
        """
        rows: Rows = []
        observed = self.observed or lookback(source)
        rule = ASL(self.budget, self.thresholds[0], self.window, self.kernel, observed, self.first or third(source))
        for task in self.tasks:
            for sample in range(self.samples):
                scores = layer_scores(source, rule, task, self.length, sample)
                first, found = relative_variances(source, rule, scores)
                for tau in self.thresholds:
                    layer = next((first + i for i, value in enumerate(found) if value < tau), None)
                    whole = len(scores) if layer is None else layer + 1
                    rows += [
                        row(measure, value, unit, task=task, length=self.length, sample=sample, threshold=tau,
                            observed=observed, first=first, layers=len(scores))
                        for measure, value, unit in (
                            ("selection_layer", layer, "layer"), ("whole_layers", whole, "layers"))
                    ]  # fmt: skip
        return rows

    def draw(self, rows: Rows) -> Figure:
        """A heat map per threshold: the share of a task's samples that select at a layer, or never."""
        rows = only(rows, measure="selection_layer")
        tasks, thresholds = distinct(rows, "task"), distinct(rows, "threshold")
        begin, end = int(values(rows, "first")[0]), int(values(rows, "layers")[0])
        names = [*map(str, range(begin, end)), "never"]
        figure = sheet(1.4 + 0.32 * len(tasks))
        panels = figure.subplots(1, len(thresholds), sharey=True, squeeze=False)[0]
        for panel, threshold in zip(panels, thresholds, strict=True):
            shares = []
            for task in tasks:
                found = values(only(rows, task=task, threshold=threshold))
                place = [len(names) - 1 if np.isnan(layer) else int(layer) - begin for layer in found]
                shares.append(100 * np.bincount(place, minlength=len(names)) / len(place))
            image = heat_map(panel, np.array(shares), names, tasks, (0, 100))
            panel.tick_params(axis="x", rotation=60)
            panel.set(title=f"tau = {threshold:g}", xlabel="selection layer")
        figure.colorbar(image, ax=panels, label="% of samples")
        return figure
