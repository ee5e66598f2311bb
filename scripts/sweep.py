"""What became of a sweep of `python -m leank_train -m`: which members are done, those that are not again, the tables.

    python -m scripts.sweep status DIR      # one line per member; the log of those that failed
    python -m scripts.sweep rerun DIR       # those that failed or never started, alone, with the sweep's own launcher
    python -m scripts.sweep report DIR      # DIR/report: figure 4, and a table of every setting; CSV, Markdown, PNG

A member is judged by its result file, metrics.json, which a run writes last: Slurm calls a job COMPLETED whose Python
raised. Without Slurm a member that is still at work counts as failed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pandas as pd
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from leank.eval.report.groups import flat
from leank.eval.report.summary import summarise
from leank.eval.rows import GLOB, read
from leank.files import name_of, write_text

RESULT, RECORD, AGAIN = "metrics.json", "multirun.yaml", ".rerun"
OWN, AVERAGE, DENSE, RATIO = "validation", "average", "dense", "pruning.ratio"
OF_DENSE = ("model.", "validation.")  # the settings that a dense score depends on, beside the seed


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its overrides, folder once it started, job's number and log, and what became of it."""

    overrides: tuple[str, ...]
    folder: Path | None
    job: str | None
    log: Path | None
    state: str  # done | failed | not started, or Slurm's word for a job in its queue (running, pending, ..)

    @property
    def lost(self) -> bool:
        """Neither done nor on the way."""
        return self.state in ("failed", "not started")


def record(sweep: Path) -> DictConfig:
    """What Hydra wrote down when the sweep began. Raises SystemExit for a folder without a sweep."""
    if not (sweep / RECORD).is_file():
        raise SystemExit(f"{sweep / RECORD} does not exist; give the hydra.sweep.dir of a python -m leank_train -m ...")
    return cast(DictConfig, OmegaConf.load(sweep / RECORD))


def planned(written: DictConfig) -> list[tuple[str, ...]]:
    """The overrides of every member, in the order of their job numbers."""
    params = [f"{key}={value}" for key, value in (written.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *written.hydra.overrides.task])
    return [tuple(member) for member in BasicSweeper.split_arguments(parsed, None)[0]]


def queue() -> dict[str, str]:
    """Job number -> state, of the jobs that Slurm has not finished with. Raises CalledProcessError without Slurm."""
    found = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], stdout=subprocess.PIPE, text=True, check=True)
    return {job: state.lower() for job, state in (line.split() for line in found.stdout.splitlines())}


def members(sweep: Path) -> list[Member]:
    """Every member that the sweep was to have."""
    written = record(sweep)
    alive = queue() if written.hydra.launcher._target_.endswith("SlurmLauncher") else {}
    folders = {tuple(OmegaConf.load(file)): file.parents[1] for file in sweep.rglob(".hydra/overrides.yaml")}
    found = []
    for number, overrides in enumerate(planned(written)):
        folder, job, state = folders.get(overrides), None, "not started"
        if folder is not None:
            job = str(OmegaConf.load(folder / ".hydra/hydra.yaml").hydra.job.id)
            state = "done" if (folder / RESULT).is_file() else alive.get(job, "failed")
        elif submitted := sorted(sweep.glob(f".submitit/*_{number}"), key=lambda path: path.stat().st_mtime):
            job = submitted[-1].name
            state = alive.get(job, state)
        log = next(iter(sweep.glob(f"**/.submitit/{job}/{job}_0_log.out")), None)
        found.append(Member(overrides, folder, job, log, state))
    return found


def status(sweep: Path) -> int:
    """Print one line per member; returns how many are lost."""
    everyone = members(sweep)
    for m in everyone:
        print(f"{m.state:12s} {m.job or '-':10s} {' '.join(m.overrides)}")
        if m.state == "failed" and m.log is not None:
            print(f"{'':23s} {m.log}")
    lost = sum(m.lost for m in everyone)
    print(f"{sum(m.state == 'done' for m in everyone)} of {len(everyone)} done, {lost} to run again", flush=True)
    return lost


