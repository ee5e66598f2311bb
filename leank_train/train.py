"""A training run, from a Hydra config to a filled run directory: stage 1, stage 2, masks, validation, plots."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig
from torch import Tensor

from leank import backbone as backbones
from leank.allocation import channel_scores
from leank.backbone import Backbone
from leank.data_gen import haystack
from leank.data_gen.tokens import TokenCounter
from leank.errors import naming
from leank.files import write_json
from leank.mask import ChannelMask, check_ratio
from leank.precision import VALUE_BITS
from leank.rotary import rotary_pairs
from leank.tensor_files import write_tensors
from leank.wandb_log import log_results, make_logger
from leank_train.data import collate
from leank_train.fitting import best_look, calibrate, fit, memory_advice
from leank_train.layouts import LayoutStage, Losses, MaskStage, closed_form, key_bases, layouts
from leank_train.objective.steering import AUTO, Separation
from leank_train.replies import with_replies
from leank_train.run_folder import Run, claimed
from leank_train.running import parallel, plots
from leank_train.running.preempt import Signals
from leank_train.running.recorder import Recorder
from leank_train.settings import RunConfig, check, plain
from leank_train.stages import Stage1, Stage2
from leank_train.validation import Validation, check_samples_fit, validate
from leank_train.verdict import CLOSED_FORM, EQUAL, MASK, STAGE1, TEXT, equal, judge, mixtures

log = logging.getLogger("leank_train")


class Metrics(TypedDict, total=False):
    """The results of a training run; a run without validation has no "validation"."""

    pruning_ratio: float  # share of K channels that the mask prunes
    bytes: float  # share of dense's bytes that the middle of a layout of bits takes
    empty_heads: int  # empty_heads, heads: KV heads without kept channels, and all KV heads
    heads: int
    alpha_mean: float
    separation: dict[str, float]  # how far stage 1 has driven the scores apart (`Separation`); {} without a step
    distillation: dict[str, float]  # stage -> distillation loss of its last step
    heldout: dict[str, dict[str, float]]  # stage -> "step" and "loss" of its best look, and where it "ended"
    verdict: dict[str, object]  # KL to dense of the mask and of its rivals, and doubts (`verdict`)
    seconds: dict[str, float]  # phase -> seconds
    config: str  # fingerprint of the settings
    validation: Validation


def run(given: DictConfig, out: Path, signals: Signals | None = None) -> Metrics:
    """Train a mask into the folder `out`, or go on with what is there.

    signals: ends the run with a checkpoint (SystemExit) at the first step after a signal; None listens to none.
    Returns the metrics of metrics.json in the first process, and an empty dictionary in every other.
    Raises BadConfig for settings that cannot work, BlockingIOError if another run is writing into `out`.
    """
    resolved = plain(given)
    config = check(resolved)
    with claimed(config, resolved, out) as current:
        return train(current, signals or Signals())


def train(current: Run, signals: Signals) -> Metrics:
    """Run all phases of a claimed run; see `run`."""
    started, config = time.monotonic(), current.config
    if current.alone:
        signals.leave_at_once()  # until the first step
    torch.set_float32_matmul_precision("high")
    L.seed_everything(config.seed, workers=True, verbose=False)

    # 1. the model, and all that can be wrong with it and the data
    if config.data.prompts is None:  # before weights are loaded
        check_inputs(config, backbones.outline(config.model.name, config.model.chat, dict(config.model.overrides)))
    backbone = load_backbone(config)
    if config.data.prompts is not None:  # of which documents are made with the model's replies
        current = with_replies(current, backbone)
        config = current.config
        check_inputs(config, backbone)
    with parallel.met(config.trainer):
        return learn(current, backbone, signals, started)


def learn(current: Run, backbone: Backbone, signals: Signals, started: float) -> Metrics:
    """Run all phases after the checks, in every process; see `run`."""
    config, out = current.config, current.out
    if config.trainer.shard_weights:
        parallel.shard(backbone.model, parallel.device(config.trainer))
    logger = make_logger(config.logger, out)
    if logger:
        logger.log_hyperparams(current.resolved)

    # 2. the two stages, or without their steps the closed form
    with memory_advice("in the means", "data.max_length"):
        means = calibrate(config, backbone, signals) if config.pruning.compensation == "mean" else None
    if config.pruning.bytes is not None:
        return train_layouts(current, backbone, means, logger, signals, started)
    closed = scores = closed_scores = None
    if config.pruning.learns == "factors" or not config.stage1.steps + config.stage2.steps:
        with memory_advice("in the closed form", "data.max_length"):
            closed = closed_form(config, backbone, means, current, signals)
        scores = channel_scores(closed.keys[..., 0], closed.empty, config.pruning.align)
    stage1: Stage1 | MaskStage
    if closed is not None and config.stage1.steps:
        stage1 = MaskStage(backbone, config.stage1, config.pruning, closed, parallel=config.trainer, mean_keys=means)
        record1 = fit(current, stage1, "stage1", logger, signals)
        closed_scores, scores = scores, stage1.channel_scores()
    else:
        stage1 = Stage1(backbone, config.stage1, config.pruning, scores, config.trainer, means)
        record1 = fit(current, stage1, "stage1", logger, signals)
        scores = stage1.alpha
    stage2 = Stage2(backbone, config.stage2, config.pruning, scores, config.trainer, means)
    record2 = fit(current, stage2, "stage2", logger, signals)
    if current.alone:
        signals.leave_at_once()

    # 3. the masks
    scores1, alpha = (found.detach().float().cpu().contiguous() for found in (scores, stage2.alpha))
    masks = save_masks(current, backbone, scores1, alpha, means, closed_scores)
    metrics = measured(current, masks[MASK], scores1, alpha, {"stage1": record1, "stage2": record2})

    # 4. the verdict, validation and plots
    return finish(current, backbone, masks, metrics, (record1, record2), alpha, logger, signals, started)


def train_layouts(
    current: Run, backbone: Backbone, means: Tensor | None, logger: Logger | None, signals: Signals, started: float
) -> Metrics:
    """Learn a layout of bits for each budget, or with stage1.steps=0 take the closed form's; see `run`."""
    config, out = current.config, current.out
    with memory_advice("in the closed form", "data.max_length"):
        basis = key_bases(current, backbone, means, signals) if config.pruning.basis == "heads" else None
        closed = closed_form(config, backbone, means, current, signals, basis)
    stage = LayoutStage(
        backbone, config.stage1, config.pruning, closed, basis, parallel=config.trainer, mean_keys=means
    )
    record = fit(current, stage, "stage1", logger, signals)
    if current.alone:
        signals.leave_at_once()
    learned = config.stage1.steps > 0
    path = stage.path.detach().cpu().contiguous()
    if current.first:
        write_tensors(out / "alpha.safetensors", {"path": path})
    masks = save_layouts(current, backbone, stage.losses() if learned else closed, closed, means, basis)
    mask = masks[MASK]
    metrics: Metrics = {
        **counted(mask), "bytes": mask.middle_bytes,
        "distillation": {"stage1": record.steps[-1]["distillation"]} if record.steps else {},
        "separation": {}, "seconds": {"training": round(record.seconds, 1)}, "config": current.fingerprint,
    }  # fmt: skip
    alpha = path[..., :-2].repeat_interleave(config.pruning.align, -1)
    return finish(current, backbone, masks, metrics, (record, Recorder(1)), alpha, logger, signals, started)


