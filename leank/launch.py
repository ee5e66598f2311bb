"""How both commands call Hydra: what it refuses ends in one line, and a run that is refused leaves no folder."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from subprocess import CalledProcessError

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import YAMLError

FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
HYDRAS = "Hydra's files in hydra.run.dir or hydra.sweep.dir"
ITS_OWN = {".hydra"}  # what Hydra puts into the folder of a run, beside an empty log


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`.

    command: how the user calls it; the line begins with it.
    hint: ends the line.

    Raises SystemExit with one line for a command line that Hydra cannot read or compose, and for jobs that Slurm
    does not take; OSError naming a file or the settings of a folder.
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
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a full disk does not say for which file, nor getcwd()
            where = "the current folder" if error.errno == errno.ENOENT else HYDRAS
            raise OSError(error.errno, error.strerror, where) from error
        raise
    except Exception as error:
        if asked or not refused_by_slurm(error):
            raise
        sys.exit(f"{command}: Slurm took no job: {hydra_says(error)}; see what sinfo says, and hydra.launcher.*")
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
    if isinstance(error, UnicodeDecodeError):
        return f"a configuration file is not in UTF-8 ({error.reason} at byte {error.start}); save it so"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read; a value with blanks, signs or other letters needs quotes of its own, "
            "such as 'name=\"a b\"'"
        )
    near, cause = meant(error), error.__cause__
    why = f": {str(cause).splitlines()[0]}" if isinstance(cause, ValidationError) else ""
    return hydra_says(error) + why + (f" (did you mean {near}?)" if near else "")


def meant(error: Exception) -> str | None:
    """Return the name that comes nearest to one that Hydra does not find, of a setting or of a file in a group."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, wrong = error.missing_cfg_file.rpartition("/")
        folders = [files("leank.conf").joinpath(root, group) for root in ("train", "eval", "shared")]
        known = [file.name for folder in folders if folder.is_dir() for file in folder.iterdir()]
        known = [name.removesuffix(".yaml") for name in known if name.endswith(".yaml")]
    elif isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        wrong, known = str(cause.key), [str(key) for key in cause.parent_node if key != "hydra"]
    else:
        return None
    return None if wrong in known else next(iter(get_close_matches(wrong, known, 1)), None)


def hydra_says(error: Exception) -> str:
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
        if file.name not in ITS_OWN and not empty_log:
            return
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.resolve().parents:
        if above == Path.cwd() or not above.is_relative_to(Path.cwd()) or any(above.iterdir()):
            return
        above.rmdir()
