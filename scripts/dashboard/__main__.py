"""Training and evaluation runs at a glance: one page from their folders, or a saved workspace on Weights & Biases.

python -m scripts.dashboard outputs                        one file, outputs/dashboard.html; needs no server
python -m scripts.dashboard outputs/sweeps/a outputs/eval --out page.html
python -m scripts.dashboard --wandb ENTITY/PROJECT         pip install -e '.[dashboard]'
"""

from __future__ import annotations

import argparse
import html
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from leank.cli import again, ending
from leank.eval.report.page import Section, page, title, to_figure, to_table
from leank.eval.report.plots import draw
from leank.eval.report.style import PALETTE, SETTINGS, plain, sheet, svg
from leank.eval.report.summary import Run
from leank.eval.report.tables import Table, number, overall
from leank.files import write_text
from scripts.dashboard.runs import FinishedRun, Points, evaluation_points, evaluations, training_points, trainings
from scripts.dashboard.wandb_workspace import saved, workspace

MAPS = 12  # masks drawn
FIGURES = 24  # evaluations with a figure; it takes a third of a second, and every one has its own report
NAMES = 40  # runs that a legend names


def training_table(runs: Sequence[FinishedRun]) -> Table:
    """One line per run: model, pruning ratio, what came of it."""
    methods = list(dict.fromkeys(method for run in runs for method in run.recall))
    head = ["run", "model", "ratio", "pruned", "empty heads", "alpha", "seconds", *(f"recall, {m}" for m in methods)]
    lines: list[list[str]] = []
    shades: dict[tuple[int, int], float | None] = {}
    for run in runs:
        found, base = run.metrics, run.recall.get("dense")
        seconds = number(found["seconds"]["training"])
        cells = [run.name, Path(run.config.model.name).name, f"{run.config.pruning.ratio:g}",
                 f"{100 * found['pruning_ratio']:.1f}%", f"{found['empty_heads']} of {found['heads']}",
                 number(found["alpha_mean"], 3), seconds]  # fmt: skip
        recall = [run.recall.get(method) for method in methods]
        shade = [None if base is None or r is None else r - base for r in recall]
        shades |= {(len(lines), at): points for at, points in enumerate(shade, len(cells))}
        lines.append([*cells, *(number(r) for r in recall)])
    note = (
        "Seconds: of training alone. Recall: the run's own validation, as deployed; for figures see its metrics.json."
    )
    return Table.of("Masks", head, lines, note, shades)


