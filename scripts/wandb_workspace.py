"""Save a dashboard of training and evaluation runs as a workspace on Weights & Biases.

python -m scripts.wandb_workspace ENTITY/PROJECT       # pip install -e '.[dashboard]'
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import wandb_workspaces.workspaces as workspaces

# section -> panels (kind, title, keys); docs/train/dashboards.md lists the keys, a test holds them to what is logged
PANELS: dict[str, list[tuple[str, str, list[str]]]] = {
    "Training": [
        ("line", "Distillation, stage 1", ["stage1/distillation"]),
        ("line", "Distillation, stage 2", ["stage2/distillation"]),
        ("line", "lambda * L1", ["stage1/penalty"]),
        ("line", "Mean score", ["stage1/alpha_mean", "stage2/alpha_mean"]),
        ("ratio", "Recall of the learned mask against ratio", ["recall/leank"]),
        ("media", "Kept channels per head", ["plots/channels_per_head"]),
        ("media", "Kept channels per RoPE pair", ["plots/kept_per_frequency"]),
    ],
    "Evaluation": [
        ("bar", "Score", ["score/dense", "score/leank"]),
        ("bar", "Points from dense", ["difference/leank"]),
        ("bar", "Share of the dense cache", ["cache_share/leank"]),
        ("media", "Accuracy against share of the dense cache", ["plots/accuracy_by_axes"]),
        ("media", "Accuracy by length", ["plots/accuracy_by_length"]),
    ],
}


def workspace(project: str) -> workspaces.Workspace:
    """PANELS as a W&B workspace of "ENTITY/PROJECT", not yet saved; runs are grouped by sweep."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise SystemExit(f"{project!r} is no ENTITY/PROJECT, such as my-team/leank")
    make: dict[
        str, Callable[[str, list[str]], reports.LinePlot | reports.BarPlot | reports.ScatterPlot | reports.MediaBrowser]
    ] = {
        "line": lambda title, keys: reports.LinePlot(title=title, x="Step", y=[*keys]),
        "bar": lambda title, keys: reports.BarPlot(title=title, metrics=[*keys]),
        "ratio": lambda title, keys: reports.ScatterPlot(
            title=title, x=reports.Config("pruning.ratio"), y=reports.SummaryMetric(keys[0])
        ),
        "media": lambda title, keys: reports.MediaBrowser(title=title, media_keys=keys),
    }
    sections = [
        workspaces.Section(name=section, is_open=True, panels=[make[kind](title, keys) for kind, title, keys in panels])
        for section, panels in PANELS.items()
    ]
    groups = workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")])
    return workspaces.Workspace(entity=entity, project=name, name="LeanK", sections=sections, runset_settings=groups)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    import wandb

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    made = workspace(parser.parse_args(arguments).project)
    try:
        print(made.save().url)
    except (wandb.Error, ConnectionError) as error:  # such as a missing login
        raise SystemExit(f"{made.entity}/{made.project} was not saved: {error}") from error


if __name__ == "__main__":
    main()
