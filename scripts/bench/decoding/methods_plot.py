"""The pictures of scripts.bench.decoding.methods: time a token against bytes held, and first token against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from leank.data_gen.amount import amount
from leank.eval.report.style import INK, MARKERS, PALETTE, SETTINGS, plain, png, sheet
from leank.files import write_bytes

NEAR = 0.05  # of dense's first token: curves within it are not drawn

Rows = Sequence[Mapping[str, object]]


def draw(rows: Rows, out: Path) -> None:
    """Write OUT/bytes.png and OUT/first_token.png of the rows of OUT/methods.csv that have what they show."""
    with matplotlib.rc_context(SETTINGS):
        for name, figure in (("bytes", by_bytes(rows)), ("first_token", first_token(rows))):
            if figure is not None:
                write_bytes(out / f"{name}.png", png(figure))


def by_bytes(rows: Rows) -> Figure | None:
    """Milliseconds of a step in one row against the bytes held, a panel per length; None without such rows."""
    found = [row for row in rows if row.get("token_ms") and str(row["rows"]) == "1"]
    lengths = sorted({int(str(row["length"])) for row in found})
    if not found:
        return None
    figure = sheet(3.6 * len(lengths))
    for axes, length in zip(figure.subplots(len(lengths), squeeze=False)[:, 0], lengths, strict=True):
        for row in (row for row in found if int(str(row["length"])) == length):
            x, y, graph = float(str(row["gb"])), float(str(row["token_ms"])), row["loop"] == "graph"
            colour = INK if row["method"] == "dense" else PALETTE[0] if graph else PALETTE[1]
            axes.plot(x, y, "o" if graph else "x", color=colour, markersize=4)
            axes.annotate(str(row["method"]), (x, y), (3, 2), textcoords="offset points", fontsize=5, color=colour)
        axes.set(title=f"{length:,} tokens, one row (cross: no graph)", xlabel="GB held", ylabel="ms a token")
        axes.set(xscale="log", yscale="log")
        plain(axes)
    return figure


def first_token(rows: Rows) -> Figure | None:
    """First token as a share of dense's against the prompt's length; None without dense or a second length."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("ttft_s"):
            curves.setdefault(str(row["method"]), {})[int(str(row["length"]))] = float(str(row["ttft_s"]))
    dense = curves.pop("dense", {})
    if len(dense) < 2:
        return None
    figure = sheet(4.2)
    axes, alike = figure.subplots(), 0
    axes.axhline(1, color=INK, linewidth=1)
    styles = cycle((colour, marker) for marker in MARKERS for colour in PALETTE)
    for name, curve in curves.items():
        points = [(length, curve[length] / dense[length]) for length in sorted(curve.keys() & dense.keys())]
        if not points or abs(points[-1][1] - 1) <= NEAR:
            alike += 1
            continue
        colour, marker = next(styles)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=1, label=name)
    axes.set(xscale="log", xlabel="tokens of the prompt", ylabel="first token / dense's")
    axes.set_title(f"not drawn: {amount(alike, 'method')} within {NEAR:.0%} of dense at the longest prompt")
    if alike < len(curves):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    plain(axes)
    return figure
