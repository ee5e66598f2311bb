"""What the figures of "Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference" show, arXiv 2601.07667.

Tokens are ranked as ASL ranks them: by the attention of the last queries, pooled and summed over heads.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from annotated_types import MinLen
from torch import Tensor

from leank.eval.methods.common.slicing import window_scores
from leank.eval.methods.prefill.asl import ASL, rank_variance
from leank.eval.methods.prefill.asl import ranks as token_ranks
from leank.typed import Positive
from scripts.analyses.source import Given, Source
from scripts.analyses.table import Panel, Table, analysis

QUANTILES = (0.1, 0.5, 0.9)
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multikey_3", "vt")
Names = Annotated[Sequence[str], MinLen(1)]


@analysis(
    Panel("attention", "bin", "share of attention", "layer", each="task"),
    Panel("rank", "layer", "rank of the preferred tokens", by=("task", "quantile")),
    Panel("top_share", "layer", "attention on the first tokens", by=("task",), limits=(0, 1.03)),
)
def ranks(
    source: Given,
    tasks: Names = ("niah_multikey_3", "niah_single_2"),
    length: Positive = 2048,
    top: Positive = 128,
    bins: Positive = 64,
    window: Positive = 32,
    kernel: Positive = 7,
) -> pd.DataFrame:
    """Section 3, figures 3 and 4: where the last queries look, and how the last layer's tokens rank below it.

    Rows of every task and layer: "attention" by bin, the share of the attention before the window; "top_share", the
    share of the layer's own first `top` tokens; "rank" by quantile, where the last layer's first `top` tokens rank, as
    a share of all.

    bins: equal parts of the prompt.
    window, kernel: last queries, and neighbours over which scores are pooled, tokens, as in ASL.
    """
    table = Table()
    for task in tasks:
        scores = layer_scores(source, ASL(top + window, 0.5, window, kernel), task, length, 0)
        tokens = len(scores[0])
        preferred = scores[-1].topk(top).indices
        place = torch.arange(tokens, device=scores[0].device) * bins // tokens
        for layer, score in enumerate(scores):
            at: dict[str, Any] = {"layer": layer, "task": task, "length": length}
            share = score.double() / score.double().sum()
            binned = torch.zeros(bins, dtype=torch.double, device=share.device).index_add(0, place, share)
            table.add("attention", "share", binned.cpu(), {"bin": range(bins)}, **at)
            table.add("top_share", "share", float(share.topk(top).values.sum()), **at)
            rank = (token_ranks(score)[preferred].double() / tokens).quantile(share.new_tensor(QUANTILES))
            table.add("rank", "share of tokens", rank.cpu(), {"quantile": QUANTILES}, **at)
    return table.frame


@analysis(Panel("relative_variance", "layer", "relative variance of ranks", by=("task",), each="setting"))
def relative_variance(
    source: Given,
    tasks: Names = TASKS,
    length: Positive = 2048,
    samples: Positive = 2,
    budget: Positive = 512,
    window: Positive = 32,
    kernel: Positive = 7,
    observed: Sequence[Positive] | None = None,
    firsts: Sequence[Positive] | None = None,
) -> pd.DataFrame:
    """Section 4.1, figure 6; appendix D.2, figure 8: how the ranks of tokens settle on their way up.

    Rows "relative_variance" by task, sample, L_obs, L_min and layer: the variance of the ranks over the last L_obs
    layers, the mean over tokens among the first k in any of them, as a multiple of that at layer L_min. A layer below
    the threshold tau would select.

    budget: k and the window, tokens; less than the shortest prompt has.
    observed: values of L_obs, each at least 2; None takes ASL's for the model.
    firsts: values of L_min; None takes a third of the layers.
    """
    table = Table()
    rules = [
        ASL(budget, 0.5, window, kernel, seen, first)
        for seen in observed or [lookback(source)] for first in firsts or [third(source)]
    ]  # fmt: skip
    for task in tasks:
        for sample in range(samples):
            scores = layer_scores(source, rules[0], task, length, sample)
            for rule in rules:
                first, found = relative_variances(source, rule, scores)
                table.add("relative_variance", "multiple of L_min's", found,
                          {"layer": range(first, first + len(found))}, task=task, length=length, sample=sample,
                          observed=rule.observed, first=first,
                          setting=f"L_obs = {rule.observed}, L_min = {first}")  # fmt: skip
    return table.frame


@analysis(Panel("whole_layers", "threshold", "layers that read all tokens", by=("task",)))
def selection_layers(
    source: Given,
    tasks: Names = TASKS,
    length: Positive = 1024,
    samples: Positive = 4,
    thresholds: Annotated[Sequence[float], MinLen(1)] = (0.3, 0.6, 0.9),
    budget: Positive = 256,
    window: Positive = 32,
    kernel: Positive = 7,
    observed: Positive | None = None,
    first: Positive | None = None,
) -> pd.DataFrame:
    """Appendix D.4, figures 9 and 10: the first layer whose relative variance falls below tau, by task.

    Rows by task, sample and threshold: "selection_layer", the layer, empty where none selects; "whole_layers", how many
    layers read all tokens, which are those up to the selection, or all of the model where none selects.

    thresholds: values of tau in (0, 1); the paper takes 0.3.
    observed, first: L_obs and L_min; None as in `relative_variance`.
    """
    lags = observed or lookback(source)
    found = relative_variance(
        source, tasks, length, samples, budget, window, kernel, [lags], None if first is None else [first]
    )
    table = Table()
    for (task, sample), values in found.groupby(["task", "sample"], sort=False):
        layers = int(values["layer"].max()) + 1
        for tau in thresholds:
            layer = values["layer"][values["value"] < tau].min()  # NaN where none is below
            at: dict[str, Any] = {
                "task": task, "length": length, "sample": sample, "threshold": tau, "observed": lags,
                "first": values["first"].iloc[0], "layers": layers,
            }  # fmt: skip
            table.add("selection_layer", "layer", layer, **at)
            table.add("whole_layers", "layers", layers if np.isnan(layer) else layer + 1, **at)
    return table.frame


def lookback(source: Source) -> int:
    """L_obs as ASL takes it for a model."""
    return ASL().rule(source.config).observed


def third(source: Source) -> int:
    """L_min as the paper has it: a third of the layers, also for models whose ASL starts later."""
    return max(1, source.config.num_hidden_layers // 3)


def layer_scores(source: Source, rule: ASL, task: str, length: int, sample: int) -> list[Tensor]:
    """The score of each token before the window, [T - window] per layer; ValueError if the budget holds all."""
    rule.check(source.config, source.need_model()[1])
    found = source.layers(task, length, sample, rule.window)
    tokens = found[0][1].keys.shape[2]
    if tokens <= rule.budget:
        raise ValueError(f"budget={rule.budget} holds all {tokens} tokens of a prompt of {task}; lower it")
    return [window_scores(layer, rule.window, rule.kernel) for _, layer in found]


def relative_variances(source: Source, rule: ASL, scores: list[Tensor]) -> tuple[int, list[float]]:
    """L_min, and the relative variance of the layers from there on."""
    places = [token_ranks(one) for one in scores]
    first, observed, _ = rule.rule(source.config)
    compared = [torch.stack(places[max(0, layer - observed + 1) : layer + 1]) for layer in range(first, len(scores))]
    found = [float(rank_variance(some, rule.budget - rule.window)) for some in compared]
    return first, [variance / found[0] for variance in found]
