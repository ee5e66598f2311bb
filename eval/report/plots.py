"""The figures of a report: accuracy by length, differences from dense, accuracy against bytes. PNG, and SVG that takes
the colours of the page it stands in."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# readable on white and on near-black, and told apart by most colour-blind readers; dense is the text's own colour
PALETTE = ("#0083c9", "#e8710a", "#1a9e77", "#c2549f", "#a97c10", "#6b6fd6", "#d13b3b", "#5f8f2f")
MARKERS = "osD^vPX*"
INK = "#010203"  # stands for the text's colour; the SVG has it replaced


def _styles(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    styles, number = {}, 0
    for method in run["methods"]:
        if method == run["dense"]:
            styles[method] = {"color": INK, "marker": "o"}
        else:
            styles[method] = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[1 + number % 7]}
            number += 1
    return styles


def _errors(cells: list[dict[str, Any]], value: Callable[[dict[str, Any]], tuple[float, tuple[float, float]]]) -> Any:
    """(values, distances to both ends of their intervals)."""
    found = [value(cell) for cell in cells]
    middle = np.array([v for v, _ in found])
    ends = np.array([i for _, i in found]).T
    return middle, np.maximum(0, np.stack([middle - ends[0], ends[1] - middle]))


def _score(cell: dict[str, Any]) -> tuple[float, tuple[float, float]]:
    return cell["score"], cell["interval"]


def _difference(cell: dict[str, Any]) -> tuple[float, tuple[float, float]]:
    return cell["against_dense"]["difference"], cell["against_dense"]["interval"]


def _reach(run: dict[str, Any]) -> tuple[float, float]:
    """Ends of a score axis: up to 100, and down to the lowest interval, 20 points at least."""
    lowest = min(cell["interval"][0] for cell in run["by_length"])
    return max(-3, min(lowest - 3, 80)), 103


def _by_length(axes: Axes, run: dict[str, Any]) -> bool:
    lengths = [n for n in run["lengths"] if n is not None]
    if len(lengths) < 2:
        return False
    for offset, (method, style) in enumerate(_styles(run).items()):
        cells = [c for c in run["by_length"] if c["method"] == method and c["length"] is not None]
        score, errors = _errors(cells, _score)
        x = np.array([lengths.index(c["length"]) for c in cells]) + 0.03 * (offset - len(run["methods"]) / 2)
        axes.errorbar(x, score, errors, label=method, capsize=2, linewidth=1.4, markersize=5, elinewidth=0.8, **style)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_xlabel("tokens of prompt and reply")
    axes.set_ylabel("score")
    axes.set_ylim(*_reach(run))
    return True


def _differences(axes: Axes, run: dict[str, Any]) -> bool:
    styles = {m: s for m, s in _styles(run).items() if m != run["dense"]}
    shown = 0
    for offset, (method, style) in enumerate(styles.items()):
        tasks: dict[str, list[dict[str, Any]]] = {}
        for cell in run["cells"]:
            if cell["method"] == method and "against_dense" in cell:
                tasks.setdefault(cell["task"], []).append(cell)
        if not tasks:
            continue
        shown += 1
        for task, cells in tasks.items():
            middle, errors = _errors(cells, _difference)
            # the lengths of a task are independent draws: errors of their mean add up in squares
            mean, error = middle.mean(), np.sqrt((errors**2).sum(1)) / len(cells)
            y = run["tasks"].index(task) + 0.7 * ((offset + 0.5) / len(styles) - 0.5)
            label = method if task == next(iter(tasks)) else None
            axes.errorbar(mean, y, xerr=error[:, None], capsize=2, markersize=5, elinewidth=0.8, linestyle="",
                          label=label, **style)  # fmt: skip
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(run["tasks"])), run["tasks"])
    axes.invert_yaxis()
    axes.set_xlabel("points from dense, paired by sample; mean over lengths")
    return shown > 0


def _against_bytes(axes: Axes, run: dict[str, Any]) -> bool:
    several = len(run["lengths"]) > 1
    for method, style in _styles(run).items():
        cells = [c for c in run["by_length"] if c["method"] == method and c["cache_bytes"]]
        if not cells:
            continue
        score, errors = _errors(cells, _score)
        x = [c["cache_bytes"] / 2**20 for c in cells]
        axes.errorbar(x, score, errors, label=method, capsize=2, markersize=5, elinewidth=0.8, linewidth=0.6,
                      linestyle=":" if several else "", **style)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=(1, 1.5)))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("MiB of cache a sample, after the prompt" + ("; a point a length" if several else ""))
    axes.set_ylabel("score")
    axes.set_ylim(*_reach(run))
    return True


FIGURES: dict[str, tuple[str, Callable[[Axes, dict[str, Any]], bool]]] = {
    "accuracy_by_length": ("Accuracy by length", _by_length),
    "difference_from_dense": ("Difference from dense, by task", _differences),
    "accuracy_against_bytes": ("Accuracy against bytes of cache", _against_bytes),
}


def draw(name: str, run: dict[str, Any]) -> Figure | None:
    """One of FIGURES for one run of a summary; None where there is nothing to show."""
    settings: Any = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
                "ytick.color": INK, "font.size": 9, "font.family": "sans-serif"}  # fmt: skip
    with matplotlib.rc_context(settings):
        tall = 0.34 * len(run["tasks"]) + 1.2 if name == "difference_from_dense" else 0
        figure = Figure(figsize=(7.2, max(3.4, tall)), layout="constrained")
        axes = figure.add_subplot()
        if not FIGURES[name][1](axes, run):
            return None
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5, color=INK)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=4, frameon=False)
        return figure


def png(figure: Figure) -> bytes:
    """The figure on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, salt: str) -> str:
    """The figure for a page: transparent, texts and axes in the page's text colour. salt: unique in the page."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', text)
    text = re.sub(r"(url\(|xlink:href=\")#", rf"\1#{salt}-", text)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1).replace("<svg ", '<svg role="img" ', 1)
