"""The tables and the figure of a sweep, from its members' own metrics.json and the eval rows in their folders.

Columns of settings are whatever differs between members; a cell is the mean over seeds, with the standard deviation
where there are several. Dense stands once: no setting of a mask changes it.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from leank.eval.report.summary import summarise
from leank.eval.rows.results import GLOB, read
from leank.files import name_of, write_bytes, write_text
from leank_train.settings import NOT_IN_HASH, plain

RESULT, OWN, AVERAGE, DENSE = "metrics.json", "validation", "average", "dense"
WHOLE = ("data.tasks",)  # settings that are one value
OF_DENSE = ("model.", "validation.")  # the settings that a dense score depends on, beside the seed
ROWS = {  # what varies -> the paper's tables
    "stage1.lam": "Table 15: lambda",
    "data.tasks": "Table 16: training task",
    "stage2.steps": "Tables 12 and 22: the second stage (0 steps: without it)",
}
EVERYTHING = "Tables 9 and 23: budget and mask; every method and setting"
Varied = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class MemberScore:
    """Score (0-100) of one method on one task under one member's mask. source: validation, or a benchmark's name."""

    settings: Varied
    seed: object
    source: str
    method: str
    task: str
    score: float


def flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings under dotted names; those of WHOLE stay one value."""
    out: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in WHOLE:
            out |= flat(value, f"{name}.")
        else:
            out[name] = " ".join(f"{k}:{v}" for k, v in value.items() if v) if isinstance(value, dict) else value
    return out


def member_scores(folder: Path) -> Iterable[tuple[str, str, str, float]]:
    """(source, method, task, score) of one member: its own validation, then what eval has left in its folder."""
    metrics = json.loads((folder / RESULT).read_text())
    for method, row in metrics.get("validation", {}).get("recall", {}).items():
        yield from ((OWN, method, task, score) for task, score in row.items() if task != AVERAGE)
    for run in sorted({file.parent for file in folder.rglob(GLOB)}):
        for part in summarise(read(run))["runs"]:
            for cell in part["cells"]:
                task = cell["task"] if cell["length"] is None else f"{cell['task']} {cell['length']}"
                yield part["benchmark"], cell["method"], task, cell["score"]


def collect(sweep: Path) -> list[MemberScore]:
    """Every score of every member that is done. Raises ValueError where there is none, or two have equal settings."""
    found, configs = {}, {}
    for folder in sorted(file.parent for file in sweep.rglob(RESULT)):
        config = plain(OmegaConf.load(folder / "config.yaml"))  # type: ignore[arg-type]
        kept = {k: v for k, v in config.items() if k == OWN or k not in NOT_IN_HASH}
        configs[folder], found[folder] = flat(kept), list(member_scores(folder))
    if not any(found.values()):
        raise ValueError(f"{sweep} has no member with scores: see `status`, and validation.samples of its runs")
    names = dict.fromkeys(name for config in configs.values() for name in config)
    varied = [n for n in names if n != "seed" and len({str(c.get(n)) for c in configs.values()}) > 1]
    seen: dict[tuple[str, object], Path] = {}
    scores = []
    for folder, config in configs.items():
        settings = tuple((name, config.get(name)) for name in varied)
        if (first := seen.setdefault((str(settings), config["seed"]), folder)) != folder:
            raise ValueError(f"{first} and {folder} have the same settings and seed; remove one of them")
        scores += [MemberScore(settings, config["seed"], *values) for values in found[folder]]
    return scores


@dataclass(frozen=True)
class Averaged:
    """One method under one setting: (mean, standard deviation) over seeds of each task and of the average over tasks.

    A deviation is None with one seed; a task that some seed lacks has no cell.
    """

    settings: Varied
    method: str
    seeds: int
    cells: dict[str, tuple[float, float | None]]


