"""How few singular values hold the energy of attention.

"ThinK: Thinner Key Cache by Query-Driven Pruning", arXiv 2407.21018, appendix A, figure 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Gt, Lt
from matplotlib.figure import Figure
from torch import Tensor

from leank.eval.inference.prefill import PromptLayer
from leank.eval.report.style import PALETTE, plain, sheet
from leank.kernels import SCORES_AT_ONCE
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, chosen_layers, distinct, only, row, values
from scripts.analyses.drawing import legend, lines, whole_layers
from scripts.analyses.source import Source

UNIFORM = "uniform causal attention"


@dataclass(frozen=True)
class SingularEnergy(Analysis):
    """Energy_i = sigma_i^2 / sum of sigma^2 of softmax(Q K^T / sqrt(D)), the mean over query heads.

    Attention that gives every visible token the same weight is the control: a causal mask alone has much of its energy
    in few values.

    Deviation: the paper takes all T queries. Here they are the last `queries`; their T weights are made in blocks of
    keys, and their squared singular values are the eigenvalues of A A^T, [queries, queries].

    Settings
    task: str, default "niah_single_2": task of the sample, whose haystack is natural text.
    length: int, tokens, default 1024: of the sample.
    queries: int, default 256: last queries; no more than the prompt has.
    ranks: int, default 64: singular values that are rows, from the largest.
    layers: list of int or None, default None: whose values are rows; None takes the first, the middle and the last.
    energy: float in (0, 1), default 0.9: the row "rank" is how many values hold so much.
    """

    task: str = "niah_single_2"
    length: Positive = 1024
    queries: Positive = 256
    ranks: Positive = 64
    layers: Sequence[Count] | None = None
    energy: Annotated[float, Gt(0), Lt(1)] = 0.9

    def measure(self, source: Source) -> Rows:
        """Rows "energy" and "cumulative" by number of the chosen layers and the control, and "rank" of all layers."""
        shown, rows = chosen_layers(self.layers, source.config.num_hidden_layers), []
        found = source.layers(self.task, self.length, 0, self.queries)
        each = {str(layer): (layer, attention_energies(one)) for layer, one in found}
        keys = found[0][1].keys.shape[2]
        seen = torch.ones(1, self.queries, keys, dtype=torch.float64).tril(keys - self.queries)
        control = seen / seen.sum(-1, keepdim=True)
        each[UNIFORM] = (-1, _energies(control @ control.mT))
        for name, (layer, energies) in each.items():
            at: dict[str, Value] = {"task": self.task, "length": self.length, "of": name,
                                    "layer": None if name == UNIFORM else layer}  # fmt: skip
            total = energies.cumsum(-1)
            count = (total < self.energy).sum(-1) + 1
            rows.append(row("rank", float(count.double().mean()), "singular values", **at))
            if layer in shown or name == UNIFORM:
                rows += [
                    row(measure, x, "share of energy", number=number, **at)
                    for measure, some in (("energy", energies), ("cumulative", total))
                    for number, x in enumerate(some[:, : self.ranks].mean(0).tolist(), 1)
                ]
        return rows

    def draw(self, rows: Rows) -> Figure:
        """Energy and its sum by number (left, middle), and how many values hold most of it by layer (right)."""
        figure = sheet(3.2)
        *panels, last = figure.subplots(1, 3)
        for panel, measure in zip(panels, ("energy", "cumulative"), strict=True):
            mine = only(rows, measure=measure)
            names = {str(of): str(of) if of == UNIFORM else f"layer {of}" for of in distinct(mine, "of")}
            curves = {name: only(mine, of=of) for of, name in names.items()}
            shown = {name: (values(some, "number"), 100 * np.array(values(some))) for name, some in curves.items()}
            lines(panel, shown, markersize=2)
            panel.set(xlabel="singular value", xscale="log")
        panels[0].set(yscale="log", ylabel="energy, %")
        panels[1].set_ylabel("cumulative energy, %")
        counts = [one for one in only(rows, measure="rank") if one["layer"] is not None]
        plain(last).bar(values(counts, "layer"), values(counts), color=PALETTE[0])
        control = only(rows, measure="rank", of=UNIFORM)
        last.axhline(values(control)[0], color="grey", linestyle="--", linewidth=1)
        last.set(ylabel=f"values with {100 * self.energy:g}% of energy\n(dashed: uniform)", yscale="log")
        whole_layers(last)
        legend(figure, panels[0])
        return figure


def attention_energies(layer: PromptLayer) -> Tensor:
    """Energy_i of one prompt's layer, descending, float64 [Hq, queries]."""
    assert layer.queries is not None
    q, k = layer.queries[0].double(), layer.keys[0].double()
    (heads, count, dim), length = q.shape, k.shape[1]
    scale = dim**-0.5 if layer.scaling is None else layer.scaling
    grouped = q.unflatten(0, (len(k), -1))  # [H, G, n, D]
    place = torch.arange(length, device=k.device)
    last = place[-count:, None]
    block = max(1, SCORES_AT_ONCE["cuda" if k.is_cuda else "cpu"] // (heads * count))

    def logits(start: int) -> Tensor:
        """Causal logits of a block of keys, [Hq, n, block]."""
        some = layer.softmax.cap(grouped @ k[:, None, start : start + block].mT * scale).flatten(0, 1)
        return some.masked_fill(place[start : start + block] > last, -torch.inf)

    sinks = layer.softmax.sink_logits  # beside the keys, where a model has them
    total = torch.full((heads, count), -torch.inf, dtype=torch.float64, device=k.device)
    if sinks is not None:
        total = total.logaddexp(sinks.to(total)[:, None])
    for start in range(0, length, block):
        total = torch.logaddexp(total, logits(start).logsumexp(-1))
    gram = total.new_zeros(heads, count, count)
    for start in range(0, length, block):
        weights = (logits(start) - total[..., None]).exp()
        gram += weights @ weights.mT
    return _energies(gram).cpu()


def _energies(gram: Tensor) -> Tensor:
    """Shares of the eigenvalues of A A^T [heads, n, n], descending."""
    found = torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)
    return found / found.sum(-1, keepdim=True)