def finish(
    current: Run, backbone: Backbone, masks: dict[str, ChannelMask], metrics: Metrics,
    records: tuple[Recorder, Recorder], alpha: Tensor, logger: Logger | None, signals: Signals, started: float,
) -> Metrics:  # fmt: skip
    """Pronounce the verdict, validate, draw and write the metrics; alpha: scores [L, H, D] for the plots.

    All processes share the verdict; the first one alone does the rest, and the others return nothing.
    """
    config, out, mask = current.config, current.out, masks[MASK]
    with memory_advice("in the verdict; the mask is saved", f"validation.heldout={config.validation.heldout}"):
        pronounce(current, backbone, masks, metrics, signals)
    if not current.first:
        return {}
    signals.leave_at_once()
    if config.validation.samples:
        lengths = f"validation.batch={config.validation.batch}, validation.lengths={list(config.validation.lengths)}"
        with memory_advice("in validation; the mask is saved", lengths):
            begun = time.monotonic()
            metrics["validation"] = validate(config, backbone, mask, out)
            metrics["seconds"]["validation"] = round(time.monotonic() - begun, 1)
    figures = plots.training_plots(*records, alpha, mask, rotary_pairs(backbone.model.config), out / "plots")
    metrics["seconds"]["all"] = round(time.monotonic() - started, 1)
    write_json(out / "metrics.json", metrics)
    log_results(logger, metrics, figures, config.model.name, current.resolved, mask, out)
    return metrics