def command(sweep: Path, overrides: tuple[str, ...]) -> list[str]:
    """The command line of one member alone: the sweep's own launcher and settings, into the member's own folder."""
    written, sweep = record(sweep), sweep.resolve()
    hydra, raw = written.hydra, OmegaConf.to_container(written, resolve=False)
    assert isinstance(raw, dict)
    own = ("hydra.sweep.", "hydra.sweeper.", "hydra.mode=")
    searched = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return [
        *(sys.executable, "-m", "leank_train", "--multirun"),
        *(f"--config-dir={path}" for path in searched),
        *(override for override in hydra.overrides.hydra if not override.startswith(own)),
        *overrides,
        f"hydra.sweep.dir='{sweep / AGAIN}'",  # its own record, beside the sweep's
        f"hydra.sweep.subdir='{sweep}/{raw['hydra']['sweep']['subdir']}'",
    ]


def rerun(sweep: Path, at_once: int) -> int:
    """Run what is lost, `at_once` launchers side by side; returns how many are lost then."""
    lost = [m for m in members(sweep) if m.lost]
    cwd = record(sweep).hydra.runtime.cwd
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda m: subprocess.run(command(sweep, m.overrides), cwd=cwd), lost))
    return status(sweep)


def scores(sweep: Path) -> pd.DataFrame:
    """Every score (0-100) of every member that is done: settings that differ, seed, source, method, task, score."""
    from leank_train.settings import NOT_IN_HASH, plain  # seconds

    found, configs = {}, {}
    for folder in sorted(file.parent for file in sweep.rglob(RESULT)):
        config = plain(OmegaConf.load(folder / "config.yaml"))  # type: ignore[arg-type]
        kept: dict[str, Any] = {key: value for key, value in config.items() if key == OWN or key not in NOT_IN_HASH}
        tasks = {name: share for name, share in kept["data"]["tasks"].items() if share}
        kept["data"] |= {"tasks": " ".join(f"{name}:{share}" for name, share in tasks.items())}  # one setting
        configs[folder], found[folder] = flat(kept), list(member_scores(folder))
    if not any(found.values()):
        raise SystemExit(f"{sweep} has no member with scores: see `status`, and validation.samples of its runs")
    settings = pd.DataFrame(configs, dtype=object).T
    varied = [name for name in settings if name != "seed" and settings[name].map(str).nunique() > 1]
    if twice := [str(folder) for folder in settings.index[settings[[*varied, "seed"]].map(str).duplicated(keep=False)]]:
        raise SystemExit(f"{' and '.join(twice)} have the same settings and seed; keep one of them")
    lines = [(folder, *line) for folder, own in found.items() for line in own]
    table = pd.DataFrame(lines, columns=["folder", "source", "method", "task", "score"])
    return settings[[*varied, "seed"]].join(table.set_index("folder"), how="right").reset_index(drop=True)


