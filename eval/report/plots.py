"""The figures of a report: accuracy by length, differences from dense, accuracy against the cache, needle heat maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from leank.eval.report import fidelity_plots
from leank.eval.report.needle import by_depth
from leank.eval.report.records import AgainstDense, Figures, Interval, RunSummary
from leank.eval.report.style import INK, MARKERS, PALETTE, SETTINGS, Style, legend, plain, sheet

CROWD = 8  # above so many methods a figure draws less of each
NAMED = 32  # above so many, the methods that others beat have no name beside their point


def axes_of(config: Mapping[str, object]) -> str:
    """Name the axes on which a method chooses, such as "channels + bits"; what `match` moved is no axis."""
    choices = (axis for axis, choice in config.items() if isinstance(choice, Mapping) and axis != "matched")
    return " + ".join(choices) or "dense"


def _styles(run: RunSummary) -> dict[str, Style]:
    """Return colour and marker of each method."""
    styles: dict[str, Style] = {}
    number = 0
    for method in run["methods"]:
        if method == run["dense"]:
            styles[method] = {"color": INK, "marker": "o"}
        else:
            marker = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]  # another one when the colours repeat
            styles[method] = {"color": PALETTE[number % len(PALETTE)], "marker": marker}
            number += 1
    return styles


def _errors(found: Sequence[tuple[float, Interval]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values, and the distances to both ends of their intervals."""
    middle = np.array([v for v, _ in found])
    ends = np.array([i for _, i in found]).T
    return middle, np.maximum(0, np.stack([middle - ends[0], ends[1] - middle]))


def _scores(cells: Iterable[Figures]) -> list[tuple[float, Interval]]:
    """Return the scores with their intervals."""
    return [(cell["score"], cell["interval"]) for cell in cells]


def _differences(found: Iterable[AgainstDense]) -> list[tuple[float, Interval]]:
    """Return the differences with their intervals."""
    return [(one["difference"], one["interval"]) for one in found]


def _reach(cells: Sequence[Figures]) -> tuple[float, float]:
    """Return the ends of a score axis: up to 100, and down to the lowest interval, at least 20 points."""
    return max(-3, min(min(cell["interval"][0] for cell in cells) - 3, 80)), 103


def by_length(run: RunSummary) -> Figure | None:
    """Draw scores over lengths, one line per method."""
    lengths = [n for n in run["lengths"] if n is not None]
    if len(lengths) < 2:
        return None
    figure = sheet(4.2)
    axes = plain(figure.add_subplot())
    crowded = len(run["methods"]) > CROWD
    for offset, (method, style) in enumerate(_styles(run).items()):
        cells = [c for c in run["by_length"] if c["method"] == method and c["length"] is not None]
        score, errors = _errors(_scores(cells))
        aside = 0 if crowded else 0.03 * (offset - len(run["methods"]) / 2)
        x = np.array([lengths.index(c["length"]) for c in cells if c["length"] is not None]) + aside
        axes.errorbar(x, score, None if crowded else errors, label=method, capsize=2, linewidth=1.4, markersize=5,
                      elinewidth=0.8, **style)  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 8 else 0)
    axes.set(xlabel="tokens of prompt and reply", ylabel="score", ylim=_reach(run["by_length"]))
    legend(figure)
    return figure


def _over_lengths(found: Sequence[AgainstDense]) -> tuple[np.float64, NDArray[np.float64]]:
    """Return the mean difference of a task over its lengths, and its distances to both ends of the interval."""
    middle, errors = _errors(_differences(found))
    # the lengths of a task are independent draws: errors of their mean add up in squares
    return middle.mean(), np.sqrt((errors**2).sum(1)) / len(found)


def differences(run: RunSummary) -> Figure | None:
    """Draw paired differences from dense, one row per task."""
    styles = {m: s for m, s in _styles(run).items() if m != run["dense"]}
    if len(run["tasks"]) == 1:
        return None  # the overall table says it
    crowded = len(styles) > CROWD
    figure = sheet(max(3.4, (0.1 + (0.05 if crowded else 0.08) * len(styles)) * len(run["tasks"]) + 1.5))
    axes = plain(figure.add_subplot())
    shown = 0
    for offset, (method, style) in enumerate(styles.items()):
        tasks: dict[str, list[AgainstDense]] = {}
        for cell in run["cells"]:
            if cell["method"] == method and "against_dense" in cell:
                tasks.setdefault(cell["task"], []).append(cell["against_dense"])
        if not tasks:
            continue
        shown += 1
        means = [_over_lengths(found) for found in tasks.values()]
        y = np.array([run["tasks"].index(task) for task in tasks]) + 0.7 * ((offset + 0.5) / len(styles) - 0.5)
        axes.errorbar([mean for mean, _ in means], y, xerr=np.stack([error for _, error in means], 1),
                      capsize=0 if crowded else 2, markersize=3 if crowded else 5, elinewidth=0.8, linestyle="",
                      label=method, **style)  # fmt: skip
    if not shown:
        return None
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(run["tasks"])), run["tasks"])
    axes.invert_yaxis()
    axes.set_xlabel("points from dense, paired by sample; mean over lengths")
    legend(figure)
    return figure


