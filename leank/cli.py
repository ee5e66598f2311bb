"""What all commands share: how Hydra is called, which command lines are refused, and how a command ends.

What stops a command is one line on standard error: a setting, a file, a signal, a machine without room. A run that is
refused leaves no folder.
"""

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from leank.errors import in_one_line, out_of_memory

COMMANDS = {"train": "leank_train", "eval": "leank.eval"}  # folder of leank.conf -> module of the command
CONF = Path(str(files("leank.conf")))
FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
ADVICE = re.compile("Config search path|See https://|To append to your config")  # of Hydra, on its own terms
SHOWING = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info"}  # options that start nothing


# command lines that cannot be meant


def refuse(arguments: list[str], own: str) -> None:
    """Exit with one line for arguments that Hydra would take, and that cannot be meant; own: "train" or "eval".

    These are an experiment of the other command, a sweep over experiments, whose runs would share a folder, and jobs of
    Slurm where there is no sweep or no Slurm.
    """
    (other,) = COMMANDS.keys() - {own}
    name = COMMANDS[own].removeprefix("leank.")
    sweep = bool({"-m", "--multirun"} & {*arguments})
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        if key == "experiment":
            for one in value.strip("[]").split(","):
                homes = [root for root in COMMANDS if (CONF / root / f"experiment/{one}.yaml").is_file()]
                if homes == [other]:
                    command = f"python -m {COMMANDS[other]} +experiment={one}"
                    sys.exit(f"{name}: experiment={one} belongs to another command: {command}")
            if sweep and "," in value and not value.startswith("["):
                cure = "a sweep has one experiment; start one for each, with its own hydra.sweep.dir"
                sys.exit(f"{name}: {argument}: {cure}")
        elif key == "hydra/launcher" and "slurm" in value and not SHOWING & {*arguments}:
            if shutil.which("srun") is None:
                cure = "needs Slurm, which this machine does not have; start the command on a login node"
                sys.exit(f"{name}: {argument} {cure}, or leave the launcher out to run here")
            if not sweep:
                sys.exit(f"{name}: {argument} makes a job of each member of a sweep; add -m")


# Hydra


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`; a refusal begins with `command`, as the user calls it, and ends with `hint`.

    Raises SystemExit with one line for a command line that Hydra cannot read or compose.
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
        sys.exit(f"{command}: {refusal(error)}{hint}")
    finally:
        if not asked:
            os.environ.pop(FULL, None)


def refusal(error: Exception) -> str:
    """Say in one line what is wrong with a command line or a configuration file, and what may be meant."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read; a value with blanks, signs or other letters needs quotes of its own, "
            "such as 'name=\"a b\"'"
        )
    said = in_one_line(ADVICE.split(str(error))[0]).removesuffix(".")
    if said.startswith("Config group override must be"):  # Hydra names neither the group nor its value
        given = [one for one in sys.argv[1:] if _options(one.lstrip("+").partition("=")[0])]
        said = f"{' '.join(given)}: a group takes the name of a file ({said})"
    if isinstance(error.__cause__, ValidationError):
        said += f": {str(error.__cause__).splitlines()[0]}"
    if near := _meant(error):
        return f"{said} (did you mean {near}?)"
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and "." in str(lacking := cause.full_key):
        return f"{said}: there is no {lacking}; +{lacking}=VALUE adds one"
    return said


def _meant(error: Exception) -> str | None:
    """Return the name that comes nearest to one that Hydra does not find, of a setting or of a file in a group."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, wrong = error.missing_cfg_file.rpartition("/")
        known = [str(option) for option in error.options or ()] or _options(group)
    elif isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        wrong, known = str(cause.key), [str(key) for key in cause.parent_node if key != "hydra"]
    else:
        return None
    return None if wrong in known else next(iter(get_close_matches(wrong, known, 1)), None)


def _options(group: str) -> list[str]:
    names = [file.name for root in ("train", "eval", "shared") for file in (CONF / root / group).glob("*.yaml")]
    store = ConfigStore.instance()  # of what is no file of its own, such as methods
    names += store.list(group) if store.get_type(group) == ObjectType.GROUP else []
    return [name.removesuffix(".yaml") for name in names]


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


# how a command ends


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
        said = left()
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
