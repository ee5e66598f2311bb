"""Validation inside a run: the learned mask against dense, ThinK and the masks that need no training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from leank.backbone import Backbone
from leank.channel_scores import MeanScores, lowest_frequencies, random_mask
from leank.data_gen.request import Request
from leank.data_gen.sample import Document
from leank.data_gen.tasks import RULER_NIAH, task
from leank.data_gen.tokens import counter_of
from leank.files import write_text
from leank.mask import ChannelMask
from leank_train.data import collate
from leank_train.forward.branching import branch, prefill
from leank_train.running.metrics import Metrics
from leank_train.running.progress import Meter
from leank_train.settings import RunConfig
from leank_train.validation import evaluate as validation
from leank_train.validation.baselines import context_scores
from leank_train.validation.evaluate import PerSample

UNSEEN = 1_000_003  # added to the seed of a run: validation samples have seeds of their own


def validate(config: RunConfig, backbone: Backbone, mask: ChannelMask, out: Path, metrics: Metrics) -> None:
    """Score the mask, dense, ThinK and the masks that need no training on the same unseen samples.

    Writes `validation.md` into the folder `out`, prints its table, and adds "validation" and its seconds to `metrics`.
    """
    started, settings = time.monotonic(), config.validation
    meter = Meter("validation: decodes unseen samples under every mask", _samples(config), "sample")
    methods = _methods(config, backbone, mask)
    results = validation.evaluate(
        backbone,
        methods,
        _batches(config, backbone),
        config.pruning.sink,
        config.pruning.window,
        meter.advance,
        settings.max_new_tokens,
    )
    meter.close()
    scores = validation.table(results)
    differences = {m: validation.paired_difference(results, "leank", m) for m in methods if m != "leank"}
    metrics["validation"] = {
        "recall": scores,
        "exact_match": validation.table(results, "exact"),
        "leank_minus": {m: {"mean": d[0], "low": d[1], "high": d[2]} for m, d in differences.items()},
        "samples": {"per_task_and_length": settings.samples, "lengths": list(settings.lengths)},
    }
    metrics["seconds"]["validation"] = round(time.monotonic() - started, 1)
    text = validation.markdown(scores)
    write_text(
        out / "validation.md", f"# RULER recall (%), {100 * mask.pruning_ratio:.1f}% of K channels pruned\n\n{text}\n"
    )
    print("\n" + text, flush=True)


def _methods(config: RunConfig, backbone: Backbone, mask: ChannelMask) -> dict[str, ChannelMask | PerSample | None]:
    """What is compared, by name; all prune the same share of channels, but for dense."""
    ratio, samples = config.pruning.ratio, config.validation.calibration
    return {
        "dense": None,
        "leank": mask,
        "think": validation.think(ratio),
        "static_norm": static_norm_mask(backbone, config.data.max_length, samples, config.seed, ratio),
        "lowest_frequencies": lowest_frequencies(backbone.model.config, ratio),
        "random": random_mask(backbone.shape, ratio, config.seed),
    }


def _tasks(config: RunConfig) -> Sequence[str]:
    return config.validation.tasks or list(RULER_NIAH)


def _samples(config: RunConfig) -> int:
    """Number of samples under each method."""
    return len(_tasks(config)) * len(config.validation.lengths) * config.validation.samples


def _batches(config: RunConfig, backbone: Backbone) -> Iterator[list[Document]]:
    """The samples of all tasks and lengths; a batch holds samples of one task and length."""
    settings = config.validation
    for name in _tasks(config):
        for length in settings.lengths:
            for first in range(0, settings.samples, settings.batch):
                numbers = range(first, min(first + settings.batch, settings.samples))
                yield [unseen(backbone, name, length, config.seed + UNSEEN, i) for i in numbers]


def unseen(backbone: Backbone, name: str, length: int, seed: int, index: int) -> Document:
    """A test sample of RULER's size at `length` tokens, on text that no training document shows."""
    counter = counter_of(backbone.tokenizer)
    wanted = Request(name, length, counter, seed, index, exact=False, split="test", reserve=backbone.reserve)
    return task(name).build(wanted)


def calibration(backbone: Backbone, length: int, seed: int, index: int) -> Document:
    """A multi-key sample (LeanK section 2.2, appendix L), as observed by `eval.methods.channels.static_norm`."""
    name = "niah_multikey_3"  # its haystack is made of needles, so it shows no text of the evaluation
    counter = counter_of(backbone.tokenizer)
    wanted = Request(name, length, counter, seed, index, exact=False, split="train", reserve=backbone.reserve)
    return task(name).build(wanted)


def check_samples_fit(config: RunConfig, backbone: Backbone) -> None:
    """Raise ValueError, before training, if a length is too short for its validation task."""
    if config.validation.samples:
        try:
            calibration(backbone, config.data.max_length, config.seed, 0)
        except ValueError as error:
            raise ValueError(f"data.max_length, which bounds the validation's calibration: {error}") from error
        for name in _tasks(config):
            try:
                unseen(backbone, name, min(config.validation.lengths), config.seed, 0)
            except ValueError as error:
                raise ValueError(f"validation.lengths: {error}") from error


def static_norm_mask(backbone: Backbone, length: int, samples: int, seed: int, ratio: float) -> ChannelMask:
    """The mask of LeanK's static norm (`MeanScores`), from calibration samples of at most `length` tokens."""
    found, device = MeanScores(), backbone.model.device
    for i in range(samples):
        batch = collate(backbone, [calibration(backbone, length, seed, i)]).to(device)
        prefix = prefill(backbone.model, batch.documents.ids, batch.documents.lengths, validation.OBSERVED)
        question = batch.prompts.ids[:, : int(batch.question_lengths[0])]
        asked = branch(backbone.model, prefix, question, batch.question_lengths, validation.OBSERVED)
        found.add(context_scores(prefix, asked, "norms"))
    return ChannelMask(found.mask(ratio), {"method": "static_norm", "ratio": ratio, "samples": samples})
