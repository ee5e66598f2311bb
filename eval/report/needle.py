"""The heat map of a needle in a haystack."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from leank.eval.report.records import RunSummary
from leank.eval.report.style import sheet


def by_depth(run: RunSummary) -> Figure | None:
    """Draw the mean score by length and depth of the needle, one map per method."""
    maps = run["by_depth"]
    if not maps:
        return None
    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    figure = sheet(0.6 + 2.3 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel, found in zip(panels.flat, maps, strict=False):
        scores = np.ma.masked_invalid(np.array(found["scores"], dtype=float))
        image = panel.pcolormesh(scores, vmin=0, vmax=100, cmap="viridis", linewidth=0)
        panel.set_title(found["method"] if len(run["tasks"]) == 1 else f"{found['method']}, {found['task']}")
        for axis, values in ((panel.xaxis, found["lengths"]), (panel.yaxis, found["depths"])):
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
