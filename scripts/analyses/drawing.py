"""What the figures of the analyses share: heat maps, lines per name, and a legend that hides no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from leank.eval.report.style import MARKERS, PALETTE, plain

SEQUENTIAL, DIVERGING = "cividis", "PuOr"  # colour-blind readers can read both
MOST_NUMBERS = 64


def heat_map(
    axes: Axes,
    found: ArrayLike,
    x: Sequence[object],
    y: Sequence[object],
    limits: tuple[float, float] | None = None,
    cmap: str = SEQUENTIAL,
    numbers: str | None = None,
    most: int = 12,
) -> AxesImage:
    """Draw a matrix [len(y), len(x)]; NaN stays empty.

    x, y: names of columns and of rows; where there are more than `most`, some are written.
    limits: values of the first and the last colour; None takes the least and the largest.
    numbers: format of the numbers written into the cells, such as "{:.2f}"; None writes none, and neither are they
      written into more than 64 cells.
    most: names written along an axis.
    """
    matrix = np.ma.masked_invalid(np.asarray(found, dtype=float))
    low, high = limits or (float(matrix.min()), float(matrix.max()))
    image = axes.imshow(matrix, aspect="auto", cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
    for axis, names in ((axes.xaxis, x), (axes.yaxis, y)):
        every = -(-len(names) // most)
        axis.set_ticks(range(0, len(names), every), [str(name) for name in names[::every]])
    if numbers is not None and matrix.size <= MOST_NUMBERS:
        for (i, j), value in np.ndenumerate(matrix):
            if not np.ma.is_masked(matrix[i, j]):
                dark = (value - low) / max(high - low, 1e-12) < 0.6
                axes.text(j, i, numbers.format(value), ha="center", va="center", color="white" if dark else "black")
    return image


def lines(axes: Axes, found: Mapping[str, tuple[ArrayLike, ArrayLike]], **style: Any) -> None:
    """Draw one line per name: name -> (x, y). Names keep colour and marker by their order; NaN leaves a gap."""
    plain(axes)
    for number, (name, (x, y)) in enumerate(found.items()):
        marker = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
        axes.plot(x, y, **{"color": PALETTE[number % len(PALETTE)], "marker": marker, "markersize": 4,
                           "linewidth": 1.4, "label": name, **style})  # fmt: skip


def legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    """The legend of some axes above the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def whole_layers(axes: Axes) -> None:
    """Write layers as whole numbers on the x axis."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