def rows(scores: Sequence[MemberScore], tasks: Sequence[str]) -> list[Averaged]:
    """Group by method and settings, dense first; tasks count alike in the average."""
    groups: dict[tuple[Varied, str], dict[object, dict[str, float]]] = {}
    for s in scores:
        settings = tuple((n, v if s.method != DENSE or n.startswith(OF_DENSE) else None) for n, v in s.settings)
        groups.setdefault((settings, s.method), {}).setdefault(s.seed, {})[s.task] = s.score
    out = []
    for (settings, method), by_seed in groups.items():
        cells: dict[str, tuple[float, float | None]] = {}
        for task in (*tasks, AVERAGE):
            needed = tasks if task == AVERAGE else [task]
            if all(t in one for t in needed for one in by_seed.values()):
                values = [float(np.mean([one[t] for t in needed])) for one in by_seed.values()]
                cells[task] = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
        out.append(Averaged(settings, method, len(by_seed), cells))
    return sorted(out, key=lambda row: row.method != DENSE)


def markdown(table: Sequence[Averaged], title: str, tasks: Sequence[str]) -> str:
    """Rows as a Markdown table, one column per varied setting and per task."""
    head = ["method", *(name for name, _ in table[0].settings), "seeds", *tasks, AVERAGE]
    lines = []
    for row in table:
        cells = []
        for mean, deviation in (row.cells.get(t, (None, None)) for t in (*tasks, AVERAGE)):
            cells.append("" if mean is None else f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}"))
        values = ["" if value is None else str(value) for _, value in row.settings]
        lines.append([row.method, *values, str(row.seeds), *cells])
    return f"## {title}\n\n{pd.DataFrame(lines, columns=head).to_markdown(index=False, disable_numparse=True)}\n"


def figure4(table: Sequence[Averaged], source: str) -> Figure:
    """Average accuracy against the pruning ratio, one line per method and other setting; bars: deviation over seeds."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.add_subplot()
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in (row for row in table if AVERAGE in row.cells):
        mean, deviation = row.cells[AVERAGE]
        settings = {name: value for name, value in row.settings if value is not None}
        ratio = settings.pop("pruning.ratio", None)
        label = ", ".join([row.method, *(f"{k.rsplit('.', 1)[-1]}={v}" for k, v in settings.items())])
        if row.method == DENSE:
            axis.axhline(mean, color="black", lw=1, ls="--", label=f"{label} {mean:.1f}")
        else:
            assert isinstance(ratio, float | int)
            lines.setdefault(label, []).append((100 * ratio, mean, deviation or 0.0))
    ordered = sorted(lines.items(), key=lambda line: not line[0].startswith("leank"))
    for (label, points), marker in zip(ordered, itertools.cycle("os^vDPX*"), strict=False):
        axis.errorbar(*np.array(sorted(points)).T, marker=marker, capsize=3, lw=1.5, label=label)
    axis.set(xlabel="K channels pruned (%)", ylabel=f"accuracy (%), {source}", ylim=(-3, 103))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def write_report(sweep: Path) -> list[Path]:
    """Write DIR/report; returns its files. One section and figure for each source of scores."""
    scores, out, files, text = collect(sweep), sweep / "report", [], []
    varied = [name for name, _ in scores[0].settings]
    head = [*varied, "seed", "source", "method", "task", "score"]
    table = [[*(v for _, v in s.settings), s.seed, s.source, s.method, s.task, s.score] for s in scores]
    files.append(out / "scores.csv")
    write_text(files[-1], pd.DataFrame(table, columns=head, dtype=object).to_csv(index=False))
    for source in dict.fromkeys(s.source for s in scores):
        own = [s for s in scores if s.source == source]
        tasks = list(dict.fromkeys(s.task for s in own))
        found = rows(own, tasks)
        text.append(f"# {source}: accuracy in %, mean ± standard deviation over seeds\n")
        if "pruning.ratio" in varied:
            picture = io.BytesIO()
            figure4(found, source).savefig(picture, format="png", dpi=130, metadata={"Software": None})
            files.append(out / f"figure4_{name_of(source)}.png")
            write_bytes(files[-1], picture.getvalue())
            text.append(f"## Figure 4: accuracy against pruning ratio\n\n![figure 4]({files[-1].name})\n")
        learned = [row for row in found if row.method in (DENSE, "leank")]
        for name in (n for n in ROWS if n in varied):
            order = [n for n in varied if n != name] + [name]
            ordered = sorted(learned, key=lambda r: [str(dict(r.settings)[n] or "") for n in order])
            text.append(markdown(ordered, ROWS[name], tasks))
        text.append(markdown(found, EVERYTHING, tasks))
    files.append(out / "report.md")
    write_text(files[-1], "\n".join(text))
    return files
