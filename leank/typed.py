"""Settings as frozen dataclasses, checked by pydantic in one way for training and for evaluation.

    @dataclass(frozen=True)
    class DataConfig(Checked):
        questions: Positive = 4
        lengths: Sequence[Positive] = (1024,)

An annotation says what a field accepts: its type, its bounds, its choices; a text in it is advice for the message.
`typed` builds such an object from a group of the configuration and names the dotted key of a setting that is unknown,
missing, or of the wrong type.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import core_schema

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
SHOWN = 200  # characters of a value in a message
LARGEST = 2**53  # beyond it a number of steps, tokens or samples is a slip
T = TypeVar("T")


class BadConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and what to do."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a field that takes one of these values, which unlike `Literal`'s may be computed."""

    choices: tuple[object, ...]

    def __init__(self, *choices: object) -> None:
        object.__setattr__(self, "choices", choices)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.chain_schema([handler(source), core_schema.literal_schema(list(self.choices))])


Count = Annotated[int, Ge(0), Le(LARGEST)]
Positive = Annotated[int, Ge(1), Le(LARGEST)]
Share = Annotated[float, Ge(0), Lt(1)]  # a share to prune, which is never everything
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Samples = Annotated[int, Ge(1), Le(1_000_000)]


class Checked:
    """The base of settings: every new object's fields are checked against their annotations.

    Values are checked, not converted. Fields whose names begin with an underscore are no settings.
    """

    def __post_init__(self) -> None:
        """Raise BadConfig for a value that its annotation does not accept."""
        for name, (adapter, advice) in _adapters(type(self)).items():  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            try:
                adapter.validate_python(value)
            except ValidationError as error:
                raise BadConfig(f"{name}={shown(value)} {'; '.join([_said(error), *advice])}") from None


def typed(target: type[T], given: object, where: str = "") -> T:
    """Make an object of a settings class from a mapping; groups in it become objects of their own classes.

    where: the dotted key of the mapping with a dot at its end, or "" for the whole configuration.
    Raises BadConfig that names the dotted key at fault, and for an unknown key the nearest known one.
    """
    given = group(given, where.rstrip("."))
    hints = get_type_hints(target, include_extras=True)
    known = [f for f in fields(target) if not f.name.startswith("_")]  # type: ignore[arg-type]
    refuse_unknown(given, [f.name for f in known], where)
    values = dict(given)
    for field in known:
        if field.name not in given and field.default is field.default_factory is MISSING:
            raise BadConfig(f"{where}{field.name} is not set; give it a value")
        if field.name in given and _is_group(hints[field.name]):
            values[field.name] = typed(hints[field.name], given[field.name], f"{where}{field.name}.")
    try:
        return target(**values)
    except BadConfig as error:
        raise BadConfig(f"{where}{error}") from None


def group(given: object, name: str) -> Mapping[str, object]:
    """Return a group of settings as it is. Raises BadConfig, with its name, for anything else."""
    if not isinstance(given, Mapping):
        raise BadConfig(f"{name}={shown(given)} must be a group of settings")
    return given


def shown(value: object) -> str:
    """Return a value as one line of a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse_unknown(given: Iterable[object], known: Sequence[str], where: str) -> None:
    """Raise BadConfig for an unknown key, and name the nearest known one; `where`: see `typed`."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}? There" if near else "there"
            raise BadConfig(f"{where}{shown(key).strip(chr(39))} is no setting; {hint} are {', '.join(known)}")


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Checked)


def _said(error: ValidationError) -> str:
    """Return pydantic's messages in a line: of each member of a union, and with the place of an entry of a list."""
    found = []
    for one in error.errors(include_url=False):
        place = "".join(f"[{index}] " for index in one["loc"] if isinstance(index, int))
        found.append(place + one["msg"].replace("Input should be", "must be"))
    return ", or ".join(dict.fromkeys(found))


@cache
def _adapters(target: type) -> dict[str, tuple[TypeAdapter[object], list[str]]]:
    """Return the checker of every setting, and the texts of its annotation, which advise; groups check themselves."""
    hints = get_type_hints(target, include_extras=True)
    names = [f.name for f in fields(target) if not f.name.startswith("_") and not _is_group(hints[f.name])]
    return {name: (TypeAdapter(hints[name], config=STRICT), _advice(hints[name])) for name in names}


def _advice(hint: object) -> list[str]:
    texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    return texts + [text for inner in get_args(hint) if not isinstance(inner, str) for text in _advice(inner)]
