"""What all commands share: how Hydra is called, which command lines are refused, and how a command ends.

What stops a command is one line on standard error: a setting, a file, a signal, a machine without room. A run that is
refused leaves no folder.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from types import FrameType
from typing import NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import YAMLError

from leank.errors import in_one_line, out_of_memory

COMMANDS = {"train": "leank_train", "eval": "eval"}  # folder of leank.conf -> command
CONF = Path(str(files("leank.conf")))
FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
SHOWING = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info"}  # options that start nothing


# command lines that cannot be meant


def refuse(arguments: list[str], own: str) -> None:
    """Exit with one line for arguments that Hydra would take, and that cannot be meant.

    own: "train" or "eval".
    """
    found = _of_other_command(arguments, own) or _of_several_experiments(arguments) or _without_slurm(arguments, own)
    if found:
        sys.exit(f"{COMMANDS[own]}: {found}")


def _of_other_command(arguments: list[str], own: str) -> str | None:
    for argument in arguments:
        found = re.fullmatch(r"\+{0,2}experiment=\[?([\w,/]+)\]?", argument)
        for name in found.group(1).split(",") if found else []:
            homes = [
                root for root in COMMANDS if files("leank.conf").joinpath(root, f"experiment/{name}.yaml").is_file()
            ]
            if homes and own not in homes:
                command = COMMANDS[homes[0]]
                return f"experiment={name} belongs to another command: python -m {command} +experiment={name}"
    return None


def _of_several_experiments(arguments: list[str]) -> str | None:
    """Refuse a sweep over experiments: their runs would have one folder, whose name leaves the experiment out."""
    for argument in arguments:
        if _is_sweep(arguments) and re.fullmatch(r"\+{0,2}experiment=[\w/]+(,[\w/]+)+", argument):
            return f"{argument}: a sweep has one experiment; start one for each, with its own hydra.sweep.dir"
    return None


def _without_slurm(arguments: list[str], own: str) -> str | None:
    """Say what is missing where an argument asks for a launcher of Slurm."""
    asked = [a for a in arguments if re.fullmatch(r"\+{0,2}hydra/launcher=(slurm\w*|submitit_slurm)", a)]
    if not asked:
        return None
    if own == "eval" and not asked[-1].endswith("=submitit_slurm"):
        return (
            f"{asked[-1]}: an evaluation is no sweep of jobs; give its arguments to sbatch --array=0-7 "
            "scripts/cluster/eval.sbatch (docs/cluster.md)"
        )
    if not _is_installed("hydra_plugins.hydra_submitit_launcher"):
        return f"{asked[-1]} needs the package hydra-submitit-launcher; pip install 'leank[slurm]'"
    if SHOWING & {*arguments}:
        return None
    lacking = [program for program in ("sbatch", "srun") if shutil.which(program) is None]
    if lacking:
        return (
            f"{asked[-1]} needs {' and '.join(lacking)}, which this machine does not have; start the command on a "
            "login node of a Slurm cluster, or leave the launcher out to run here"
        )
    if not _is_sweep(arguments):
        return f"{asked[-1]} makes a job of each member of a sweep, and without -m there is none; add -m"
    return None


def _is_sweep(arguments: list[str]) -> bool:
    return bool({"-m", "--multirun"} & {*arguments})


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


# Hydra


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`.

    command: how the user calls it; the line begins with it.
    hint: ends the line.

    Raises SystemExit with one line for a command line that Hydra cannot read or compose, and for jobs that Slurm
    does not take; OSError for a folder that cannot be written to.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.WARNING)  # tells of its cache at every exit
    logging.raiseExceptions = False  # or each line that no longer fits into a log on a full disk prints a traceback
    warnings.formatwarning = _formatted
    asked = FULL in os.environ
    os.environ.setdefault(FULL, "1")
    try:
        main()
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        if asked:
            raise
        sys.exit(f"{command}: {refusal(error)}{hint}")
    except ValueError as error:
        if isinstance(error.__cause__, OSError):  # the log of a run whose folder cannot be written to
            raise error.__cause__ from None
        raise
    except Exception as error:
        if asked or not refused_by_slurm(error):
            raise
        sys.exit(f"{command}: Slurm took no job: {_hydra_says(error)}; see what sinfo says, and hydra.launcher.*")
    finally:
        if not asked:
            os.environ.pop(FULL, None)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line, without the line of code that Python writes below it."""
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def refused_by_slurm(error: Exception) -> bool:
    """Whether an error is submitit's for an sbatch that failed; it is another if a job fails later."""
    return type(error).__module__.startswith("submitit.") and isinstance(error.__cause__, CalledProcessError)


