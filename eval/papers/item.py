"""What an item of a paper is: a figure or table, how it is made here, and what decides on the paper's claim."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Measurement = dict[str, str | float | int | None]  # a row of an analysis
Measure = Literal["score", "bytes", "first_token", "per_token"]


class Need(NamedTuple):
    """A model or a file that a step cannot do without, and that may not be there.

    what: its name, as in "needs the model reference_mixed".
    path: where it lies in the package leank_train.
    """

    what: str
    path: str


@dataclass(frozen=True)
class EvalRun:
    """A run of python -m eval.

    overrides: what stands on its command line, such as "+experiment=papers/here".
    quick: what `--quick` adds to it.
    need: what must be there before it can run.
    """

    overrides: tuple[str, ...]
    quick: tuple[str, ...] = ()
    need: Need | None = None

    @property
    def command(self) -> str:
        """The command line that makes the same rows without this package."""
        return "python -m eval " + " ".join(f"'{one}'" if set(one) & set(" {}$*?") else one for one in self.overrides)


@dataclass(frozen=True)
class Analysed:
    """A run of an analysis.

    name: of scripts.analyses.
    settings: those that differ from the analysis' defaults.
    quick: those that `--quick` sets besides.
    overrides: of python -m eval, for the model and the mask.
    model: whether it runs a model; some read a mask alone.
    need: what must be there before it can run.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    model: bool = True
    need: Need | None = None

    def arguments(self, quick: bool = False) -> tuple[str, ...]:
        """Return the arguments of python -m scripts.analyses after its folder."""
        settings = {**self.settings, **(self.quick if quick else {})}
        listed = {name: list(value) if isinstance(value, range | tuple) else value for name, value in settings.items()}
        own = tuple(f"{name}={json.dumps(value)}" for name, value in listed.items())
        return own + self.overrides + (() if self.model else ("model=null",))


@dataclass(frozen=True)
class Command:
    """Another command of this repository, which this one does not run: training, or a benchmark on a GPU.

    line: what is typed.
    needs: what must be there, such as "a GPU"; empty if a CPU will do.
    """

    line: str
    needs: str = ""


Step = EvalRun | Analysed | Command


@dataclass(frozen=True)
class Contrast:
    """A claim that compares two methods on the same samples.

    first, second: labels of methods.
    measure: "score" compares points, first minus second; the others compare the ratio first / second of cache bytes or
        of seconds.
    bound: what the claim says of it. A difference of scores is above the bound, a ratio is below it.
    equal: whether the claim is that scores are equal: that their difference lies between `bound`, which is negative,
        and -`bound`.
    """

    first: str
    second: str
    measure: Measure = "score"
    bound: float = 0.0
    equal: bool = False


@dataclass(frozen=True)
class Expect:
    """A claim about the rows of an analysis: the mean of some values, or the difference of two such means.

    says: what is averaged, in words.
    of: whether a row counts.
    minus: whether a row counts among those whose mean is subtracted; None subtracts nothing.
    by: fields that pair a row of `of` with one of `minus`, such as the layer; empty: the two means are independent.
    over: fields whose values make a unit of the interval, such as the sample; rows of a unit count as their mean.
        Empty: every row is a unit.
    units: what a unit is, in words; fewer than ten decide nothing.
    counted: whether the rows are all that there is, such as the heads of a published mask: a count, without interval.
    bound: what the mean, or the difference, lies above.
    above: whether it lies above the bound; else below.
    chosen: whether the bound is none of the paper's, which gives no number, but chosen here.
    """

    says: str
    of: Callable[[Measurement], bool]
    minus: Callable[[Measurement], bool] | None = None
    by: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    units: str = "samples"
    counted: bool = False
    bound: float = 0.0
    above: bool = True
    chosen: bool = False


@dataclass(frozen=True)
class Item:
    """A numbered figure or table of a paper.

    id: "leank:fig7" or "think:table2".
    shows: what it shows.
    claim: what the paper concludes from it; empty for a drawing or a list.
    here: how it is made on the shipped reference model; empty if it cannot be.
    real: how it is made with the paper's models, settings and data; empty if it cannot be.
    needs: the weights and data that `real` takes.
    tables: numbers of the paper's tables in eval/published that stand beside the rows made here.
    claims: the comparisons that decide on the claim.
    note: what differs from the paper, or why it is not made here.
    """

    id: str
    shows: str
    claim: str = ""
    here: tuple[Step, ...] = ()
    real: tuple[Step, ...] = ()
    needs: str = ""
    tables: tuple[str, ...] = ()
    claims: tuple[Contrast | Expect, ...] = ()
    note: str = ""

    @property
    def paper(self) -> str:
        """The paper's short name."""
        return self.id.partition(":")[0]

    @property
    def number(self) -> str:
        """Its name in the paper, such as "figure 7"."""
        place = self.id.partition(":")[2]
        return f"figure {place[3:]}" if place.startswith("fig") else f"table {place.removeprefix('table')}"