def curves(runs: Sequence[FinishedRun]) -> Figure:
    """Distillation loss of both stages and the mean score over steps, one line per run."""
    drawn = sheet(3.4, 10)
    panels = drawn.subplots(1, 3)
    wanted = [("stage1", "distillation", "Distillation loss, stage 1"),
              ("stage2", "distillation", "Distillation loss, stage 2"),
              ("stage1", "alpha_mean", "Mean score (alpha), stage 1")]  # fmt: skip
    for panel, (stage, key, caption) in zip(panels, wanted, strict=True):
        for place, run in enumerate(runs):
            steps = run.steps[stage]
            colour = PALETTE[place % len(PALETTE)]
            label = run.name if panel is panels[0] and place < NAMES else None
            panel.plot([s["step"] for s in steps], [s[key] for s in steps], color=colour, linewidth=1.2, label=label)
        plain(panel).set(title=caption, xlabel="step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        losses = [s[key] for run in runs for s in run.steps[stage]]
        if key == "distillation" and losses:
            set_loss_axis(panel, losses)
    drawn.legend(loc="outside upper left", ncols=4)
    return drawn


def set_loss_axis(panel: Axes, losses: Sequence[float]) -> None:
    """Fit the axis to the losses: logarithmic from a factor of ten on, else from zero.

    The first step, with all of alpha at 1, has next to no loss. It would stretch a logarithmic axis over many decades,
    so what lies below 1e-4 of the largest loss is cut off.
    """
    high = max(losses)
    low = min((loss for loss in losses if loss > 1e-4 * high), default=high)
    if low < high / 10:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(LogFormatter())  # the usual one writes mathematics
        panel.set_ylim(low / 1.5, 1.5 * high)
    else:
        panel.set_ylim(0, 1.1 * high or 1)


def masks(runs: Sequence[FinishedRun]) -> Figure:
    """Kept channels of every KV head, one map per run."""
    shown, most = runs[:MAPS], max(run.mask.keep.shape[2] for run in runs[:MAPS])
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    drawn = sheet(0.4 + 2.2 * lines, 10)
    panels = drawn.subplots(lines, columns, squeeze=False)
    for panel, run in zip(panels.flat, shown, strict=False):
        image = panel.pcolormesh(run.mask.channels_per_head.numpy(), vmin=0, vmax=most, cmap="Blues")
        panel.set(title=run.name, xlabel="KV head", ylabel="layer")
        panel.invert_yaxis()
        for axis, count in ((panel.xaxis, run.mask.keep.shape[1]), (panel.yaxis, run.mask.keep.shape[0])):
            every = -(-count // 8)
            axis.set_ticks(np.arange(count)[::every] + 0.5, [str(n) for n in range(count)[::every]])
    for panel in panels.flat[len(shown) :]:
        panel.set_axis_off()
    drawn.colorbar(image, ax=panels, label="channels", ticks=MaxNLocator(6, integer=True))
    return drawn


def against_ratio(points: Points) -> Figure | None:
    """Accuracy against pruning ratio, as LeanK's figure 4: means, with bars from the least to the best score."""
    ratios = {ratio for method, found in points.items() if method != "dense" for ratio in found}
    if len(ratios) < 2:
        return None
    drawn = sheet(4)
    axes = plain(drawn.add_subplot())
    colours = iter(PALETTE * len(points))
    for method, found in points.items():
        if method == "dense":
            mean = float(np.mean([score for scores in found.values() for score in scores]))
            axes.axhline(mean, color=SETTINGS["text.color"], linewidth=1, linestyle="--", label=method)
            continue
        x = sorted(found)
        middle = np.array([np.mean(found[ratio]) for ratio in x])
        ends = np.array([[min(found[ratio]), max(found[ratio])] for ratio in x]).T
        bars = np.abs(ends - middle)
        axes.errorbar(100 * np.array(x), middle, bars, label=method, color=next(colours), marker="o", markersize=4,
                      capsize=2, elinewidth=0.8, linewidth=1.2)  # fmt: skip
    axes.set(xlabel="K channels pruned, %", ylabel="score", ylim=(-3, 103))
    drawn.legend(loc="outside upper left", ncols=4)
    return drawn


class Page:
    """The parts of a page, in order; figures have ids of their own."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.figures = 0  # of evaluations

    def add(self, caption: str, drawn: Figure | None) -> None:
        """Append a figure, if there is one."""
        if drawn is not None:
            self.parts.append(to_figure(caption, svg(drawn, f"figure-{len(self.parts)}")))

    def add_trainings(self, runs: Sequence[FinishedRun]) -> None:
        """Append the table of masks, recall against ratio, losses and maps."""
        self.parts.append(to_table(training_table(runs)))
        self.add("Validation recall against pruning ratio; bars: from the least to the best of a ratio's runs",
                 against_ratio(training_points(runs)))  # fmt: skip
        named = f" (the legend names the first {NAMES} of {len(runs)} runs)" if len(runs) > NAMES else ""
        self.add(f"Losses and mean score{named}", curves(runs))
        more = f" (the first {MAPS} of {len(runs)} runs)" if len(runs) > MAPS else ""
        self.add(f"Kept channels of every KV head{more}", masks(runs))

    def add_ratios(self, summaries: Iterable[dict[str, Any]]) -> None:
        """Append accuracy against pruning ratio, one figure per benchmark, model and compression of the prompt."""
        together: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
        for summary in summaries:
            for run in summary["runs"]:
                together[run["benchmark"], run["model"], run["compress"]].append(run)
        for runs in together.values():
            self.add(f"Accuracy against pruning ratio: {title(runs[0])}", against_ratio(evaluation_points(runs)))

    def add_evaluation(self, folder: Path, summary: dict[str, Any], out: Path) -> None:
        """Append every run of one evaluation, with a link to its report if that lies below the page."""
        report = (folder / "report.html").resolve()
        for run in summary["runs"]:
            self.parts.append(f"<h1>{html.escape(title(run))}</h1><p>{html.escape(str(folder))}</p>")
            if report.is_file() and report.is_relative_to(out.resolve().parent):
                where = html.escape(quote(report.relative_to(out.resolve().parent).as_posix()))
                self.parts.append(f'<p><a href="{where}">whole report</a></p>')
            self.parts.append(to_table(overall(run)))
            if self.figures < FIGURES:
                self.figures += 1
                self.add("Accuracy against share of the dense cache", draw("accuracy_by_axes", run))


def to_page(roots: Sequence[Path], out: Path) -> str:
    """The page of everything below the folders, to be written to `out`. Raises ValueError if there is no run."""
    learned, replayed = trainings(roots), evaluations(roots)
    if not learned and not replayed:
        names = ", ".join(map(str, roots))
        raise ValueError(
            f"no run in {names}: neither mask.safetensors with metrics.json nor results.jsonl; give others"
        )
    parts = Page()
    with matplotlib.rc_context(SETTINGS):
        if learned:
            parts.add_trainings(learned)
        parts.add_ratios(summary for _, summary in replayed)
        for folder, summary in replayed:
            parts.add_evaluation(folder, summary, out)
    return page("Runs", [Section("Runs", body="".join(parts.parts))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders to look through, with all below them")
    parser.add_argument("--out", type=Path, help="the page; default: dashboard.html in the first folder")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="save a workspace there instead")
    given = parser.parse_args(arguments)
    with ending("dashboard", lambda: f"the runs are as they were; again: {again('scripts.dashboard')}"):
        if given.wandb is not None:
            try:
                print(saved(workspace(given.wandb)))
            except ModuleNotFoundError as error:
                sys.exit(f"dashboard: {error}; pip install -e '.[dashboard]'")
            return
        missing = [str(folder) for folder in given.folders if not folder.is_dir()]
        if missing or not given.folders:
            raise ValueError(f"no folder {', '.join(missing) or 'given'}; give those of runs, such as outputs")
        out = given.out or given.folders[0] / "dashboard.html"
        write_text(out, to_page(given.folders, out))
        print(out)


if __name__ == "__main__":
    main()
