"""How the ranks of tokens by attention settle on their way up.

"Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference", arXiv 2601.07667, section 4.1, figure 6;
appendix D.2, figure 8.
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

from leank.eval.methods.common.slicing import window_scores
from leank.eval.methods.prefill.asl import ASL, rank_variance, ranks
from leank.eval.report.style import INK, sheet
from leank.typed import Positive
from scripts.analyses.analysis import Analysis, Rows, distinct, only, row, values
from scripts.analyses.drawing import legend, lines, whole_layers
from scripts.analyses.source import Source

TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multikey_3", "vt")


@dataclass(frozen=True)
class RelativeVariance(Analysis):
    """Variance of the token ranks over the last L_obs layers, as a multiple of that at layer L_min, by layer and task.

    It is ASL's (`eval.methods.prefill.asl`): ranks by the attention of the last queries, pooled and summed over heads;
    the mean over tokens among the first k in any of these layers. A layer below the threshold tau would select.

    Settings
    tasks: list of names: the tasks that are compared.
    length: int, tokens, default 2048: of the samples.
    samples: int, default 2: samples per task.
    budget: int, tokens, default 512: k and the window; less than the shortest prompt has.
    window, kernel: int, tokens, default 32 and 7: as in ASL.
    observed: list of ints of at least 2, or None, default None: values of L_obs; None takes ASL's for the model.
    firsts: list of ints or None, default None: values of L_min; None takes a third of the layers.
    """

    tasks: Annotated[Sequence[str], MinLen(1)] = TASKS
    length: Positive = 2048
    samples: Positive = 2
    budget: Positive = 512
    window: Positive = 32
    kernel: Positive = 7
    observed: Sequence[Positive] | None = None
    firsts: Sequence[Positive] | None = None

    def measure(self, source: Source) -> Rows:
        """Rows "relative_variance" by task, sample, L_obs, L_min and layer."""
        rows: Rows = []
        rules = [
            ASL(self.budget, 0.5, self.window, self.kernel, observed, first)
            for observed in self.observed or [lookback(source)] for first in self.firsts or [third(source)]
        ]  # fmt: skip
        for task in self.tasks:
            for sample in range(self.samples):
                scores = layer_scores(source, rules[0], task, self.length, sample)
                for rule in rules:
                    first, found = relative_variances(source, rule, scores)
                    rows += [
                        row("relative_variance", value, "multiple of L_min's", layer=first + above, task=task,
                            length=self.length, sample=sample, observed=rule.observed, first=first)
                        for above, value in enumerate(found)
                    ]  # fmt: skip
        return rows

    def draw(self, rows: Rows) -> Figure:
        """A panel per L_obs and L_min; lines are tasks, the mean over samples."""
        cells = list(dict.fromkeys((one["observed"], one["first"]) for one in rows))
        columns = min(3, len(cells))
        figure = sheet(0.8 + 2.4 * -(-len(cells) // columns))
        panels = list(figure.subplots(-(-len(cells) // columns), columns, sharey=True, squeeze=False).flat)
        for panel, (observed, first) in zip(panels, cells, strict=False):
            mine = only(rows, observed=observed, first=first)
            layers = sorted({int(one["layer"] or 0) for one in mine})
            means = {
                str(task): (layers, np.array(values(only(mine, task=task))).reshape(-1, len(layers)).mean(0))
                for task in distinct(mine, "task")
            }
            lines(panel, means)
            panel.axhline(1, color=INK, linewidth=0.8, linestyle="--")
            panel.set(title=f"L_obs = {observed}, L_min = {first}", ylim=(0, None))
            whole_layers(panel)
        for panel in panels[len(cells) :]:
            panel.set_axis_off()
        figure.supylabel("relative variance of ranks", fontsize=9)
        legend(figure, panels[0], 5)
        return figure


def lookback(source: Source) -> int:
    """L_obs as ASL takes it for a model."""
    return ASL().rule(source.config).observed


def third(source: Source) -> int:
    """L_min as the paper has it: a third of the layers, also for models whose ASL starts later."""
    return max(1, source.config.num_hidden_layers // 3)


def layer_scores(source: Source, rule: ASL, task: str, length: int, sample: int) -> list[Tensor]:
    """The score of every token before the window in every layer, each [T - window], as ASL ranks them.

    Raises ValueError for a rule that does not fit the model or a prompt that is not longer than the budget.
    """
    model, tokenizer = source.need_model()
    rule.check(model.config.get_text_config(decoder=True), tokenizer)
    found = source.layers(task, length, sample, rule.window)
    tokens = found[0][1].keys.shape[2]
    if tokens <= rule.budget:
        raise ValueError(f"budget={rule.budget} holds all {tokens} tokens of a prompt of {task}; lower it")
    return [window_scores(layer, rule.window, rule.kernel) for _, layer in found]


def relative_variances(source: Source, rule: ASL, scores: list[Tensor]) -> tuple[int, list[float]]:
    """L_min, and the relative variance of the layers from there on."""
    places = [ranks(one) for one in scores]
    model, _ = source.need_model()
    first, observed, _ = rule.rule(model.config.get_text_config(decoder=True))
    compared = [torch.stack(places[max(0, layer - observed + 1) : layer + 1]) for layer in range(first, len(scores))]
    found = [float(rank_variance(some, rule.budget - rule.window)) for some in compared]
    return first, [variance / found[0] for variance in found]
