"""The picture of scripts.bench.quality.documents: recall and KL from dense against the number of training documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.eval.report.style import INK, PALETTE, plain, sheet

NAMES = {
    "kl": "KL", "l2": "L2", "one_document": "KL, one document a step", "usual_momentum": "KL, momentum 0.9",
    "stopping": "KL, early stopping",
}  # fmt: skip


def draw_documents(table: Sequence[Mapping[str, str]]) -> Figure:
    """A panel each for recall and, where the table has it, KL: a dot for each seed, a line through the means."""
    shown = ["recall", *(["kl"] if any(row["variant"] != "dense" and row.get("kl") for row in table) else [])]
    figure = sheet(3.2 * len(shown), 7.2)
    for axes, column in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        draw_column(axes, table, column)
    return figure


def draw_column(axes: Axes, table: Sequence[Mapping[str, str]], column: str) -> None:
    """One panel; recall has dense as a dashed line, KL a logarithmic axis."""
    plain(axes)
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        if row["variant"] != "dense" and row[column]:
            points[row["variant"]][int(row["documents"])].append(float(row[column]))
        elif column == "recall":
            axes.axhline(float(row[column]), color=INK, linewidth=1, linestyle="--", label="dense")
    for (variant, by_number), colour in zip(points.items(), PALETTE, strict=False):
        numbers = sorted(by_number)
        means = [float(np.mean(by_number[n])) for n in numbers]
        axes.plot(numbers, means, color=colour, linewidth=1.8, label=NAMES.get(variant, variant))
        dots = [(n, value) for n in numbers for value in by_number[n]]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, alpha=0.7)
    ticks = sorted({number for of in points.values() for number in of})
    axes.set(xscale="log", xlabel="training documents")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    if column == "recall":
        axes.set(ylabel="recall, %")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)  # above: dots fill the panel
    else:
        axes.set(ylabel="KL from dense, nats a token", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