def load_backbone(config: RunConfig) -> Backbone:
    """Load the frozen model: on the CPU if the ranks share its weights, which `parallel.shard` hands out."""
    own = parallel.device(config.trainer)
    dtype = str(backbones.torch_dtype(config.model.dtype, own)).removeprefix("torch.")
    device = torch.device("cpu") if config.trainer.shard_weights else own
    with memory_advice("while loading the model", f"the precision, model.dtype={config.model.dtype}"):
        return backbones.load(config.model.name, dtype, device, config.model.chat, dict(config.model.overrides))


def check_inputs(config: RunConfig, backbone: Backbone) -> None:
    """Raise ValueError before the first step for what would otherwise end the run hours later.

    That is a context too short for a task, a text shorter than a context, an answer without tokens, a validation length
    that does not fit, and pruning ratios, those of `extra_ratios` included, that no scores can meet.
    """
    if config.data.text is not None:
        check_text(config.data.text, config.data.max_length, TokenCounter(backbone.tokenizer))
    first = config.mixture(backbone, per_length=config.data.documents)
    documents = []
    for name in (name for name, share in config.data.tasks.items() if share):
        with naming(f"data.min_length or data.tasks.{name}"):
            documents.append(first.build(name, config.data.min_length, 0))
    for together in [documents] if config.data.documents > 1 else [[d] for d in documents]:
        collate(backbone, together)
    if config.validation.heldout:
        with naming("data.min_length, for the text of the verdict, which validation.heldout=0 skips"):
            mixtures(config, backbone)[TEXT].build("text", config.data.min_length, 0)
    check_samples_fit(config, backbone)
    pruning = config.pruning
    if pruning.bytes is not None:
        return
    for name, ratio in [("ratio", pruning.ratio), *(("extra_ratios", ratio) for ratio in config.extra_ratios)]:
        check_ratio(backbone.shape, ratio, pruning.align, pruning.rounding, name)


def check_text(path: str, length: int, counter: TokenCounter) -> None:
    """Raise ValueError for a text of fewer tokens than a document, which would repeat what is to be learned."""
    tokens = 0
    for sentence in haystack.sentences(path, "train"):
        tokens += counter.pieces([sentence], " ", remember=False)[0]
        if tokens > length:
            return
    raise ValueError(
        f"data.text={path!r} has {tokens} tokens without every tenth paragraph, which is held out, and documents have "
        f"up to data.max_length={length}; give a longer text or lower data.max_length"
    )


def save_masks(
    current: Run, backbone: Backbone, scores1: Tensor, alpha: Tensor, means: Tensor | None, closed: Tensor | None
) -> dict[str, ChannelMask]:
    """Write the mask, the scores, the masks that stage 1 alone gives, and those at other ratios, in the first process.

    scores1, alpha: scores [L, H, D] after stage 1 and stage 2; closed: of the closed form that factors have corrected.
    Returns those that the verdict compares, by name: `MASK`, the mask of the run, `STAGE1`, and other ratios.
    """
    config, pruning, out = current.config, current.config.pruning, current.out
    metadata = current.origin(backbone)

    def cut(scores: Tensor, ratio: float, align: int) -> ChannelMask:
        return ChannelMask.from_scores(scores, ratio, align, pruning.rounding, metadata).with_means(means)

    mask = cut(alpha, pruning.ratio, pruning.align)
    found = {MASK: mask, STAGE1: cut(scores1, pruning.ratio, pruning.align)}
    if closed is not None:
        found[CLOSED_FORM] = cut(closed, pruning.ratio, pruning.align)
    for ratio in dict.fromkeys([*config.extra_ratios, *pruning.nested]):
        found[f"mask_{100 * ratio:.12g}pct"] = cut(scores1, ratio, pruning.align)  # stage 2 has learned for one ratio
    if not current.first:
        return found
    for doubt in mask.doubts():
        log.warning("%s: %s", out / "mask.safetensors", doubt)
    write_tensors(out / "alpha.safetensors", {"alpha": alpha, "stage1": scores1})
    for align in {1, pruning.align}:  # what stage 2 is worth (appendix E): the same scores without it
        cut(scores1, pruning.ratio, align).save(out / "stage1" / f"mask_align{align}.safetensors")
    for name, one in found.items():
        if name != STAGE1:
            one.save(out / ("mask.safetensors" if name == MASK else f"masks/{name}.safetensors"))
    return found


