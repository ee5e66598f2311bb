"""How a command calls Hydra: what Hydra refuses becomes one line, with the setting that was meant."""

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from leank.errors import in_one_line

FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
ADVICE = re.compile("Config search path|See https://|To append to your config")  # of Hydra, on its own terms
MISSING = re.compile(r"Could not (?:find|load) '(\w+)/([^']+)'")
UNKNOWN = re.compile(r"Could not override '(.+)'\.\s+To append to your config use (\+.*)")


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`; a refusal begins with `command`, as the user calls it, and ends with `hint`.

    Raises SystemExit with one line, Hydra's own words, for a command line that it cannot read or compose.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.WARNING)  # tells of its cache at every exit
    logging.raiseExceptions = False  # or each line that no longer fits into a log on a full disk prints a traceback
    asked = FULL in os.environ
    os.environ.setdefault(FULL, "1")
    sweeps = [word for word in sys.argv[1:] if word in ("-m", "--multirun")]  # Hydra takes none between settings
    sys.argv[1:] = sweeps + [word for word in sys.argv[1:] if word not in sweeps]
    try:
        main()
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if asked:
            raise
        sys.exit(f"{command}: {in_one_line(ADVICE.split(str(error))[0]).removesuffix('.')}{_cure(error)}{hint}")
    except TypeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if asked or not frame.f_globals["__name__"].startswith("hydra."):
            raise
        sys.exit(f"{command}: a group, such as model=, takes the name of a file or a list of names{hint}")
    finally:
        if not asked:
            os.environ.pop(FULL, None)


def _cure(error: Exception) -> str:
    """Return what to write in place of a setting that the configuration does not have; "" for other errors."""
    if (lacks := MISSING.search(str(error))) is not None:
        group, name = lacks.groups()
        return _meant(name, [option.removesuffix(".yaml") for option in _options(group, error)])
    found = UNKNOWN.fullmatch(str(error).strip())
    frames = (frame.f_locals.get("cfg") for frame, _ in traceback.walk_tb(error.__traceback__))
    config = next((value for value in frames if isinstance(value, DictConfig)), None)
    if found is None or config is None:
        return ""
    key, known = found[1].split("."), [path for path in _paths(config) if path[0] != "hydra"]
    for depth, word in enumerate(key):  # the first word that is not there
        names = [path[depth] for path in known if [*path[:-1]] == key[:depth]]
        if word not in names:
            break
    near = difflib.get_close_matches(word, names, 1)
    meant = [path for path in known if near and [*path] == [*key[:depth], near[0], *key[depth + 1 :]]]
    if not meant and len(key) <= 2:
        meant = [path for path in known if path[-1] == key[-1]]
    above = ".".join(key[:depth]) or "the configuration"
    if not meant and depth < len(key) - 1:
        return f": {above} has {', '.join(names) or 'no settings'}"
    hint = f"did you mean {min(map('.'.join, meant), key=len)}? A" if meant else "a"
    return f": {hint} setting that {above} does not show takes a leading +, {found[2]}"


def _options(group: str, error: Exception) -> list[str]:
    """Return what a group takes, as far as Hydra or its store of configurations knows."""
    try:
        return getattr(error, "options", None) or ConfigStore.instance().list(group)
    except OSError:
        return []


def _meant(name: str, options: Sequence[str]) -> str:
    """Return what follows an unknown name; "" where none is near."""
    near = difflib.get_close_matches(name, options, 1)
    return f": did you mean {near[0]}" if near else ""


def _paths(node: DictConfig, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in node:
        path, inner = (*above, str(name)), node._get_node(name)
        yield path
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _paths(inner, path)
