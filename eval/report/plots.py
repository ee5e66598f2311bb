"""The figures of a report: scores and distance from dense by length and against the cache, differences, needle maps."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.eval.report.style import INK, MARKERS, SETTINGS, Style, colours, legend, plain, sheet
from leank.eval.report.summary import Record, Run
from leank.eval.report.tables import distances_lead

CROWD = 8  # above so many methods a figure draws less of each
NAMED = 32  # above so many, the methods that others beat have no name beside their point
MIB = "MiB of cache per sample, after the prompt"


def axes_of(config: Mapping[str, object]) -> str:
    """Name the axes on which a method chooses, such as "channels + bits"; what `match` moved is no axis."""
    choices = (axis for axis, choice in config.items() if isinstance(choice, Mapping) and axis != "matched")
    return " + ".join(choices) or "dense"


def _styles(run: Run) -> dict[str, Style]:
    others = [method for method in run["methods"] if method != run["dense"]]
    styles: dict[str, Style] = {
        method: {"color": colour, "marker": MARKERS[number % len(MARKERS)]}
        for number, (method, colour) in enumerate(zip(others, colours(len(others)), strict=True))
    }
    return {method: styles.get(method, {"color": INK, "marker": "o"}) for method in run["methods"]}


def _errors(cells: pd.DataFrame, name: str) -> np.ndarray:
    """Return the distances of a figure to both ends of its interval, [2, cells]."""
    return np.maximum(0, np.stack([cells[name] - cells[f"{name}_low"], cells[f"{name}_high"] - cells[name]]))


def _reach(cells: Sequence[Record]) -> tuple[float, float]:
    """Return the ends of a score axis: up to 100, and down to the lowest interval, at least 20 points."""
    return max(-3, min(min(cell["score_low"] for cell in cells) - 3, 80)), 103


def _score_or_kl(run: Run, name: str, against: str) -> Figure | None:
    """Draw a figure of `by_length`, one line per method; None where there is nothing to show.

    name: "score", or "kl", which is logarithmic: a KL of zero has no place there.
    against: "length", or "bytes" with one point per length.
    """
    lengths = [n for n in run["lengths"] if n is not None]
    cells = pd.DataFrame(run["by_length"])
    cells = cells[cells[name].notna() & ((name == "score") | (cells[name] > 0))]
    cells = cells[cells["length"].notna() if against == "length" else cells["cache_bytes"] > 0]
    if cells.empty or (against == "length" and len(lengths) < 2):
        return None
    figure = sheet(4.2)
    axes = plain(figure.add_subplot())
    crowded = len(run["methods"]) > CROWD and name == "score" and against == "length"
    dotted = name == "score" and against == "bytes"
    for offset, (method, style) in enumerate(_styles(run).items()):
        mine = cells[cells["method"] == method]
        if mine.empty:
            continue
        if against == "length":
            aside = 0.03 * (offset - len(run["methods"]) / 2) if name == "score" and not crowded else 0
            x = np.array([lengths.index(n) for n in mine["length"]]) + aside
        else:
            x = mine["cache_bytes"].to_numpy() / 2**20
        axes.errorbar(x, mine[name], None if crowded else _errors(mine, name), label=method, capsize=2, markersize=5,
                      elinewidth=0.8, linewidth=0.6 if dotted else 1.4,
                      linestyle="-" if not dotted else ":" if len(run["lengths"]) > 1 else "", **style)  # fmt: skip
    if against == "length":
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 8 else 0)
        axes.set_xlabel("tokens of prompt and reply")
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=(1, 1.5)))
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axes.set_xlabel(f"{MIB}; one point per length" if len(run["lengths"]) > 1 else MIB)
        _share_axis(axes, run)
    if name == "score":
        axes.set(ylabel="score", ylim=_reach(run["by_length"]))
    else:
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylabel("KL from dense, nats a token")
    legend(figure)
    return figure


def _share_axis(axes: Axes, run: Run) -> None:
    """Name the bytes above the axes, too, as a share of dense's at the longest length; nothing without dense."""
    dense = [c for c in run["by_length"] if c["method"] == run["dense"] and c["cache_bytes"]]
    if not dense:
        return
    longest = max(dense, key=lambda cell: cell["length"] or 0)
    whole = longest["cache_bytes"] / 2**20
    above = axes.secondary_xaxis(
        "top", functions=(lambda x: np.asarray(x) * (100 / whole), lambda x: np.asarray(x) * (whole / 100))
    )
    above.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=(1, 1.5)))
    above.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}%"))
    above.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    above.set_xlabel("of dense's bytes" + (f" at {longest['length']:,} tokens" if len(run["lengths"]) > 1 else ""))


