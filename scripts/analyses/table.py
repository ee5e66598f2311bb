"""What every analysis returns, a table of one value a line; and the figure that is drawn from the table alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from pydantic import validate_call

from leank.eval.report.style import MARKERS, PALETTE, SETTINGS, plain, sheet
from leank.typed import STRICT

PLACE = ("layer", "head", "task", "length")  # columns of every table; empty is all of them
COLUMNS = 2  # panels side by side
NAMES = 12  # written along an axis of a heat map
M = TypeVar("M", bound=Callable[..., pd.DataFrame])


class Table:
    """The lines of an analysis while it measures; `frame` is what it returns."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(
        self, measure: str, unit: str, found: ArrayLike, axes: Mapping[str, Iterable[Any]] | None = None, **at: Any
    ) -> None:
        """Add an array of what was measured, [len of each axis]; NaN is undefined, such as a share of nothing.

        axes: the column of each dimension and its places; None for a single number; at: columns that all share.
        Raises ValueError for infinite values.
        """
        flat = np.asarray(found, dtype=float).ravel()
        if np.isinf(flat).any():
            raise ValueError(f"{measure} is infinite at {at}; the model's activations may have overflowed")
        axes = {name: list(places) for name, places in (axes or {}).items()}
        for value, places in zip(flat.tolist(), product(*axes.values()), strict=True):
            where = {**dict.fromkeys(PLACE), **at, **dict(zip(axes, places, strict=True))}
            self.lines.append({"measure": measure, "value": value, "unit": unit, **where})

    @property
    def frame(self) -> pd.DataFrame:
        """One value a line: measure, value, unit, layer, head, task, length, and columns of the analysis' own."""
        return pd.DataFrame(self.lines)


@dataclass(frozen=True)
class Panel:
    """One set of axes: a heat map where `y` is set, else a line for each value of `by`."""

    measure: str  # whose values are drawn, the mean over all columns that are not named here
    x: str  # x, y, by: columns
    label: str  # of the values
    y: str = ""
    by: Sequence[str] = ()
    each: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)  # column: value, of the lines that count
    limits: tuple[float, float] | None = None  # first and last colour, or the ends of the y axis
    log: bool = False  # whether the x axis of lines is logarithmic

    def tables(self, table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
        """The title and the lines of each of its sets of axes."""
        mine = table[table["measure"] == self.measure]
        for name, value in self.where.items():
            mine = mine[mine[name] == value]
        if not self.each:
            return [("", mine)]
        return [(f"{self.each} {_name(value)}", mine[mine[self.each] == value]) for value in mine[self.each].unique()]


class Analysis(NamedTuple):
    """measure: `(source, **settings) -> table`; panels: what its figure shows."""

    measure: Callable[..., pd.DataFrame]
    panels: tuple[Panel, ...]


ANALYSES: dict[str, Analysis] = {}


def analysis(*panels: Panel) -> Callable[[M], M]:
    """Register a function under its name, with its figure; its settings are checked against their annotations."""

    def register(measure: M) -> M:
        checked = validate_call(config=STRICT)(measure)
        ANALYSES[measure.__name__] = Analysis(checked, panels)
        return cast(M, checked)

    return register


def draw(table: pd.DataFrame, panels: Sequence[Panel]) -> Figure:
    """The figure of an analysis."""
    drawn = [(panel, title, some) for panel in panels for title, some in panel.tables(table) if len(some)]
    if not drawn:
        raise ValueError("there are no rows to draw; measure first")
    rows = -(-len(drawn) // COLUMNS)
    with matplotlib.rc_context(SETTINGS):
        figure = sheet(2.6 * rows)
        for axes, (panel, title, some) in zip(figure.subplots(rows, COLUMNS, squeeze=False).flat, drawn, strict=False):
            axes.set(title=title, xlabel=panel.x)
            (heat_map if panel.y else line_plot)(figure, axes, panel, some)
        for axes in figure.axes[len(drawn) : rows * COLUMNS]:
            axes.set_axis_off()
    return figure


def heat_map(figure: Figure, axes: Axes, panel: Panel, table: pd.DataFrame) -> None:
    """Means by x and y; what was not measured stays empty."""
    named = table.assign(**{name: table[name].astype(object).fillna("all") for name in (panel.x, panel.y)})
    means = named.pivot_table("value", panel.y, panel.x, sort=False)
    low, high = panel.limits or (means.min(axis=None), means.max(axis=None))
    image = axes.imshow(means, aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest")
    for axis, names in ((axes.xaxis, means.columns), (axes.yaxis, means.index)):
        every = -(-len(names) // NAMES)
        axis.set_ticks(range(0, len(names), every), [_name(name) for name in names[::every]])
    if isinstance(means.columns[0], str):
        axes.tick_params(axis="x", rotation=60)
    axes.set_ylabel(panel.y)
    figure.colorbar(image, ax=axes, label=panel.label)


def line_plot(figure: Figure, axes: Axes, panel: Panel, table: pd.DataFrame) -> None:
    """A line for each value of `by`: means by x."""
    groups = table.groupby(list(panel.by), sort=False, dropna=False) if panel.by else [((), table)]
    for number, (key, some) in enumerate(groups):
        means = some.groupby(panel.x)["value"].mean()
        axes.plot(means.index, means, color=PALETTE[number % len(PALETTE)], marker=MARKERS[number % len(MARKERS)],
                  markersize=3, linewidth=1.2, label=", ".join(map(_name, key)))  # fmt: skip
    plain(axes).set(ylabel=panel.label, ylim=panel.limits, xscale="log" if panel.log else "linear")
    if panel.by:
        axes.legend(fontsize=7)


def _name(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
