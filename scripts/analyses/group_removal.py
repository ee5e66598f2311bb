"""Whether channels of a large norm are those whose removal hurts.

"LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", arXiv 2508.02215, section 2.3, figure 1 (right).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from leank.eval.report.style import INK, plain, sheet
from leank.typed import OneOf, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, only, row, values
from scripts.analyses.answers import known
from scripts.analyses.drawing import SEQUENTIAL
from scripts.analyses.source import Source
from scripts.analyses.staticity import norm_ratios


class Group(NamedTuple):
    """Neighbouring channels that are removed together; a layer or head of None is all of them."""

    layer: int | None
    head: int | None
    first: int


@dataclass(frozen=True)
class GroupRemoval(Analysis):
    """Remove groups of neighbouring K channels, one at a time, and set their norm against what that does.

    The norm of a group is the mean of its channels' norm ratios (appendix A; `staticity`). The impact is by how much
    the loss of the right answer grows, in nats per token, when the channels of all earlier keys are zero
    (`answers.known`). The share of answer tokens that the model gets wrong stands beside the loss.

    Deviation: the paper reports the drop of the task's score. It does not say whether a group is removed in all layers
    at once; `per` has the three ways.

    Settings
    task: str, default "niah_multikey_3": task of the samples.
    length: int, tokens, default 1024: of the samples.
    samples: int, default 2: how many.
    channels: int, default 4: channels of a group, a divisor of head_dim.
    per: "model", "layer" or "head", default "layer": where a group's channels are removed at a time.
    queries: int, default 32: last queries of a prompt, for the norms.
    batch: int, default 32: groups whose removal runs side by side.
    """

    task: str = "niah_multikey_3"
    length: Positive = 1024
    samples: Positive = 2
    channels: Positive = 4
    per: Annotated[str, OneOf("model", "layer", "head")] = "layer"
    queries: Positive = 32
    batch: Positive = 32

    def measure(self, source: Source) -> Rows:
        """Rows "norm", "loss" and "wrong" of every group, "wrong_full" of the full model, and "rank_correlation"."""
        backbone = source.backbone
        at: dict[str, Value] = {"task": self.task, "length": self.length}
        dim = backbone.shape.head_dim
        if dim % self.channels:
            raise ValueError(f"channels={self.channels} does not divide head_dim={dim}; use a divisor")
        groups = list(self._groups(*backbone.shape))
        keep = torch.ones(len(groups) + 1, *backbone.shape)  # the last mask is that of the full model
        for mask, group in zip(keep, groups, strict=False):
            mask[self._place(group)] = 0
        norm, loss, wrong = (torch.zeros(len(groups), dtype=torch.float64) for _ in range(3))
        before = 0.0
        for index in range(self.samples):
            seen = source.layers(self.task, self.length, index, self.queries)
            if len(seen) < len(keep[0]):
                raise ValueError("a layer of the model has a sliding window: it has no middle to remove channels from")
            ratios = torch.stack([norm_ratios(layer.queries, layer.keys) for _, layer in seen]).double().cpu()
            norm += torch.stack([ratios[self._place(group)].mean() for group in groups]) / self.samples
            sample = source.sample(self.task, self.length, index)
            found = known(source, sample, keep, sink=0, window=1, empty_heads="zero", batch=self.batch)
            loss += (found.loss[:-1] - found.loss[-1]) / self.samples
            wrong += found.wrong[:-1] / self.samples
            before += float(found.wrong[-1]) / self.samples
        return self._rows(groups, norm, loss, wrong, before, at)

    def _rows(
        self, groups: list[Group], norm: Tensor, loss: Tensor, wrong: Tensor, before: float, at: dict[str, Value]
    ) -> Rows:
        rows = [row("wrong_full", before, "share of answer tokens", **at)]
        measured = (("norm", norm, "norm ratio"), ("loss", loss, "nats per token"),
                    ("wrong", wrong, "share of answer tokens"))  # fmt: skip
        for group, *found in zip(groups, *(x.tolist() for _, x, _ in measured), strict=True):
            where: dict[str, Value] = {**at, "layer": group.layer, "head": group.head, "channel": group.first}
            rows += [row(name, value, unit, **where) for (name, _, unit), value in zip(measured, found, strict=True)]
        ranks = torch.stack([x.argsort().argsort().double() for x in (norm, loss)])
        return [*rows, row("rank_correlation", float(ranks.corrcoef()[0, 1]), "Spearman, norm and loss", **at)]

    def _groups(self, layers: int, heads: int, dim: int) -> Iterator[Group]:
        for layer in [None] if self.per == "model" else range(layers):
            for head in range(heads) if self.per == "head" else [None]:
                yield from (Group(layer, head, first) for first in range(0, dim, self.channels))

    def _place(self, group: Group) -> tuple[slice | int, ...]:
        everything = slice(None)
        layer, head = (everything if x is None else x for x in group[:2])
        return layer, head, slice(group.first, group.first + self.channels)

    def draw(self, rows: Rows) -> Figure:
        """Impact over norm, one point per group; the colour is the layer."""
        figure = sheet(3.6)
        axes = plain(figure.add_subplot())
        norm, loss = (only(rows, measure=name) for name in ("norm", "loss"))
        layers = [0 if one["layer"] is None else one["layer"] for one in norm]
        points = axes.scatter(
            values(norm), values(loss), c=layers, cmap=SEQUENTIAL, s=18, edgecolors=INK, linewidths=0.3
        )
        axes.axhline(0, color=INK, linewidth=0.8)
        found = only(rows, measure="rank_correlation")[0]["value"]
        axes.set(xlabel=f"mean norm ratio of a group of {self.channels} channels",
                 ylabel="loss when the group is removed,\nnats per answer token more",
                 title=f"rank correlation of norm and impact: {found:.2f}")  # fmt: skip
        axes.set_yscale("symlog", linthresh=1e-4)
        axes.yaxis.set_major_formatter("{x:g}")  # the scale's own writes 0 as raw mathematics
        axes.set_ylim(min(-1e-4, 3 * min(values(loss))), max(1e-3, 3 * max(values(loss))))
        if self.per != "model":
            figure.colorbar(points, ax=axes, label="layer")
        return figure
