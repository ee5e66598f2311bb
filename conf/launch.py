"""How both commands call Hydra: what it refuses ends in one line, and a run that is refused leaves no folder."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

FULL = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors; without it Hydra prints several lines and exits
ITS_OWN = {".hydra"}  # what Hydra puts into the folder of a run, beside an empty log


def launch(main: Callable[[], object], command: str, hint: str = "") -> None:
    """Call a `hydra.main`.

    command: how the user calls it; the line begins with it.
    hint: ends the line.

    Raises SystemExit with one line for a command line that Hydra cannot read or compose, and for jobs that Slurm
    does not take.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.WARNING)  # tells of its cache at every exit
    asked = FULL in os.environ
    os.environ.setdefault(FULL, "1")
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if asked:
            raise
        sys.exit(f"{command}: {in_one_line(error)}{hint}")
    except Exception as error:
        if asked or not refused_by_slurm(error):
            raise
        sys.exit(f"{command}: Slurm took no job: {in_one_line(error)}; see what sinfo says, and hydra.launcher.*")
    finally:
        if not asked:
            os.environ.pop(FULL, None)


def refused_by_slurm(error: Exception) -> bool:
    """Whether an error is submitit's for an sbatch that failed; it is another if a job fails later."""
    return type(error).__module__.startswith("submitit.") and isinstance(error.__cause__, CalledProcessError)


def in_one_line(error: Exception) -> str:
    """Join the lines of Hydra's message, without its advice on search paths."""
    said = ""
    for line in map(str.rstrip, str(error).splitlines()):
        if line.startswith(("Config search path", "See https://", "To append to your")):
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
