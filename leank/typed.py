"""Settings as frozen dataclasses, checked in one way for training and for evaluation.

    @dataclass(frozen=True)
    class DataConfig(Checked):
        questions: Positive = 4
        lengths: Sequence[Positive] = (1024,)

An annotation says what a field accepts: its type, its bounds, its choices. `typed` builds such an object from a group
of the configuration and names the dotted key of a setting that is unknown, missing, or of the wrong type.
"""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import core_schema

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
WORDS: dict[object, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null", object: "any value",
}  # fmt: skip
BOUNDS = {Ge: ("ge", "of at least {}", "[{}"), Gt: ("gt", "above {}", "({}"), Le: ("le", "of at most {}", "{}]"),
          Lt: ("lt", "below {}", "{})")}  # fmt: skip
SHOWN = 200  # characters of a value in a message
LINE_ENDS = str.maketrans("\n\t\r", "   ")
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
LARGEST = 2**53  # beyond it a number of steps, tokens or samples is a slip
T = TypeVar("T")


class BadConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and what to do."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a field that takes one of these values, such as `Annotated[str, OneOf("l2", "kl")]`."""

    choices: tuple[object, ...]

    def __init__(self, *choices: object) -> None:
        object.__setattr__(self, "choices", choices)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if value not in self.choices:
            raise ValueError
        return value


class Lines:
    """Annotation of a text that may have several lines; any other has one."""


Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Lt(1)]  # a share to prune, which is never everything
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Samples = Annotated[int, Ge(1), Le(1_000_000)]


class Checked:
    """The base of settings: every new object's fields are checked against their annotations.

    Values are checked, not converted. Fields whose names begin with an underscore are no settings.
    """

    def __post_init__(self) -> None:
        """Raise BadConfig for a value that its annotation does not accept."""
        rules = _rules(type(self))  # type: ignore[arg-type]  # a class can be hashed, whatever mypy says
        for name, (adapter, words) in rules.items():
            value = getattr(self, name)
            try:
                adapter.validate_python(value)
            except ValidationError:
                raise BadConfig(f"{name}={shown(value)} must be {words}") from None
            refuse_unsound(value, name, lines="several lines" in words)


def typed(target: type[T], given: object, where: str = "") -> T:
    """Make an object of a settings class from a mapping; groups in it become objects of their own classes.

    target: the class.
    given: the mapping; anything else is refused.
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
            raise BadConfig(f"{where}{field.name} is not set; it must be {_words(hints[field.name])}")
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
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write very long ones
    try:
        text = repr(value)
    except ValueError:  # a very long number within
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def unprintable(text: str) -> bool:
    """Whether a line cannot show a text as it is, because of line ends, control characters or half characters."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)


def too_long(text: str) -> bool:
    """Whether no file can have a text as its path; a setting of one line is a path, a name or a word."""
    parts = [part.encode() for part in text.split("/")]
    return sum(map(len, parts)) + len(parts) > LONGEST_PATH or max(map(len, parts)) > LONGEST_NAME


def refuse_unsound(value: object, name: str, lines: bool = False) -> None:
    """Raise BadConfig for a value with a part that no setting can mean, however deep in a list or a mapping it stands.

    That is NaN, an infinite or too large number, or a text that a line cannot show or that is too long for a path;
    lines: may have several, and any length.
    """
    if isinstance(value, Mapping):
        for key, one in value.items():
            refuse_unsound(key, name)
            refuse_unsound(one, name)
    elif isinstance(value, list | tuple):
        for one in value:
            refuse_unsound(one, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadConfig(f"{name}={value} must be a finite number")
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise BadConfig(f"{name}={shown(value)} is beyond 2**53; give a smaller one")
    elif isinstance(value, str) and unprintable(value.translate(LINE_ENDS) if lines else value):
        raise BadConfig(f"{name}={shown(value)} holds a character that cannot be seen; leave it out")
    elif isinstance(value, str) and not lines and too_long(value):
        raise BadConfig(f"{name}={shown(value)} is too long for a name or a path; give a shorter one")


def refuse_unknown(given: Iterable[object], known: Sequence[str], where: str) -> None:
    """Raise BadConfig for an unknown key, and name the nearest known one; `where`: see `typed`."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}? There" if near else "there"
            name = shown(key).strip("'") if unprintable(str(key)) or len(str(key)) > SHOWN else key
            raise BadConfig(f"{where}{name} is no setting; {hint} are {', '.join(known)}")


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Checked)


@cache
def _rules(target: type) -> dict[str, tuple[TypeAdapter[object], str]]:
    """Return for every setting its checker and what it accepts in words; groups check themselves."""
    hints = get_type_hints(target, include_extras=True)
    names = [f.name for f in fields(target) if not f.name.startswith("_") and not _is_group(hints[f.name])]
    return {name: (TypeAdapter(hints[name], config=STRICT), _words(hints[name])) for name in names}


def _words(hint: object) -> str:
    """Say what an annotation accepts, such as "an integer of at least 1, or null"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, *rules = args
        choices = [str(choice) for rule in rules if isinstance(rule, OneOf) for choice in rule.choices]
        hints = [f": {rule}" for rule in rules if isinstance(rule, str)]
        hints += [" of one or several lines" for rule in rules if isinstance(rule, Lines)]
        return (f"one of {', '.join(choices)}" if choices else f"{_words(base)}{_bounds(rules)}") + "".join(hints)
    if origin in (Union, UnionType):
        return ", or ".join(_words(one) for one in args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of names, each to {_words(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list, each entry {_words(args[0])}"
    return "any value" if hint is Any else WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _bounds(rules: Sequence[object]) -> str:
    found = [(getattr(rule, name), alone, pair) for rule in rules for kind, (name, alone, pair) in BOUNDS.items()
             if isinstance(rule, kind)]  # fmt: skip
    if len(found) == 2:
        return " in " + ", ".join(pair.format(value) for value, _, pair in found)
    return "".join(" " + alone.format(value) for value, alone, _ in found)
