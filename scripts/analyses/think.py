"""What the figures of "ThinK: Thinner Key Cache by Query-Driven Pruning" show, arXiv 2407.21018, appendix A."""

from collections.abc import Sequence
from typing import Annotated, Any

import pandas as pd
import torch
from annotated_types import Gt, Lt
from torch import Tensor

from leank.channel_scores import wide
from leank.eval.inference.prefill import PromptLayer
from leank.typed import Count, Positive
from scripts.analyses.source import Given, chosen_head, chosen_layers
from scripts.analyses.table import Panel, Table, analysis

UNIFORM = "uniform causal attention"


@analysis(
    Panel("mean", "channel", "mean size of K", by=("layer",), where={"part": "K"}),
    Panel("mean", "channel", "mean size of V", by=("layer",), where={"part": "V"}),
    Panel("spread", "layer", "deviation of channels / mean", by=("part",)),
)
def magnitudes(
    source: Given,
    task: str = "niah_single_2",
    length: Positive = 2048,
    layers: Sequence[Count] | None = None,
    head: Count = 0,
) -> pd.DataFrame:
    """Figure 4: whether a few channels of K (after RoPE), and of V, are larger than the others.

    Rows "mean", "low" and "high" by part (K or V) and channel of the chosen layers: the mean size over a prompt's
    tokens, and the first and the last decile, where the paper has every token. "spread" sums up each head: the
    standard deviation of its channels' mean sizes over their mean.

    layers: whose channels are rows; None takes the first, the middle and the last.
    head: KV head whose channels are rows.
    """
    shown, table = chosen_layers(layers, source.config.num_hidden_layers), Table()
    for layer, found in source.layers(task, length, 0, 0):
        for part, held in (("K", found.keys), ("V", found.values)):
            at: dict[str, Any] = {"layer": layer, "task": task, "length": length, "part": part}
            size = held[0].to(wide(held)).abs()  # [H, T, D]
            mean = size.mean(1)
            table.add("spread", "deviation over mean", (mean.std(-1) / mean.mean(-1)).cpu(),
                      {"head": range(len(mean))}, **at)  # fmt: skip
            if layer in shown:
                at["head"] = chosen_head(head, len(size))
                # one channel at a time: torch.quantile takes no more than 2^24 numbers
                deciles = size.new_tensor([0.1, 0.9])
                low, high = torch.stack([channel.quantile(deciles) for channel in size[head].T], 1)
                for name, each in (("mean", mean[head]), ("low", low), ("high", high)):
                    table.add(name, "activation", each.cpu(), {"channel": range(len(each))}, **at)
    return table.frame


@analysis(
    Panel("energy", "number", "energy", by=("of",), log=True),
    Panel("cumulative", "number", "cumulative energy", by=("of",), log=True),
    Panel("rank", "layer", "values with most of the energy"),
)
def singular_energy(
    source: Given,
    task: str = "niah_single_2",
    length: Positive = 1024,
    queries: Positive = 256,
    ranks: Positive = 64,
    layers: Sequence[Count] | None = None,
    energy: Annotated[float, Gt(0), Lt(1)] = 0.9,
) -> pd.DataFrame:
    """Figure 5: how few singular values hold the energy of attention.

      Energy_i = sigma_i^2 / sum of sigma^2 of softmax(Q K^T / sqrt(D)), the mean over query heads

    Rows "energy" and "cumulative" by number of the chosen layers, and "rank" of all layers: how many values hold the
    share `energy`. Attention that gives every visible token the same weight is the control, without a layer: a causal
    mask alone has much of its energy in few values.

    Deviation: the paper takes all T queries. Here they are the last `queries`; the squared singular values are the
    eigenvalues of A A^T, [queries, queries].

    ranks: singular values that are rows, from the largest.
    layers: whose values are rows; None takes the first, the middle and the last.
    """
    shown, table = chosen_layers(layers, source.config.num_hidden_layers), Table()
    found = source.layers(task, length, 0, queries)
    each: dict[int | None, Tensor] = {layer: attention_energies(one) for layer, one in found}
    keys = found[0][1].keys.shape[2]
    seen = torch.ones(1, queries, keys, dtype=torch.float64).tril(keys - queries)
    control = seen / seen.sum(-1, keepdim=True)
    each[None] = _energies(control @ control.mT)
    for layer, energies in each.items():
        of = UNIFORM if layer is None else str(layer)
        at: dict[str, Any] = {"task": task, "length": length, "of": of, "layer": layer}
        total = energies.cumsum(-1)
        table.add("rank", "singular values", float(((total < energy).sum(-1) + 1).double().mean()), **at)
        if layer is None or layer in shown:
            for measure, some in (("energy", energies), ("cumulative", total)):
                mean = some[:, :ranks].mean(0)
                table.add(measure, "share of energy", mean, {"number": range(1, 1 + len(mean))}, **at)
    return table.frame


def attention_energies(layer: PromptLayer) -> Tensor:
    """Energy_i of one prompt's layer, descending, float64 [Hq, queries]."""
    assert layer.queries is not None
    q, k = layer.queries[0].double(), layer.keys[0].double()
    scale = q.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    logits = layer.softmax.cap(q.unflatten(0, (len(k), -1)) @ k[:, None].mT * scale).flatten(0, 1)
    later = torch.ones(logits.shape[1:], dtype=torch.bool, device=k.device).triu(k.shape[1] - q.shape[1] + 1)
    weights = layer.softmax.weights(logits.masked_fill(later, -torch.inf)[None])[0]
    return _energies(weights @ weights.mT).cpu()


def _energies(gram: Tensor) -> Tensor:
    """Shares of the eigenvalues of A A^T [heads, n, n], descending."""
    found = torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)
    return found / found.sum(-1, keepdim=True)
