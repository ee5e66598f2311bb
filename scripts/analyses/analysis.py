"""What every analysis is: settings, rows that JSON can hold, and a figure drawn from rows alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import matplotlib
from matplotlib.figure import Figure

from leank.eval.report.style import SETTINGS
from leank.typed import Checked
from scripts.analyses.source import Source

Value = str | float | int | None
Measurement = dict[str, Value]  # a row
Rows = list[Measurement]
PLACE = ("layer", "head", "task", "length")


class Analysis(Checked, ABC):
    """The base of the analyses; fields are settings, and their defaults suit the reference model on a CPU."""

    @abstractmethod
    def measure(self, source: Source) -> Rows:
        """Rows as `row` makes them.

        Raises ValueError for a source that lacks what is read, or a setting that does not fit it.
        """

    @abstractmethod
    def draw(self, rows: Rows) -> Figure:
        """Draw the rows; `plot` calls it with the settings of all figures."""

    def plot(self, rows: Rows) -> Figure:
        """Draw the rows that `measure` returned, or that were read from a file. Raises ValueError for no rows."""
        if not rows:
            raise ValueError("there are no rows to draw; measure first")
        with matplotlib.rc_context(SETTINGS):
            return self.draw(rows)


def row(measure: str, value: float | None, unit: str, **at: Value) -> Measurement:
    """One row: what was measured, its value and unit, and where.

    value: None where it is undefined, such as a share of nothing.
    at: layer, head, task and length, which every row has (None is all of them), and more.

    Raises ValueError for a value that is not finite.
    """
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{measure} is {value} at {at}; the model's activations may have overflowed")
    return {"measure": measure, "value": value, "unit": unit, **dict.fromkeys(PLACE), **at}


def only(rows: Rows, **wanted: Value) -> Rows:
    """The rows whose columns have the `wanted` values."""
    return [one for one in rows if all(one.get(name) == value for name, value in wanted.items())]


def distinct(rows: Rows, name: str) -> list[Value]:
    """The values of a column in the order in which they first appear."""
    return list(dict.fromkeys(one.get(name) for one in rows))


def values(rows: Iterable[Measurement], name: str = "value") -> list[float]:
    """A column of numbers; NaN stands for None, so that figures leave a gap."""
    column = [one[name] for one in rows]
    return [math.nan if value is None else float(value) for value in column]


def chosen_layers(wanted: Sequence[int] | None, count: int) -> list[int]:
    """The layers to show: those `wanted`, or if it is None the first, the middle and the last.

    Raises ValueError for a layer that the model does not have.
    """
    layers = sorted({0, count // 2, count - 1}) if wanted is None else list(wanted)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ValueError(f"layers={list(wanted or ())}: the model has the layers 0 to {count - 1}, not {wrong[0]}")
    return layers