def refusal(error: Exception) -> str:
    """Say in one line what is wrong with a command line or a configuration file, and what may be meant."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read; a value with blanks, signs or other letters needs quotes of its own, "
            "such as 'name=\"a b\"'"
        )
    near, cause = _meant(error), error.__cause__
    why = f": {str(cause).splitlines()[0]}" if isinstance(cause, ValidationError) else ""
    return _hydra_says(error) + why + (f" (did you mean {near}?)" if near else "")


def _meant(error: Exception) -> str | None:
    """Return the name that comes nearest to one that Hydra does not find, of a setting or of a file in a group."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        wrong = error.missing_cfg_file.rpartition("/")[2]
        known = [str(option) for option in error.options or ()] or _options(error.missing_cfg_file.rpartition("/")[0])
    elif isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        wrong, known = str(cause.key), [str(key) for key in cause.parent_node if key != "hydra"]
    else:
        return None
    return None if wrong in known else next(iter(get_close_matches(wrong, known, 1)), None)


def _options(group: str) -> list[str]:
    """Return the names of the configurations in a group."""
    folders = [CONF / root / group for root in ("train", "eval", "shared")]
    names = [file.name for folder in folders if folder.is_dir() for file in folder.iterdir()]
    store = ConfigStore.instance()  # of what is no file of its own, such as methods
    names += store.list(group) if store.get_type(group) == ObjectType.GROUP else []
    return [name.removesuffix(".yaml") for name in names if name.endswith(".yaml")]


def _hydra_says(error: Exception) -> str:
    """Join the lines of Hydra's message, without its advice on search paths."""
    said = ""
    for line in map(str.rstrip, str(error).splitlines()):
        if line.startswith(("Config search path", "See https://", "To append to your config")):
            break
        if line:
            between = "" if not said else " " if said.endswith((":", ".")) else ", " if line[0] == "\t" else "; "
            said += between + line.strip()
    return said.removesuffix(".")


def leave_no_trace(folder: Path) -> None:
    """Remove the folder of a run that was refused, and empty ones above it, if it holds but Hydra's own files."""
    if not folder.is_dir() or Path.cwd().is_relative_to(folder.resolve()):  # hydra.job.chdir=true
        return
    for file in folder.iterdir():
        empty_log = file.suffix == ".log" and file.is_file() and not file.stat().st_size
        if file.name != ".hydra" and not empty_log:
            return
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.resolve().parents:
        if above == Path.cwd() or not above.is_relative_to(Path.cwd()) or any(above.iterdir()):
            return
        above.rmdir()


# how a command ends


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


def again(command: str) -> str:
    """Return the command line of this process, so that the user can give it again.

    command: the module of `python -m`; an installed program such as leank-eval is called by its own name.
    """
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

    Raises SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 1 where memory, a disk or a permission is lacking, and
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
    except OSError as error:
        said = left()
        own = error.errno is None or error.strerror is None  # an error of this package, with a message
        what = in_one_line(str(error)) if own else ": ".join(str(x) for x in (error.filename, error.strerror) if x)
        _leave(f"{command}: {what}" + ("" if error.errno is None else f"; {said}"), 1)
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
