"""What training and evaluation runs have left in their folders."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from leank.eval.report.groups import group
from leank.eval.report.summary import Run, summarise_groups
from leank.eval.rows.results import GLOB, read
from leank.mask import ChannelMask
from leank.tensor_files import read_checkpoint
from leank_train.running.metrics import Metrics
from leank_train.settings import plain

STAGES = ("stage1", "stage2")


@dataclass
class FinishedRun:
    """A finished training run, read from its folder."""

    name: str
    config: DictConfig
    metrics: Metrics
    mask: ChannelMask
    steps: dict[str, list[dict[str, float]]]  # of each stage

    @property
    def recall(self) -> dict[str, float]:
        """Validation's average of each method, %."""
        validation = self.metrics.get("validation")
        return {method: row["average"] for method, row in validation["recall"].items()} if validation else {}


def trainings(roots: Sequence[Path]) -> list[FinishedRun]:
    """Every finished training run below the folders, by name."""
    found = {}
    for root in roots:
        for file in sorted(root.rglob("metrics.json")):
            folder = file.parent
            if not (folder / "mask.safetensors").is_file() or not (folder / "config.yaml").is_file():
                continue
            written = OmegaConf.load(folder / "config.yaml")
            assert isinstance(written, DictConfig)
            config = OmegaConf.create(plain(written))
            name = folder.name if folder == root else str(folder.relative_to(root))
            mask = ChannelMask.load(folder / "mask.safetensors")
            steps = {stage: _steps(folder / "checkpoints" / stage / "done.ckpt") for stage in STAGES}
            found[folder.resolve()] = FinishedRun(name, config, json.loads(file.read_text()), mask, steps)
    return sorted(found.values(), key=lambda run: run.name)


def _steps(checkpoint: Path) -> list[dict[str, float]]:
    if not checkpoint.is_file():
        return []
    return read_checkpoint(checkpoint, "run its training again")["record"]["steps"]


def evaluations(roots: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """(folder, summary) of every run of python -m eval below the folders that has rows; of all its cells together."""
    folders = dict.fromkeys(file.parent for root in roots for file in sorted(root.rglob(GLOB)))
    found = ((folder, list(read(folder))) for folder in folders)
    return [(folder, summarise_groups(group(rows))) for folder, rows in found if rows]


Points = dict[str, dict[float, list[float]]]  # method -> pruning ratio -> scores


def training_points(runs: Sequence[FinishedRun]) -> Points:
    """Validation recall by the configured pruning ratio; seeds and other settings of one ratio stand together."""
    points: Points = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for method, score in run.recall.items():
            points[method][float(run.config.pruning.ratio)].append(score)
    return points


def evaluation_points(runs: Iterable[Run]) -> Points:
    """Scores by the pruning ratio of methods that choose channels alone; the dense score at 0."""
    points: Points = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for cell in run["overall"]:
            config = run["methods"][cell["method"]]
            choices = {axis: choice for axis, choice in config.items() if isinstance(choice, dict)}
            if not choices:
                points["dense"][0.0].append(cell["score"])
            elif list(choices) == ["channels"]:
                channels = choices["channels"]
                ratio = channels.get("pruning_ratio", channels.get("ratio"))
                if ratio is not None:
                    points[channels["name"]][round(float(ratio), 3)].append(cell["score"])
    return points
