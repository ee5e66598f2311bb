"""What all commands share: how Hydra is called, and how a command ends.

What stops a command is one line on standard error: a setting, a file, a signal, a machine without room. A run that is
refused leaves no folder.
"""

import difflib
import errno
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from leank.errors import in_one_line, out_of_memory

FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
ADVICE = re.compile("Config search path|See https://|To append to your config")  # of Hydra, on its own terms
UNKNOWN = re.compile(r"Could not override '(.+)'\.\s+To append to your config use (\+.*)")
PASSES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM}  # after these the same command may go on


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`; a refusal begins with `command`, as the user calls it, and ends with `hint`.

    Raises SystemExit with one line, Hydra's own words, for a command line that it cannot read or compose.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.WARNING)  # tells of its cache at every exit
    logging.raiseExceptions = False  # or each line that no longer fits into a log on a full disk prints a traceback
    asked = FULL in os.environ
    os.environ.setdefault(FULL, "1")
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


def _paths(node: DictConfig, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in node:
        path, inner = (*above, str(name)), node._get_node(name)
        yield path
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _paths(inner, path)


def leave_no_trace(folder: Path) -> None:
    """Remove the folder of a run that was refused, and empty ones above it, if it holds but Hydra's own files."""
    here = Path.cwd()
    if not folder.is_dir() or here.is_relative_to(folder.resolve()):  # hydra.job.chdir=true
        return
    if any(file.name != ".hydra" and (file.suffix != ".log" or file.stat().st_size) for file in folder.iterdir()):
        return
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.resolve().parents:
        if above == here or not above.is_relative_to(here) or any(above.iterdir()):
            return
        above.rmdir()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


def again(command: str) -> str:
    """Return the command line of this process, to be given again; command: the module of `python -m`."""
    program = Path(sys.argv[0]).name
    start = program if program.startswith("leank-") else f"python -m {command}"
    return f"{start} {shlex.join(sys.argv[1:])}".rstrip()


def stopped(command: str, number: int, kept: str) -> str:
    """Return the line that says which signal stopped a command, and what is kept."""
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return f"{command}: stopped by {how}; {kept}"


@contextmanager
def ending(command: str, kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Answer with one line what stops a command: a signal, a machine without room, or input that it refuses.

    command: how the user calls it, such as "eval"; the line begins with it.
    kept: says what is saved and how to go on; None says to give the same command again.
    Raises SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 141 without a word where what reads the output of
    a command that keeps nothing has gone, 1 where memory, a disk or a permission is lacking, and
    with the line itself (which gives 1) after a ValueError; nothing is kept of a run that is refused.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, _terminate)

    def left() -> str:
        return kept() if kept is not None else f"nothing is saved yet; to go on: {again(command)}"

    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        _leave(stopped(command, number, left()), 128 + number)
    except BrokenPipeError as error:
        if kept is None:  # the reader of --help or of a table has read enough
            raise SystemExit(141) from error
        _leave(f"{command}: {error.strerror}; {kept()}", 1)
    except OSError as error:
        said = left() if kept is not None or error.errno in PASSES else "name a file or a folder that can be written"
        if error.errno is None:  # an error of this package, which says what to do
            _leave(f"{command}: {in_one_line(str(error))}", 1)
        _leave(f"{command}: {': '.join(str(x) for x in (error.filename, error.strerror) if x)}; {said}", 1)
    except ValueError as error:
        left()  # which may clear up
        sys.exit(f"{command}: {in_one_line(str(error))}")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        said = str(error) if isinstance(error, MemoryError) and str(error) else "out of memory; free some"
        _leave(f"{command}: {said}; {left()}", 1)
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _leave(line: str, status: int) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    raise SystemExit(status)