def differences(run: Run) -> Figure | None:
    """Draw paired differences from dense, one row per task; the mean over a task's lengths."""
    cells = pd.DataFrame(run["cells"])
    cells = cells[cells["difference"].notna()]
    if len(run["tasks"]) == 1 or cells.empty:
        return None  # of one task the overall table says it
    styles = {m: s for m, s in _styles(run).items() if m != run["dense"]}
    crowded = len(styles) > CROWD
    figure = sheet(max(3.4, (0.1 + (0.05 if crowded else 0.08) * len(styles)) * len(run["tasks"]) + 1.5))
    axes = plain(figure.add_subplot())
    for offset, (method, style) in enumerate(styles.items()):
        by_task = [(task, part) for task, part in cells[cells["method"] == method].groupby("task", sort=False)]
        if not by_task:
            continue
        # the lengths of a task are independent draws: errors of their mean add up in squares
        errors = [np.sqrt((_errors(part, "difference") ** 2).sum(1)) / len(part) for _, part in by_task]
        y = np.array([run["tasks"].index(task) for task, _ in by_task]) + 0.7 * ((offset + 0.5) / len(styles) - 0.5)
        axes.errorbar([part["difference"].mean() for _, part in by_task], y, xerr=np.stack(errors, 1),
                      capsize=0 if crowded else 2, markersize=3 if crowded else 5, elinewidth=0.8, linestyle="",
                      label=method, **style)  # fmt: skip
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(run["tasks"])), run["tasks"])
    axes.invert_yaxis()
    axes.set_xlabel("points from dense, paired by sample; mean over lengths")
    legend(figure)
    return figure