def save_layouts(
    current: Run, backbone: Backbone, losses: Losses, closed: Losses, means: Tensor | None, basis: Tensor | None
) -> dict[str, ChannelMask]:
    """Write the masks of all budgets, and beside learned ones the closed form's, and equal bits, in the first process.

    losses: of the layouts; closed: of the closed form, the same ones if nothing was learned; basis: of both.
    Returns those that the verdict compares, by name; `MASK` has the budget `pruning.bytes`.
    """
    pruning, found = current.config.pruning, {}
    for losses_of, first, name in ((losses, MASK, "layout"), (closed, CLOSED_FORM, CLOSED_FORM)):
        if first == MASK or losses is not closed:
            for budget, mask in zip(pruning.budgets, layouts(current, backbone, losses_of, means, basis), strict=True):
                found[first if budget == pruning.bytes else f"{name}_{100 * budget:.12g}pct"] = mask
    metadata = {key: value for key, value in found[MASK].metadata.items() if key != "bytes"}
    for bits in VALUE_BITS[:3]:
        layout = equal(backbone.shape, bits)
        found[f"{EQUAL}_{bits}bits"] = ChannelMask(layout.keep, metadata, None, layout)
    for name, mask in found.items():
        if current.first:
            mask.save(current.out / ("mask.safetensors" if name == MASK else f"masks/{name}.safetensors"))
    return found


def pronounce(
    current: Run, backbone: Backbone, masks: dict[str, ChannelMask], metrics: Metrics, signals: Signals
) -> None:
    """Compare masks on held-out documents: figures go into the masks' files, doubts into the log, too."""
    started, config, out = time.monotonic(), current.config, current.out
    verdict = judge(config, backbone, masks, signals)
    if verdict is None or not current.first:
        return
    metrics["verdict"], metrics["seconds"]["verdict"] = verdict.metrics, round(time.monotonic() - started, 1)
    if verdict.documents < 2:
        log.warning("%s: one held-out document of each kind confirms and doubts nothing; raise validation.heldout", out)
    for name, mask in masks.items():
        files = {MASK: "mask.safetensors", STAGE1: f"stage1/mask_align{config.pruning.align}.safetensors"}
        file = files.get(name, f"masks/{name}.safetensors")
        doubts = verdict.doubts(name)
        for doubt in doubts:
            log.warning("%s: %s", out / file, doubt)
        told = {"heldout": verdict.figures(name), "heldout_documents": verdict.documents}
        mask.with_metadata(mask.metadata | told | ({"doubts": doubts} if doubts else {})).save(out / file)


def counted(mask: ChannelMask) -> Metrics:
    """Return what a mask keeps."""
    counts = mask.channels_per_head
    return {"pruning_ratio": mask.pruning_ratio, "empty_heads": int((counts == 0).sum()), "heads": counts.numel()}


def measured(current: Run, mask: ChannelMask, scores1: Tensor, alpha: Tensor, records: dict[str, Recorder]) -> Metrics:
    """Return the metrics of training; warn if the cut of stage 1's scores was arbitrary."""
    ratio = current.config.pruning.ratio
    separation = Separation.of(scores1, ratio)
    steps1 = records["stage1"].steps
    # ranks of the closed form are never driven apart
    stepped = current.config.pruning.learns == "scores" and any(record.steps for record in records.values())
    steered = steps1[-1]["lam"] if stepped and steps1 and current.config.stage1.lam == AUTO else None
    if (
        current.first
        and stepped
        and not current.config.pruning.nested
        and (warning := separation.warning(ratio, steered))
    ):
        log.warning("%s: %s", current.out, warning)
    best = {name: best_look(record.looks) for name, record in records.items() if record.looks}
    heldout = {
        name: {"step": at, "loss": loss, "ended": records[name].looks[-1][0]} for name, (at, loss) in best.items()
    }
    return {
        **counted(mask),
        "alpha_mean": float(alpha.mean()),
        "separation": asdict(separation) if stepped else {},
        "distillation": {name: r.steps[-1]["distillation"] for name, r in records.items() if r.steps},
        **({"heldout": heldout} if heldout else {}),
        "seconds": {"training": round(sum(r.seconds for r in records.values()), 1)},  # those before a stop included
        "config": current.fingerprint,
    }
