"""Extras: a plain installation has masks, caches and serving; training and evaluation bring more libraries."""

import sys
from importlib.util import find_spec
from pathlib import Path


class MissingExtra(ModuleNotFoundError):
    """A library of an extra is not installed; the message says which extra."""


def require(what: str, extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all of these modules, which an extra brings, are installed.

    what: the command or function that needs them; the message begins with it.
    Raises SystemExit with the message where Python is about to start a command of this package.
    """
    if all(map(find_spec, modules)):
        return
    line = f"{what} needs the extra {extra}: pip install 'leank[{extra}]'"
    if sys.argv[0] == "-m" or Path(sys.argv[0]).name.startswith("leank-"):  # `python -m` still looks for the module
        raise SystemExit(line)
    raise MissingExtra(line)
