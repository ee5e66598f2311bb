"""The figures of distance from dense: KL by length, and KL against the bytes of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.eval.report.records import FidelityFigures, LengthFigures, RunSummary
from leank.eval.report.style import Style, legend, plain, sheet

LABEL = "KL from dense, nats a token"
Place = Callable[[LengthFigures], float]


def by_length(run: RunSummary, styles: Mapping[str, Style]) -> Figure | None:
    """Draw KL over lengths, one line per method. styles: colour and marker of each method."""
    lengths = [n for n in run["lengths"] if n is not None]
    if len(lengths) < 2:
        return None
    figure = _draw(run, styles, lambda cell: lengths.index(cell["length"] or 0))
    if figure is not None:
        axes = figure.axes[0]
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 8 else 0)
        axes.set_xlabel("tokens")
    return figure


def against_bytes(run: RunSummary, styles: Mapping[str, Style]) -> Figure | None:
    """Draw KL over MiB of cache, one point per length. styles: colour and marker of each method."""
    figure = _draw(run, styles, lambda cell: (cell["cache_bytes"] or np.nan) / 2**20)
    if figure is not None:
        more = "; one point per length" if len(run["lengths"]) > 1 else ""
        figure.axes[0].set_xlabel(f"MiB of cache per sample, after the prompt{more}")
    return figure


def _draw(run: RunSummary, styles: Mapping[str, Style], place: Place) -> Figure | None:
    """Draw KL on a logarithmic axis; None if no method but dense has any. A KL of zero has no place there."""
    figure = sheet(4.2)
    axes: Axes = plain(figure.add_subplot())
    shown = False
    for method, style in styles.items():
        cells = [c for c in run["by_length"] if c["method"] == method and _positive(c.get("fidelity"))]
        if not cells:
            continue
        found = np.array([_ends(c["fidelity"]) for c in cells])
        errors = np.stack([found[:, 0] - found[:, 1], found[:, 2] - found[:, 0]])
        axes.errorbar([place(c) for c in cells], found[:, 0], np.maximum(0, errors), label=method, capsize=2,
                      markersize=5, elinewidth=0.8, linewidth=1.2, **style)  # fmt: skip
        shown = True
    if not shown:
        return None
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylabel(LABEL)
    legend(figure)
    return figure


def _positive(found: FidelityFigures | None) -> bool:
    return found is not None and (found["kl"] or 0) > 0


def _ends(found: FidelityFigures) -> tuple[float, float, float]:
    """KL and its interval."""
    value = found["kl"] or 0.0
    return value, *found.get("kl_interval", (value, value))
