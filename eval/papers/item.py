"""What an item of a paper is: a numbered figure or table, the command lines that make it, and checks of its claim.

Each paper has a YAML file beside this one: under `steps` the command lines that several items share, under `items`
every figure and table of the paper.
"""

import re
import shlex
from collections.abc import Iterable
from importlib.resources import files
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

PAPERS = ("leank", "think", "iap", "lethe", "asl")
REPLAY, ANALYSIS, OUT = "leank.eval", "scripts.analyses", "OUT"
# --quick: the two hardest tasks at 1K, and as few samples as a verdict takes
QUICK = (
    "benchmark.samples=5", "benchmark.lengths=[1024]", "batch_size=5",
    "benchmark.tasks=[niah_multikey_3,niah_multivalue]",
)  # fmt: skip
CONTRAST = re.compile(
    r"((?P<measure>bytes|first_token|per_token) of )?(?P<equal>\|)?(?P<first>\S+) [-/] (?P<second>[^\s|]+)\|? [<>] "
    r"(?P<bound>[-.\d]+)"
)


class Data(BaseModel):
    """Base of what a paper's file holds: nothing in it is unknown, and nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Step(Data):
    """A command line. `python -m leank.eval.papers` runs replays and analyses; others are shown, such as training."""

    run: str  # what follows `python -m`; OUT in it is a folder
    quick: str = ""  # what `--quick` adds to it
    needs: str = ""  # what another command needs, such as "a GPU"; empty if a CPU will do

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return shlex.split(self.run)

    @property
    def replays(self) -> bool:
        """Whether it is a run of python -m leank.eval."""
        return self.words[0] == REPLAY

    @property
    def runs(self) -> bool:
        """Whether `python -m leank.eval.papers` runs it itself; analyses are in a checkout alone."""
        return self.replays or (self.words[0] == ANALYSIS and find_spec("scripts") is not None)

    def line(self, quick: bool = False, overrides: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the words that are run; of overrides of leank.eval an analysis takes model and mask alone."""
        short = [*(QUICK if "+experiment=papers/here" in self.words else ()), *shlex.split(self.quick)]
        added = [one for one in overrides if self.replays or one.startswith(("model", "mask"))]
        return (*self.words, *(short if quick else ()), *added)


class Contrast(Data):
    """A check that compares two methods on the same samples, written in one of three forms.

    - leank - think_0.7 > -2: points of score
    - |leank - think_0.7| < 2: likewise, on either side
    - bytes of leank / dense < 0.5: or first_token, per_token (seconds)
    """

    first: str  # first, second: labels of methods
    second: str
    # what is compared: the difference of scores, or the ratio of cache bytes or of seconds
    measure: Literal["score", "bytes", "first_token", "per_token"] = "score"
    bound: float = 0.0  # a difference of scores lies above it, a ratio below it
    equal: bool = False  # whether the difference also lies below -`bound`, which is positive


class Expect(Data):
    """A check of the rows of an analysis: the mean of some values, or the difference of two such means."""

    mean: str  # what is averaged, in words
    of: str  # which rows count, as pandas.DataFrame.query has it
    minus: str | None = None  # rows whose mean is subtracted; None subtracts nothing
    # columns that pair a row of `of` with one of `minus`, such as the layer; empty: the two means are independent
    by: list[str] = []
    # columns whose values make a unit of the interval, such as the sample; rows of a unit count as their mean. Empty:
    # every row is a unit.
    over: list[str] = []
    units: str = "samples"  # what a unit is, in words; fewer than ten decide nothing
    # whether the rows are all that there is, such as the heads of a published mask: a count, without interval
    counted: bool = False
    # above, below: what the mean, or the difference, lies above or below; one of them is given
    above: float | None = None
    below: float | None = None
    chosen: bool = False  # whether the bound is none of the paper's, which gives no number, but chosen here


def _step(given: object) -> object:
    return {"run": given} if isinstance(given, str) else given


def _check(given: object) -> object:
    if not isinstance(given, str):
        return given
    found = CONTRAST.fullmatch(given)
    if found is None:
        raise ValueError(f"{given!r} is no check; write one as A - B > 0, |A - B| < 2 or bytes of A / B < 1")
    said: dict[str, Any] = {name: value for name, value in found.groupdict().items() if value}
    return {**said, "equal": True, "bound": -float(said["bound"])} if "equal" in said else said


class Item(Data):
    """A numbered figure or table of a paper."""

    id: str  # "leank:fig7" or "think:table2"
    shows: str  # what it shows
    claim: str = ""  # what the paper concludes from it; empty for a drawing or a list
    # how it is made on the shipped reference model; empty if it cannot be
    here: list[Annotated[Step, BeforeValidator(_step)]] = []
    # how it is made with the paper's models, settings and data; empty if it cannot be
    real: list[Annotated[Step, BeforeValidator(_step)]] = []
    needs: str = ""  # the weights and data that `real` takes
    tables: list[str] = []  # numbers of the paper's tables in eval/published that stand beside the rows made here
    checks: list[Annotated[Contrast | Expect, BeforeValidator(_check)]] = []  # the comparisons that decide on the claim
    note: str = ""  # what differs from the paper, or why it is not made here

    @property
    def paper(self) -> str:
        """The paper's short name."""
        return self.id.partition(":")[0]

    @property
    def number(self) -> str:
        """Its name in the paper, such as "figure 7"."""
        place = self.id.partition(":")[2]
        return f"figure {place[3:]}" if place.startswith("fig") else f"table {place.removeprefix('table')}"

    @property
    def runs(self) -> bool:
        """Whether `python -m leank.eval.papers` can make it here, or a part of it."""
        return any(step.runs for step in self.here)

    @property
    def status(self) -> str:
        """Whether it can be made here, in a few words."""
        needed = ", ".join(dict.fromkeys(step.needs for step in self.here if step.needs))
        if self.runs:
            return f"runs here, in part: needs {needed}" if needed else "runs here"
        if self.here or self.real:
            needed = needed if self.here else self.needs
            return f"needs {needed}" if needed else "runs here by another command"
        return "published figures only" if self.tables else "nothing to measure"


def _items() -> dict[str, Item]:
    found = {}
    for paper in PAPERS:
        text = files("leank.eval.papers").joinpath(f"{paper}.yaml").read_text(encoding="utf-8")
        for place, given in yaml.safe_load(text)["items"].items():
            found[f"{paper}:{place}"] = Item(id=f"{paper}:{place}", **given)
    return found


ITEMS = _items()


def find(name: str) -> Item:
    """Return the item called `name`, such as leank:fig7. Raises ValueError if there is none."""
    if name not in ITEMS:
        raise ValueError(f"{name} is no item; python -m leank.eval.papers --list shows all")
    return ITEMS[name]


def of_papers(names: Iterable[str]) -> list[Item]:
    """Return the items of some papers."""
    return [item for item in ITEMS.values() if item.paper in names]
