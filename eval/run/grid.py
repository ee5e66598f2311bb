"""A method's configuration that stands for several: `each` lists values of its settings, and every combination counts.

    snapkv_think:
      tokens: {name: snapkv}
      channels: {name: think}
      each: {tokens: {budget: [512, 1024]}, channels: {ratio: [0.4, 0.5]}}

are snapkv_think_512_0.4, snapkv_think_512_0.5, snapkv_think_1024_0.4 and snapkv_think_1024_0.5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

Place = tuple[str, ...]


def expanded(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods by label, each one with `each` replaced by what it stands for.

    Raises ValueError for an `each` that is no mapping of settings to lists, and for two methods of one label.
    """
    found: dict[str, Any] = {}
    for label, given in methods.items():
        for name, one in _combinations(label, given):
            if name in found:
                raise ValueError(f"method.{name} is there twice; give one of the two another label")
            found[name] = one
    return found


def _combinations(label: str, given: object) -> Iterator[tuple[str, object]]:
    """Yield every combination of a method's `each`, with its label; the method as it is without any."""
    if not isinstance(given, Mapping) or "each" not in given:
        yield label, given
        return
    lists = dict(_lists(given["each"], (), f"method.{label}.each"))
    for values in product(*lists.values()):
        one: dict[str, Any] = copy.deepcopy({key: value for key, value in given.items() if key != "each"})
        for place, value in zip(lists, values, strict=True):
            group = one
            for key in place[:-1]:
                group = group.setdefault(key, {})
            group[place[-1]] = value
        yield "_".join([label, *map(_word, values)]), one


def _lists(tree: object, place: Place, where: str) -> Iterator[tuple[Place, list[object]]]:
    """Yield every list of values with the place of its setting."""
    if isinstance(tree, list) and tree and place:
        yield place, tree
    elif isinstance(tree, Mapping) and tree:
        for key, below in tree.items():
            yield from _lists(below, (*place, str(key)), f"{where}.{key}")
    else:
        raise ValueError(
            f"{where}={tree!r} must be a list of values, such as each: {{channels: {{ratio: [0.5, 0.7]}}}}"
        )


def _word(value: object) -> str:
    """Write a value as a part of a label; a file counts by its name."""
    if isinstance(value, str):
        return Path(value).stem
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
