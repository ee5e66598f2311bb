"""Rules for the fields of a line, and `checked`, which holds every line of a file to its schema.

A line that is let through can be put to a model and scored. What a task needs is there, has its type, and is not empty.
Fields that nothing reads may hold anything.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from leank.eval.benchmarks.source import Line

Test = Callable[[object], bool]
Whole = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Rule:
    """What one field must hold.

    must: what a value has to be, in words that follow "must be".
    holds: whether a value is that.
    needed: whether the field may be neither missing nor null.
    """

    must: str
    holds: Test
    needed: bool = True


@dataclass(frozen=True)
class Schema:
    """What one line must hold.

    fields: a rule for each field that is read.
    whole: says what is wrong with fields that are right one by one; None if nothing is.
    same: fields that name a sample; two lines that agree in them, the first not being empty, are one sample twice.
    """

    fields: Mapping[str, Rule]
    whole: Whole = lambda data: None
    same: tuple[str, ...] = ()


def checked(lines: Iterable[Line], schema: Schema | Callable[[Mapping[str, object]], Schema]) -> Iterator[Line]:
    """Yield the lines as they are.

    schema: of all lines, or a function from a line's object to its own.
    Raises ValueError, "FILE, line N: what is wrong; what to do", at the first wrong line.
    """
    seen: dict[str, int] = {}
    for line in lines:
        data = line.data
        wanted = schema if isinstance(schema, Schema) else schema(data)
        for name, rule in wanted.fields.items():
            if data.get(name) is None:
                if rule.needed:
                    raise line.error(f'"{name}" is {"null" if name in data else "missing"}; it must be {rule.must}')
            elif not rule.holds(data[name]):
                raise line.error(f'"{name}" is {reprlib.repr(data[name])}; it must be {rule.must}')
        if (wrong := wanted.whole(data)) is not None:
            raise line.error(wrong)
        if wanted.same and data.get(wanted.same[0]) not in (None, ""):
            name = repr([data.get(field) for field in wanted.same])
            if name in seen:
                what = f'"{wanted.same[0]}" is {reprlib.repr(data[wanted.same[0]])}, as in line {seen[name]}'
                raise line.error(f"{what}: one sample would count twice", "take one of the two out")
            seen[name] = line.number
        yield line


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def is_texts(value: object) -> TypeGuard[list[str]]:
    """Return whether a value is a list of such texts, at least one."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def is_text_or_texts(value: object) -> TypeGuard[str | list[str]]:
    """Return whether a value is a text that is not blank, or a list of such texts."""
    return is_text(value) or is_texts(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_integer(value: object) -> TypeGuard[int | str]:
    """Return whether a value is a whole number, or a text that spells one."""
    return is_whole(value) or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value) is not None)


def is_digits(value: object) -> TypeGuard[str]:
    """Return whether a value is a text of digits alone."""
    return isinstance(value, str) and re.fullmatch("[0-9]+", value) is not None


def alone(holds: Test) -> Test:
    """Return a test of a value, or of a list that holds that value alone."""
    return lambda value: holds(value[0] if isinstance(value, list) and len(value) == 1 else value)


def optional(rule: Rule) -> Rule:
    """Return a rule for a field that may be missing or null."""
    return Rule(rule.must, rule.holds, needed=False)


def one_of(names: Iterable[str]) -> str:
    """Say that a value must be one of these names."""
    return f"one of {', '.join(names)}"


ANY_TEXT = Rule("a text", lambda value: isinstance(value, str))
TEXT = Rule("a text that is not blank", is_text)
TEXTS = Rule("a list of texts that are not blank", is_texts)
FOUR_TEXTS = Rule("a list of four texts that are not blank", lambda value: is_texts(value) and len(value) == 4)
WHOLE = Rule("a whole number of at least 0", lambda value: is_whole(value) and value >= 0)
COUNT = Rule("a whole number of at least 1", lambda value: is_whole(value) and value >= 1)
NAME = Rule("a text or a whole number", lambda value: isinstance(value, str) or is_whole(value))
