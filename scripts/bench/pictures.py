"""The README's picture of recall, drawn from the tables of docs/results.

    python -m scripts.bench.pictures recall docs/results/reference{,_mixed}/recall.csv docs/pictures/recall.svg

It draws tables of `scripts.bench.quality ratios`; of several, each has a panel with the name of its folder. The file is
a transparent SVG, to be read on white and on black.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.eval.report.style import INK, SETTINGS, plain, sheet
from leank.files import write_text

# Okabe and Ito's six that do not fade on white, then three more; an SVG in an <img> cannot take the colour of its page
COLOURS = {
    "LeanK": "#0072B2", "lowest frequencies": "#E69F00", "ThinK": "#009E73", "static norm": "#CC79A7",
    "random": "#D55E00", "paper's objective": "#56B4E9", "L2, steered": "#B3651A", "IAP": "#8A7FD1",
    "DuoAttention": "#A08C00",
}  # fmt: skip
OTHERS = ("#5E8C31", "#C2497B")  # of labels without a colour of their own
TEXT = "#7b8088"  # contrast 4 to 1 on white, 4.8 to 1 on #0d1117
LOOK = SETTINGS | {"font.size": 11, "axes.titlesize": 11, "svg.fonttype": "none", "svg.hashsalt": "leank"}


Records = Sequence[Mapping[str, str]]


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart as little as needed, so that neighbours differ by at least `gap`; their order stays."""
    order = np.argsort(values, kind="stable")
    moved = np.asarray(values, dtype=float)[order]
    for _ in range(1000):
        short = gap - np.diff(moved)
        if (short <= 1e-6).all():
            break
        push = np.maximum(short, 0) / 2
        moved[:-1] -= push
        moved[1:] += push
    out = np.empty_like(moved)
    out[order] = moved
    return out.tolist()


def draw_recall(axes: Axes, table: Records) -> None:
    """Recall against pruning ratio: a line with its band per label, the label at its end, dense as a dashed line."""
    plain(axes)
    lines: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in table:
        recall, low, high = (float(row[key]) for key in ("recall", "low", "high"))
        if row["ratio"]:
            lines[row["label"]].append((float(row["ratio"]), recall, low, high))
        else:
            axes.axhline(recall, color=INK, linewidth=1, linestyle="--")
            axes.annotate(f"dense {recall:.1f}%", (0, recall), (4, 4), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="bottom")  # fmt: skip
    spare = iter(OTHERS * len(lines))
    ends = spread([sorted(points)[-1][1] for points in lines.values()], 7.5)
    for (label, points), height in zip(lines.items(), ends, strict=True):
        ratio, recall, low, high = np.array(sorted(points)).T
        colour = COLOURS.get(label) or next(spare)
        axes.fill_between(ratio, low, high, color=colour, alpha=0.25, linewidth=0)
        wide = 2.6 if label == "LeanK" else 1.6
        axes.plot(ratio, recall, color=colour, linewidth=wide, marker="o", markersize=2 * wide, zorder=1 + wide)
        axes.annotate(f"{label} {recall[-1]:.1f}%", (1.02, height), xycoords=("axes fraction", "data"), color=colour,
                      va="center", annotation_clip=False, weight="bold" if label == "LeanK" else "normal")  # fmt: skip
    axes.set(xlabel="K channels pruned, %", ylabel="recall, %", ylim=(0, 108), yticks=range(0, 101, 20))
    ratios = sorted({point[0] for points in lines.values() for point in points})
    crowded = 0.05 * (ratios[-1] - ratios[0])
    axes.set_xticks([r for r, after in zip(ratios, [*ratios[1:], np.inf], strict=True) if after - r > crowded])


def to_svg(figure: Figure) -> str:
    """The figure as a file of its own: transparent, with text as text, in a tone between black and white."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue().replace(INK, TEXT)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["recall"])
    parser.add_argument("source", type=Path, nargs="+", help="tables as CSV")
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    with matplotlib.rc_context(LOOK):
        figure = sheet(3.6 * len(args.source), 7.2)
        for axes, file in zip(figure.subplots(len(args.source), squeeze=False)[:, 0], args.source, strict=True):
            with file.open(newline="") as table:
                draw_recall(axes, list(csv.DictReader(table)))
            if len(args.source) > 1:
                axes.set_title(f"model={file.parent.name}", loc="left")
        write_text(args.out, to_svg(figure))


if __name__ == "__main__":
    main()
