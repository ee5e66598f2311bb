"""Validation inside a training run: the replay of `leank.eval` on unseen samples.

The learned mask is compared with dense, ThinK and the masks that need no training. All methods get the same samples, so
their differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

import pandas as pd

from leank import stats
from leank.backbone import Backbone
from leank.data_gen.tasks import RULER_NIAH
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prompts import overhead
from leank.eval.methods import Method, build_method
from leank.eval.methods.channels.static_norm import StaticNorm
from leank.eval.rows.results import Collected
from leank.eval.run.job import Job
from leank.eval.run.settings import Settings
from leank.files import write_text
from leank.mask import ChannelMask
from leank_train.settings import RunConfig

UNSEEN = 1_000_003  # added to the seed of a run: validation samples have seeds of their own
STRATUM = ["task", "length"]


class Validation(TypedDict):
    """Scores of validation, %.

    recall, exact_match: method -> task, or "average" -> score.
    leank_minus: method -> the points by which the learned mask is above it (mean), and its interval (low, high).
    samples: how many were scored: "per_task_and_length", and the "lengths".
    """

    recall: dict[str, dict[str, float]]
    exact_match: dict[str, dict[str, float]]
    leank_minus: dict[str, dict[str, float]]
    samples: dict[str, int | list[int]]


def validate(config: RunConfig, backbone: Backbone, mask: ChannelMask, out: Path) -> Validation:
    """Score the mask, dense, ThinK and the masks that need no training on the same unseen samples.

    Writes `validation.md` into the folder `out`, and prints its table.
    """
    settings = config.validation
    model = ModelConfig(**asdict(config.model), device=str(backbone.model.device))
    methods = compared(config, mask)
    replay = Settings(batch_size=settings.batch, max_new_tokens=settings.max_new_tokens)
    rows = Collected()
    Job(model, methods, benchmark(config), replay).run(rows, backbone.model, backbone.tokenizer)
    scores = pd.DataFrame(rows.rows)[["method", *STRATUM, "sample", "score"]]
    recall = table(scores)
    found: Validation = {
        "recall": recall,
        "exact_match": table(scores.assign(score=(scores["score"] == 1.0).astype(float))),
        "leank_minus": {one.label: above(scores, one.label) for one in methods if one.label != "leank"},
        "samples": {"per_task_and_length": settings.samples, "lengths": list(settings.lengths)},
    }
    text = markdown(recall)
    write_text(
        out / "validation.md", f"# RULER recall (%), {100 * mask.pruning_ratio:.1f}% of K channels pruned\n\n{text}\n"
    )
    print("\n" + text, flush=True)
    return found


def benchmark(config: RunConfig) -> Ruler:
    """Return the samples: RULER's, with needles and text that no training document shows."""
    settings, seed = config.validation, config.seed + UNSEEN
    return Ruler(list(settings.tasks or RULER_NIAH), list(settings.lengths), settings.samples, seed, split="test")


def compared(config: RunConfig, mask: ChannelMask) -> list[Method]:
    """Return what is compared; all prune the same share of channels, but for dense."""
    ratio, sizes = config.pruning.ratio, {"sink": config.pruning.sink, "window": config.pruning.window}
    calibrated = {"samples": config.validation.calibration, "length": config.data.max_length, "seed": config.seed}
    rules: dict[str, dict[str, object]] = {
        "leank": {"mask": mask},
        "think": {"ratio": ratio},
        "static_norm": {"ratio": ratio, **calibrated},
        "lowest_frequencies": {"ratio": ratio},
        "random": {"ratio": ratio, "seed": config.seed},
    }
    pruning = [build_method(name, {"channels": {"name": name, **given}}, sizes) for name, given in rules.items()]
    return [build_method("dense"), *pruning]


def check_samples_fit(config: RunConfig, backbone: Backbone) -> None:
    """Raise ValueError, before training, if a length is too short for its validation task."""
    settings, tokenizer = config.validation, backbone.tokenizer
    if not settings.samples:
        return
    model = backbone.model.config.get_text_config(decoder=True)
    try:
        StaticNorm(length=config.data.max_length, seed=config.seed).check(model, tokenizer)
    except ValueError as error:
        raise ValueError(f"data.max_length, which bounds the validation's calibration: {error}") from error
    try:
        benchmark(config).check(model, tokenizer, overhead(tokenizer, config.model.chat), settings.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"validation.tasks or validation.lengths: {error}") from error


def table(scores: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return method -> task -> mean score in per cent, and the mean over tasks under "average".

    scores: a line for each sample and method: method, task, length, sample, score (0 to 1).
    """
    wide = 100 * scores.pivot_table("score", "method", "task", sort=False)
    wide["average"] = wide.mean(axis=1)
    return {str(name): {str(task): float(x) for task, x in row.items()} for name, row in wide.iterrows()}


def above(scores: pd.DataFrame, other: str) -> dict[str, float]:
    """Return by how many points the learned mask is above another method on the samples that both have.

    scores: see `table`.

    Returns the mean over tasks and lengths, which count alike, and the ends (low, high) of its 95% interval.
    """
    pairs = scores.pivot_table("score", [*STRATUM, "sample"], "method", sort=False)
    apart = (100 * (pairs["leank"] - pairs[other])).dropna()
    strata = [of_stratum.to_numpy() for _, of_stratum in apart.groupby(level=STRATUM, sort=False)]
    low, high = stats.interval(strata)
    return {"mean": stats.mean(strata), "low": low, "high": high}


def markdown(scores: dict[str, dict[str, float]]) -> str:
    """Return the result of `table` in Markdown: one row per method, one column per task."""
    tasks: Sequence[str] = list(next(iter(scores.values())))
    lines = [[name, *(f"{row[task]:.1f}" for task in tasks)] for name, row in scores.items()]
    return str(pd.DataFrame(lines, columns=["method", *tasks]).to_markdown(index=False, disable_numparse=True))
