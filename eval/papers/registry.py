"""All items by id, and what can be said of one without making it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.resources import files
from importlib.util import find_spec

from leank.eval.papers import asl, iap, leank, lethe, think
from leank.eval.papers.item import Analysed, Command, Item, Step

ITEMS: dict[str, Item] = {
    item.id: item for items in (leank.ITEMS, think.ITEMS, iap.ITEMS, lethe.ITEMS, asl.ITEMS) for item in items
}
PAPERS = tuple(dict.fromkeys(item.paper for item in ITEMS.values()))
SPELLINGS = {"figure": "fig", "tab": "table"}


def find(name: str) -> Item:
    """Return the item called `name`; "LeanK:Figure7" is leank:fig7. Raises ValueError with the nearest known ids."""
    paper, _, place = name.lower().replace(" ", "").partition(":")
    kind, digits = place.rstrip("0123456789"), place.lstrip("abcdefghijklmnopqrstuvwxyz")
    known = ITEMS.get(f"{paper}:{SPELLINGS.get(kind, kind)}{digits}")
    if known is None:
        near = difflib.get_close_matches(name.lower(), ITEMS, 3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(f"{name} is no item; {hint}python -m eval.papers --list shows all")
    return known


def of_papers(names: Iterable[str]) -> list[Item]:
    """Return the items of some papers. Raises ValueError for an unknown paper."""
    chosen = [name.lower() for name in names]
    for name in chosen:
        if name not in PAPERS:
            raise ValueError(f"--paper {name} is unknown; choose from {', '.join(PAPERS)}")
    return [item for item in ITEMS.values() if item.paper in chosen]


def makes(step: Step) -> bool:
    """Return whether this command can make a step by itself, with what is there."""
    return not isinstance(step, Command) and _lack(step) is None


def runs(item: Item) -> bool:
    """Return whether this command can make an item here, or a part of it."""
    return any(map(makes, item.here))


def status(item: Item) -> str:
    """Say whether an item can be made here, in a few words."""
    lacking = dict.fromkeys(lack for step in item.here if (lack := _lack(step)) is not None)
    if runs(item):
        return f"runs here, in part: {', '.join(filter(None, lacking))}" if any(lacking) else "runs here"
    if item.here:
        return next(iter(lacking)) or "runs here by another command"
    if item.real:
        return f"needs {item.needs}"
    return "published figures only" if item.tables else "nothing to measure"


def _lack(step: Step) -> str | None:
    """Say what a step lacks: "" for a command that can be given here, None for what this one makes."""
    if isinstance(step, Command):
        return f"needs {step.needs}" if step.needs else ""
    if isinstance(step, Analysed) and find_spec("scripts") is None:
        return "needs a checkout, in which scripts.analyses lies"
    there = step.need is None or files("leank_train").joinpath(step.need.path).is_dir()
    return None if there or step.need is None else f"needs {step.need.what}"