def needle(run: Run) -> Figure | None:
    """Draw the mean score by length and depth of the needle, one heat map per method and task."""
    if not run["by_depth"]:
        return None
    maps = list(pd.DataFrame(run["by_depth"]).groupby(["method", "task"], sort=False))
    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    figure = sheet(0.6 + 2.3 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel, ((method, task), found) in zip(panels.flat, maps, strict=False):
        scores = found.pivot(index="depth", columns="length", values="score")
        image = panel.pcolormesh(np.ma.masked_invalid(scores), vmin=0, vmax=100, cmap="viridis", linewidth=0)
        panel.set_title(method if len(run["tasks"]) == 1 else f"{method}, {task}")
        for axis, values in ((panel.xaxis, scores.columns), (panel.yaxis, scores.index)):
            every = -(-len(values) // 8)
            axis.set_ticks(np.arange(len(values))[::every] + 0.5, [f"{v:,g}" for v in values[::every]])
        panel.tick_params(axis="x", rotation=45)
    panels[0, 0].invert_yaxis()
    for panel in panels.flat[len(maps) :]:
        panel.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle, %", fontsize=9)
    figure.colorbar(image, ax=panels, label="score")  # of the last panel; all have the same scale
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


def by_axes(run: Run) -> Figure | None:
    """Draw scores over the share of the dense cache that is held; the colour tells the axes that a method uses."""
    cells = pd.DataFrame(run["overall"])
    cells = cells[cells["share_of_dense"].notna() | (cells["method"] == run["dense"])]
    if run["dense"] is None or len(cells) < 3:
        return None
    cells = cells.assign(
        share=cells["share_of_dense"].fillna(100.0),
        kind=[axes_of(run["methods"][method]) for method in cells["method"]],
    )
    figure = sheet(max(4.2, 0.22 * min(len(cells), NAMED) + 1.5))
    axes = plain(figure.add_subplot())
    kinds = list(cells.groupby("kind", sort=False))
    for (kind, mine), colour in zip(kinds, (INK, *colours(len(kinds))), strict=False):
        axes.errorbar(mine["share"], mine["score"], _errors(mine, "score"), label=kind, color=colour, marker="o",
                      markersize=5, linestyle="", capsize=2, elinewidth=0.8)  # fmt: skip
    places = list(cells[["share", "score", "method"]].itertuples(index=False, name=None))
    best = front([(share, score) for share, score, _ in places])
    axes.plot(*zip(*best, strict=True), color=INK, alpha=0.5, linewidth=0.8, linestyle="--")
    axes.set(xlabel="% of the dense cache's bytes, after the prompt", ylabel="score", ylim=_reach(run["overall"]))
    axes.set_xlim(0, 1.3 * cells["share"].max())
    _name(axes, [p for p in places if len(places) <= NAMED or p[:2] in best or p[2] == run["dense"]])
    legend(figure)
    return figure


def by_position(run: Run) -> Figure | None:
    """Draw KL, bytes and the reply's repetition by position; dotted where fewer replies are so long than at first."""
    cells = pd.DataFrame(run["by_position"])
    if cells.empty or cells["position"].nunique() < 2:
        return None
    figure, again = sheet(7.4), cells[["position", "repeated"]].dropna().drop_duplicates("position")
    panels = (
        figure.subplots(3, 1, sharex=True, height_ratios=(6, 4, 2))
        if len(again)
        else figure.subplots(2, 1, sharex=True)
    )
    above, below, *rest = map(plain, panels)
    for axes in rest:  # of the reply itself, which all methods read
        axes.plot(again["position"], again["repeated"], color=INK, linewidth=1.4)
        axes.set(ylabel="% repeated", ylim=(0, 100))
    for method, style in _styles(run).items():
        mine = cells[cells["method"] == method]
        whole = mine[mine["n"] == mine["n"].max()]
        for axes, name, unit in ((above, "kl", 1), (below, "bytes", 2**20)):
            label = method if axes is above else None
            axes.plot(whole["position"], whole[name] / unit, color=style["color"], linewidth=1.4, label=label)
            axes.plot(mine["position"], mine[name] / unit, color=style["color"], linewidth=1.4, linestyle=":")
    above.set_yscale("log", nonpositive="mask")
    above.set_ylabel("KL from dense, nats a token")
    below.set_ylabel("MiB of cache per sample")
    below.set_ylim(bottom=0)
    panels[-1].set_xlabel("tokens read as they are decoded; dotted: fewer replies are so long")
    panels[-1].xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    legend(figure)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Run], Figure | None]]] = {
    "accuracy_by_length": ("Accuracy by length", lambda run: _score_or_kl(run, "score", "length")),
    "accuracy_by_axes": ("Accuracy against share of the dense cache; dashed: methods that no other beats", by_axes),
    "needle_by_depth": ("Needle in a haystack: score by length and depth", needle),
    "difference_from_dense": ("Difference from dense, by task", differences),
    "accuracy_against_bytes": ("Accuracy against bytes of cache", lambda run: _score_or_kl(run, "score", "bytes")),
    "kl_by_position": ("Distance from dense, and bytes, by position in the reply", by_position),
    "kl_by_length": ("Distance from dense by length", lambda run: _score_or_kl(run, "kl", "length")),
    "kl_against_bytes": ("Distance from dense against bytes of cache", lambda run: _score_or_kl(run, "kl", "bytes")),
}


def order(run: Run) -> list[str]:
    """Return the names of FIGURES in the order of a report: of texts, distances from dense stand first."""
    return sorted(FIGURES, key=lambda name: not name.startswith("kl_")) if distances_lead(run) else list(FIGURES)


def draw(name: str, run: Run) -> Figure | None:
    """Draw one of FIGURES for one run of a summary; return None where there is nothing to show."""
    with matplotlib.rc_context(SETTINGS):
        return FIGURES[name][1](run)
