"""What became of a sweep of `python -m leank_train -m`: which members are done, those that are not again, the tables.

    python -m scripts.sweep status DIR      # one line per member; the log and last words of those that failed
    python -m scripts.sweep rerun DIR       # those that failed or never started, alone, with the sweep's own launcher
    python -m scripts.sweep report DIR      # DIR/report: figure 4, tables 9, 12, 15, 16, 22, 23; CSV, Markdown, PNG

A member is judged by its result file, metrics.json, which a run writes last: Slurm calls a job COMPLETED whose Python
raised. Without Slurm a member that is still at work counts as failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from leank.cli import again, ending, in_one_line

RESULT, RECORD, AGAIN = "metrics.json", "multirun.yaml", ".rerun"
NOISE = ("srun:", "slurmstepd:", "submitit ", "[", "Exiting")


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its overrides, its folder once it started, its job's number and log, and what became of it.

    state: done | failed | not started, or Slurm's word for a job in its queue (running, pending, ..).
    """

    overrides: tuple[str, ...]
    folder: Path | None
    job: str | None
    log: Path | None
    state: str

    @property
    def lost(self) -> bool:
        """Neither done nor on the way."""
        return self.state in ("failed", "not started")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise ValueError that names the file where what Hydra wrote into it is damaged."""
    wrong = (YAMLError, OmegaConfBaseException, HydraException, UnicodeDecodeError, AttributeError, TypeError, OSError)
    try:
        yield
    except wrong as error:
        if isinstance(error, OSError) and error.errno is not None:  # OmegaConf raises it for a file of one number, too
            raise
        said = in_one_line(str(error))[:200]
        raise ValueError(f"{file} is not what Hydra wrote ({said}); copy it again, or start the sweep anew") from error


def record(sweep: Path) -> DictConfig:
    """What Hydra wrote down when the sweep began. Raises ValueError for a folder without a sweep of leank_train."""
    file = sweep / RECORD
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the hydra.sweep.dir of a python -m leank_train -m ...")
    with reading(file):
        found = OmegaConf.load(file)
        if not isinstance(found, DictConfig):
            raise TypeError("no mapping")
        name = found.hydra.job.config_name
    if name != "train":
        raise ValueError(f"{file} is of {name}.yaml; only sweeps of python -m leank_train are understood")
    return found


def plan(written: DictConfig) -> list[tuple[str, ...]]:
    """The overrides of every member, in the order of their job numbers."""
    params = [f"{key}={value}" for key, value in (written.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *written.hydra.overrides.task])
    return [tuple(member) for member in BasicSweeper.split_arguments(parsed, None)[0]]


def queue() -> dict[str, str]:
    """Job number -> state, of the jobs that Slurm has not finished with."""
    found = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"squeue: {found.stderr.strip()}; run this where the sweep was started")
    return {job: state.lower() for job, state in (line.split() for line in found.stdout.splitlines())}


def members(sweep: Path) -> list[Member]:
    """Every member that the sweep was to have."""
    written, folders = record(sweep), {}
    with reading(sweep / RECORD):
        slurm, planned = written.hydra.launcher._target_.endswith("SlurmLauncher"), plan(written)
    alive = queue() if slurm else {}
    for file in sweep.rglob(".hydra/overrides.yaml"):
        with reading(file):
            folders[tuple(OmegaConf.load(file))] = file.parents[1]
    found = []
    for number, overrides in enumerate(planned):
        folder, job = folders.get(overrides), None
        if folder is not None:
            with reading(file := folder / ".hydra/hydra.yaml"):
                job = str(OmegaConf.load(file).hydra.job.id)
        elif submitted := sorted(sweep.glob(f".submitit/*_{number}"), key=lambda p: p.stat().st_mtime):
            job = submitted[-1].name
        log = next(iter(sweep.glob(f"**/.submitit/{job}/{job}_0_log.out")), None)
        state = "not started" if folder is None else "failed"
        if folder is not None and (folder / RESULT).is_file():
            state = "done"
        elif job in alive:
            state = alive[job]
        found.append(Member(overrides, folder, job, log, state))
    return found


def last_words(log: Path) -> str:
    """The last line of a log that is a program's, not a launcher's."""
    lines = (line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines())
    return next((line for line in reversed([*lines]) if line and not line.startswith(NOISE)), "")


def status(sweep: Path) -> int:
    """Print one line per member; returns how many are lost."""
    everyone = members(sweep)
    for m in everyone:
        print(f"{m.state:12s} {m.job or '-':10s} {' '.join(m.overrides)}")
        if m.state == "failed" and m.log is not None:
            print(f"{'':23s} {m.log}: {last_words(m.log)[:200]}")
    lost = sum(m.lost for m in everyone)
    print(f"{sum(m.state == 'done' for m in everyone)} of {len(everyone)} done, {lost} to run again", flush=True)
    return lost


def command(sweep: Path, overrides: tuple[str, ...]) -> list[str]:
    """The command line of one member alone: the sweep's own launcher and settings, into the member's own folder."""
    written, sweep = record(sweep), sweep.resolve()
    hydra, plain = written.hydra, OmegaConf.to_container(written, resolve=False)
    assert isinstance(plain, dict)
    own = ("hydra.sweep.", "hydra.sweeper.", "hydra.mode=")
    searched = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    return [
        *(sys.executable, "-m", "leank_train", "--multirun"),
        *(f"--config-dir={path}" for path in searched),
        *(override for override in hydra.overrides.hydra if not override.startswith(own)),
        *overrides,
        f"hydra.sweep.dir='{sweep / AGAIN}'",  # its own record, beside the sweep's
        f"hydra.sweep.subdir='{sweep}/{plain['hydra']['sweep']['subdir']}'",
    ]


def rerun(sweep: Path, at_once: int) -> int:
    """Run what is lost, `at_once` launchers side by side; returns how many are lost then."""
    lost = [m for m in members(sweep) if m.lost]
    cwd = record(sweep).hydra.runtime.cwd
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda m: subprocess.run(command(sweep, m.overrides), cwd=cwd), lost))
    return status(sweep)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["status", "rerun", "report"])
    parser.add_argument("sweep", type=Path, metavar="DIR", help="the sweep's hydra.sweep.dir")
    parser.add_argument("--at-once", type=int, default=8, help="members that rerun waits for side by side (default 8)")
    args = parser.parse_args(argv)
    with ending("sweep", lambda: f"the runs are as they were; again: {again('scripts.sweep')}"):
        if args.at_once < 1:
            raise ValueError(f"--at-once={args.at_once} must be at least 1")
        if args.action == "report":
            from scripts.sweep.report import write_report

            for file in write_report(args.sweep):
                print(file)
            return
        lost = status(args.sweep) if args.action == "status" else rerun(args.sweep, args.at_once)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
