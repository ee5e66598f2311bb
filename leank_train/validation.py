"""Validation inside a training run: the replay of `leank.eval` on unseen samples.

The learned mask is compared with dense, ThinK and the masks that need no training. All methods get the same samples, so
their differences are paired.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

import pandas as pd

from leank.backbone import Backbone
from leank.data_gen.tasks import RULER_NIAH
from leank.errors import naming
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prompts import overhead
from leank.eval.methods import Method, build_method
from leank.eval.methods.channels.static_norm import StaticNorm
from leank.eval.report.summary import summarise
from leank.eval.rows import Collected
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from leank.files import write_text
from leank.mask import ChannelMask
from leank.precision import GROUP
from leank_train.settings import RunConfig

UNSEEN = 1_000_003  # added to the seed of a run: validation samples have seeds of their own


class Validation(TypedDict):
    """Scores of validation, %."""

    recall: dict[str, dict[str, float]]  # method -> task, or "average" -> score
    leank_minus: dict[str, dict[str, float]]  # method -> points of the learned mask above it (mean, low, high)
    samples: dict[str, int | list[int]]  # how many were scored: "per_task_and_length", and the "lengths"


def validate(config: RunConfig, backbone: Backbone, mask: ChannelMask, out: Path) -> Validation:
    """Score the mask, dense, ThinK and untrained masks on the same unseen samples; write and print validation.md."""
    settings = config.validation
    model = ModelConfig(**asdict(config.model), device=str(backbone.model.device))
    methods = compared(config, mask)
    replay = Settings(batch_size=settings.batch, max_new_tokens=settings.max_new_tokens)
    rows = Collected()
    Job(model, methods, benchmark(config), replay).run(rows, backbone.model, backbone.tokenizer)
    (run,) = summarise(rows.rows)["runs"]
    recall = pd.DataFrame(run["cells"]).pivot_table("score", "method", "task", sort=False)
    recall["average"] = recall.mean(axis=1)
    text = recall.to_markdown(floatfmt=".1f")
    write_text(
        out / "validation.md", f"# RULER recall (%), {100 * mask.pruning_ratio:.1f}% of K channels pruned\n\n{text}\n"
    )
    print(f"\n{text}", flush=True)
    return {
        "recall": recall.to_dict("index"),
        "leank_minus": {
            one["minus"]: {"mean": one["difference"], "low": one["difference_low"], "high": one["difference_high"]}
            for one in run["differences"]
        },
        "samples": {"per_task_and_length": settings.samples, "lengths": list(settings.lengths)},
    }


def benchmark(config: RunConfig) -> Ruler:
    """Return the samples: RULER's, with needles and text that no training document shows."""
    settings, seed = config.validation, config.seed + UNSEEN
    return Ruler(list(settings.tasks or RULER_NIAH), list(settings.lengths), settings.samples, seed, split="test")


def compared(config: RunConfig, mask: ChannelMask) -> list[Method]:
    """Return what is compared at one share of channels, but for dense; a layout of bits with KIVI's 4 and 2 bits."""
    ratio, sizes = mask.metadata.get("ratio"), {"sink": config.pruning.sink, "window": config.pruning.window}
    if mask.precision is not None:
        sizes["flush"], kivi = GROUP, {"name": "kivi", "group": math.gcd(32, mask.keep.shape[-1])}
        axes: dict[str, object] = {"leank": {"channels": {"name": "leank", "mask": mask}}}
        axes |= {f"kivi{bits}": {"bits": {**kivi, "bits": bits}} for bits in (4, 2)}
        return [build_method("dense"), *(build_method(name, of, sizes) for name, of in axes.items())]
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
    with naming("data.max_length, which bounds the validation's calibration"):
        StaticNorm(length=config.data.max_length, seed=config.seed).check(model, tokenizer)
    with naming("validation.tasks or validation.lengths"):
        benchmark(config).check(model, tokenizer, overhead(tokenizer, config.model.chat), settings.max_new_tokens)
