"""Validation inside a run: the learned mask beside dense, ThinK and the masks that need no training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_gen.request import Request
from data_gen.sample import Document
from data_gen.tasks import RULER_NIAH, task
from data_gen.tokens import TokenCounter
from leank_train.backbone import Backbone
from leank_train.channel_scores import MeanScores, lowest_frequencies, random_mask
from leank_train.common.files import write_text
from leank_train.data import collate
from leank_train.forward.branching import branch, prefill
from leank_train.mask import ChannelMask
from leank_train.settings import RunConfig
from leank_train.validation import evaluate as validation
from leank_train.validation.baselines import context_scores


def validate(config: RunConfig, backbone: Backbone, mask: ChannelMask, out: Path, metrics: dict[str, Any]) -> None:
    """Score the mask beside dense, ThinK and the masks that need no training; adds to `metrics`."""
    started, ratio, settings = time.time(), config.pruning.ratio, config.validation
    counter = TokenCounter(backbone.tokenizer)
    methods: dict[str, Any] = {
        "dense": None,
        "leank": mask,
        "think": validation.think(ratio),
        "static_norm": static_norm_mask(backbone, config.data.max_length, settings.calibration, config.seed, ratio),
        "lowest_frequencies": lowest_frequencies(backbone.model.config, ratio),
        "random": random_mask(backbone.shape, ratio, config.seed),
    }
    tasks = list(settings.tasks or RULER_NIAH)
    batches = [
        [
            unseen(backbone, counter, name, length, config.seed + 1_000_003, i)
            for i in range(at, min(at + settings.batch, settings.samples))
        ]
        for name in tasks
        for length in settings.lengths
        for at in range(0, settings.samples, settings.batch)
    ]
    bar = tqdm(total=len(batches), desc="validation", mininterval=0.5 if sys.stderr.isatty() else 10)
    results = validation.evaluate(
        backbone,
        methods,
        batches,
        config.pruning.sink,
        config.pruning.window,
        lambda n: bar.update(1) and None,
        settings.max_new_tokens,
    )
    bar.close()
    scores = validation.table(results)
    differences = {m: validation.paired_difference(results, "leank", m) for m in methods if m != "leank"}
    metrics["validation"] = {
        "recall": scores,
        "exact_match": validation.table(results, "exact"),
        "leank_minus": {m: {"mean": d[0], "low": d[1], "high": d[2]} for m, d in differences.items()},
        "samples": {"per_task_and_length": settings.samples, "lengths": list(settings.lengths)},
    }
    metrics["seconds"]["validation"] = round(time.time() - started, 1)
    text = validation.markdown(scores)
    write_text(
        out / "validation.md", f"# RULER recall (%), {100 * mask.pruning_ratio:.1f}% of K channels pruned\n\n{text}\n"
    )
    print("\n" + text, flush=True)


def unseen(backbone: Backbone, counter: TokenCounter, name: str, length: int, seed: int, index: int) -> Document:
    """A sample sized as RULER sizes it, on text that no training document shows."""
    wanted = Request(name, length, counter, seed, index, exact=False, split="test", reserve=backbone.reserve)
    return task(name).build(wanted)


def calibration(backbone: Backbone, counter: TokenCounter, length: int, seed: int, index: int) -> Document:
    """A multi-key sample (LeanK section 2.2, appendix L), the one that `eval.methods.channels.static_norm` looks at."""
    name = "niah_multikey_3"  # its haystack is made of needles: no text of the evaluation is in it
    wanted = Request(name, length, counter, seed, index, exact=False, split="train", reserve=backbone.reserve)
    return task(name).build(wanted)


def check_lengths(config: RunConfig, backbone: Backbone) -> None:
    """Raise ValueError where a length is too short for its validation task: before training, not after it."""
    if config.validation.samples:
        counter = TokenCounter(backbone.tokenizer)
        calibration(backbone, counter, config.data.max_length, config.seed, 0)
        for name in config.validation.tasks or RULER_NIAH:
            unseen(backbone, counter, name, min(config.validation.lengths), config.seed, 0)


def static_norm_mask(backbone: Backbone, length: int, samples: int, seed: int, ratio: float) -> ChannelMask:
    """LeanK's static norm (`MeanScores`) over calibration samples of at most `length` tokens."""
    found, counter, device = MeanScores(), TokenCounter(backbone.tokenizer), backbone.model.device
    for i in range(samples):
        batch = collate(backbone, [calibration(backbone, counter, length, seed, i)]).to(device)
        prefix = prefill(backbone.model, batch.documents, batch.document_lengths, validation.OBSERVED)
        question = batch.prompts[:, : int(batch.question_lengths[0])]
        asked = branch(backbone.model, prefix, question, batch.question_lengths, validation.OBSERVED)
        found.add(context_scores(prefix, asked, "norms"))
    return ChannelMask(found.mask(ratio), {"method": "static_norm", "ratio": ratio, "samples": samples})