def against_bytes(run: RunSummary) -> Figure | None:
    """Draw scores over MiB of cache, one point per length."""
    several = len(run["lengths"]) > 1
    figure = sheet(4.2)
    axes = plain(figure.add_subplot())
    for method, style in _styles(run).items():
        cells = [c for c in run["by_length"] if c["method"] == method and c["cache_bytes"]]
        if not cells:
            continue
        score, errors = _errors(_scores(cells))
        x = [(c["cache_bytes"] or 0) / 2**20 for c in cells]
        axes.errorbar(x, score, errors, label=method, capsize=2, markersize=5, elinewidth=0.8, linewidth=0.6,
                      linestyle=":" if several else "", **style)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=(1, 1.5)))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("MiB of cache per sample, after the prompt" + ("; one point per length" if several else ""))
    axes.set(ylabel="score", ylim=_reach(run["by_length"]))
    legend(figure)
    return figure


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, score) points that no other beats by being cheaper and as good, or better and as cheap."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def _name(axes: Axes, places: list[tuple[float, float, str]]) -> None:
    """Write (x, y, text) beside its point, a line up or down where another text stands."""
    size = 7.5  # points; a letter is about 0.6 of it wide, a line 1.3 of it high
    width, height = (0.85 * 72 * inches for inches in axes.figure.get_size_inches())  # type: ignore[union-attr]
    across, up = (end - start for start, end in (axes.get_xlim(), axes.get_ylim()))
    marks = [(x / across * width, y / up * height) for x, y, _ in places]
    taken = [(x - 3, x + 3, y) for x, y in marks]
    reach = 4 * len(places) + 1  # lines up or down; every mark and every text takes less than two of them
    for x, y, text in sorted(places, key=lambda p: -p[1]):
        start, long = x / across * width + 6, 0.6 * size * len(text)
        steps = sorted(range(-reach, reach + 1), key=abs)
        lines = (y / up * height + 1.3 * size * step for step in steps)
        at = next(
            a for a in lines if all(abs(a - t) >= 1.29 * size or start > e or start + long < s for s, e, t in taken)
        )
        taken.append((start, start + long, at))
        offset = (6, at - y / up * height)
        line = {"arrowstyle": "-", "color": INK, "alpha": 0.3, "linewidth": 0.5} if abs(offset[1]) > size else None
        axes.annotate(text, (x, y), offset, textcoords="offset points", va="center", fontsize=size, arrowprops=line)


def by_axes(run: RunSummary) -> Figure | None:
    """Draw scores over the share of the dense cache that is held; the colour tells the axes that a method uses."""
    cells = [c for c in run["overall"] if "against_dense" in c or c["method"] == run["dense"]]
    if run["dense"] is None or len(cells) < 3:
        return None
    figure = sheet(max(4.2, 0.22 * min(len(cells), NAMED) + 1.5))
    axes = plain(figure.add_subplot())
    kinds = dict.fromkeys(axes_of(run["methods"][c["method"]]) for c in cells)
    places = []
    for kind, colour in zip(kinds, (INK, *PALETTE * len(kinds)), strict=False):
        mine = [c for c in cells if axes_of(run["methods"][c["method"]]) == kind]
        score, errors = _errors(_scores(mine))
        x = [100 * c["against_dense"]["bytes"] if "against_dense" in c else 100.0 for c in mine]
        axes.errorbar(x, score, errors, label=kind, color=colour, marker="o", markersize=5, linestyle="", capsize=2,
                      elinewidth=0.8)  # fmt: skip
        places += [(x, y, cell["method"]) for x, y, cell in zip(x, score, mine, strict=True)]
    best = front([p[:2] for p in places])
    axes.plot(*zip(*best, strict=True), color=INK, alpha=0.5, linewidth=0.8, linestyle="--")
    axes.set(xlabel="% of the dense cache's bytes, after the prompt", ylabel="score", ylim=_reach(cells))
    axes.set_xlim(0, 1.3 * max(x for x, *_ in places))
    _name(axes, [p for p in places if len(places) <= NAMED or p[:2] in best or p[2] == run["dense"]])
    legend(figure)
    return figure


FIGURES: dict[str, tuple[str, Callable[[RunSummary], Figure | None]]] = {
    "accuracy_by_length": ("Accuracy by length", by_length),
    "accuracy_by_axes": ("Accuracy against share of the dense cache; dashed: methods that no other beats", by_axes),
    "needle_by_depth": ("Needle in a haystack: score by length and depth", by_depth),
    "difference_from_dense": ("Difference from dense, by task", differences),
    "accuracy_against_bytes": ("Accuracy against bytes of cache", against_bytes),
    "kl_by_length": ("Distance from dense by length", lambda run: fidelity_plots.by_length(run, _styles(run))),
    "kl_against_bytes": (
        "Distance from dense against bytes of cache",
        lambda run: fidelity_plots.against_bytes(run, _styles(run)),
    ),
}


def draw(name: str, run: RunSummary) -> Figure | None:
    """Draw one of FIGURES for one run of a summary; return None where there is nothing to show."""
    with matplotlib.rc_context(SETTINGS):
        return FIGURES[name][1](run)