def member_scores(folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """(source, method, task, score) of one member: its own validation, then what eval has left in its folder."""
    metrics = json.loads((folder / RESULT).read_text())
    for method, row in metrics.get("validation", {}).get("recall", {}).items():
        yield from ((OWN, method, task, score) for task, score in row.items() if task != AVERAGE)
    for run in sorted({file.parent for file in folder.rglob(GLOB)}):
        for part in summarise(read(run))["runs"]:
            for cell in part["cells"]:
                task = cell["task"] if cell["length"] is None else f"{cell['task']} {cell['length']}"
                yield part["benchmark"], cell["method"], task, cell["score"]


def averaged(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean and standard deviation over seeds, by method and setting (dense first), a column per task and the average.

    Tasks count alike in the average. A task that some seed lacks is NaN, a deviation of one seed too. Dense stands
    once: no setting of a mask changes it.
    """
    varied = list(table.columns[: table.columns.get_loc("seed")])
    shown = table.copy()
    shown[varied] = shown[varied].map(str)
    shown.loc[shown["method"] == DENSE, [name for name in varied if not name.startswith(OF_DENSE)]] = ""
    by = ["method", *varied]
    wide = shown.groupby([*by, "seed", "task"], sort=False)["score"].mean().unstack("task")[[*shown["task"].unique()]]
    wide[AVERAGE] = wide.mean(axis=1, skipna=False)
    seeds = wide.groupby(level=by, sort=False)
    mean, deviation = seeds.agg(lambda values: values.mean(skipna=False)), seeds.std()
    mean.insert(0, "seeds", seeds.size())
    order = sorted(mean.index, key=lambda key: (key if isinstance(key, str) else key[0]) != DENSE)
    return mean.loc[order], deviation.loc[order]


def figure4(mean: pd.DataFrame, deviation: pd.DataFrame, source: str) -> Figure:
    """Average accuracy against the pruning ratio, one line per method and other setting; bars: deviation over seeds."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis, markers = figure.add_subplot(), cycle("os^vDPX*")
    flat_mean = mean[AVERAGE].rename("y").to_frame().assign(error=deviation[AVERAGE].fillna(0)).dropna().reset_index()
    others = [name for name in mean.index.names if name not in ("method", RATIO)]
    for (method, *settings), points in flat_mean.groupby(["method", *others], sort=False):
        named = [f"{name.rpartition('.')[2]}={value}" for name, value in zip(others, settings, strict=True) if value]
        label = ", ".join([method, *named])
        if method == DENSE:
            level = points["y"].mean()
            axis.axhline(level, color="black", lw=1, ls="--", label=f"{label} {level:.1f}")
            continue
        points = points.assign(x=100 * points[RATIO].astype(float)).sort_values("x")
        axis.errorbar(points["x"], points["y"], points["error"], marker=next(markers), capsize=3, lw=1.5, label=label)
    axis.set(xlabel="K channels pruned (%)", ylabel=f"accuracy (%), {source}", ylim=(-3, 103))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def report(sweep: Path) -> list[Path]:
    """Write DIR/report; returns its files. A table, and where ratios vary figure 4, for each source of scores."""
    table, out = scores(sweep), sweep / "report"
    files, text = [out / "scores.csv"], []
    write_text(files[0], table.to_csv(index=False))
    for source, own in table.groupby("source", sort=False):
        mean, deviation = averaged(own.drop(columns="source"))
        text.append(f"# {source}: accuracy in %, mean ± standard deviation over seeds")
        if RATIO in mean.index.names:
            files.append(out / f"figure4_{name_of(str(source))}.png")
            figure4(mean, deviation, str(source)).savefig(files[-1], dpi=130, metadata={"Software": None})
            text.append(f"![figure 4: accuracy against pruning ratio]({files[-1].name})")
        shown = mean.drop(columns="seeds").map(lambda value: "" if pd.isna(value) else f"{value:.1f}")
        shown += deviation.map(lambda value: "" if pd.isna(value) else f" ± {value:.1f}")
        shown.insert(0, "seeds", mean["seeds"])
        text.append(shown.reset_index().to_markdown(index=False, disable_numparse=True))
    files.append(out / "report.md")
    write_text(files[-1], "\n\n".join(text) + "\n")
    return files


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["status", "rerun", "report"])
    parser.add_argument("sweep", type=Path, metavar="DIR", help="the sweep's hydra.sweep.dir")
    parser.add_argument("--at-once", type=int, default=8, help="members that rerun waits for side by side (default 8)")
    args = parser.parse_args(argv)
    if args.action == "report":
        print(*report(args.sweep), sep="\n")
        return
    lost = status(args.sweep) if args.action == "status" else rerun(args.sweep, args.at_once)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
