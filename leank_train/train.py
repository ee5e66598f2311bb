"""A training run, from a Hydra config to a filled run directory: a recipe, its masks, verdict, validation, plots."""

import logging
import time
from pathlib import Path

import lightning as L
import torch
from omegaconf import DictConfig

from leank import backbone as backbones
from leank.backbone import Backbone
from leank.data_gen import haystack
from leank.data_gen.tokens import TokenCounter
from leank.errors import naming
from leank.files import write_json
from leank.rotary import rotary_pairs
from leank.tensor_files import write_tensors
from leank.wandb_log import log_results, make_logger
from leank_train.data import collate
from leank_train.fitting import calibrate, memory_advice
from leank_train.recipes import check
from leank_train.recipes.recipe import Learned, Metrics, Recipe, Training
from leank_train.replies import with_replies
from leank_train.run_folder import Run, claimed
from leank_train.running import parallel, plots
from leank_train.running.preempt import Signals
from leank_train.running.recorder import Recorder
from leank_train.settings import RunConfig, plain
from leank_train.validation import check_samples_fit, validate
from leank_train.verdict import MASK, TEXT, judge, mixtures

log = logging.getLogger("leank_train")


def run(given: DictConfig, out: Path, signals: Signals | None = None) -> Metrics:
    """Train a mask into the folder `out`, or go on with what is there.

    signals: ends the run with a checkpoint (SystemExit) at the first step after a signal; None listens to none.
    Returns the metrics of metrics.json in the first process, and an empty dictionary in every other.
    Raises BadConfig for settings that cannot work, BlockingIOError if another run is writing into `out`.
    """
    resolved = plain(given)
    with claimed(check(resolved), resolved, out) as current:
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
    """Run all phases after the checks, in every process; see `run`.

    All processes share the verdict; the first one alone validates and writes, and the others return nothing.
    """
    recipe, out = current.config, current.out
    assert isinstance(recipe, Recipe)
    if recipe.trainer.shard_weights:
        parallel.shard(backbone.model, parallel.device(recipe.trainer))
    logger = make_logger(recipe.logger, out)
    if logger:
        logger.log_hyperparams(current.resolved)

    # 2. the recipe, and its masks
    with memory_advice("in the means", "data.max_length"):
        means = calibrate(recipe, backbone, signals) if recipe.pruning.compensation == "mean" else None
    with memory_advice("in the closed form", "data.max_length"):  # `fit` has advice of its own
        learned = recipe.learn(Training(current, backbone, means, logger, signals))
    if current.alone:
        signals.leave_at_once()
    mask, records = learned.masks[MASK], learned.records
    if current.first:
        for doubt in mask.doubts():
            log.warning("%s: %s", out / learned.file(MASK), doubt)
        write_tensors(out / "alpha.safetensors", learned.scores)
        for name, one in learned.masks.items():
            one.save(out / learned.file(name))
    counts = mask.channels_per_head
    metrics: Metrics = {
        "pruning_ratio": mask.pruning_ratio, "empty_heads": int((counts == 0).sum()), "heads": counts.numel(),
        "separation": {}, **learned.metrics,
        "distillation": {name: r.steps[-1]["distillation"] for name, r in records.items() if r.steps},
        "seconds": {"training": round(sum(r.seconds for r in records.values()), 1)},  # those before a stop included
        "config": current.fingerprint,
    }  # fmt: skip

    # 3. the verdict, validation and plots
    with memory_advice("in the verdict; the mask is saved", f"validation.heldout={recipe.validation.heldout}"):
        pronounce(current, backbone, learned, metrics, signals)
    if not current.first:
        return {}
    signals.leave_at_once()
    if recipe.validation.samples:
        lengths = f"validation.batch={recipe.validation.batch}, validation.lengths={list(recipe.validation.lengths)}"
        with memory_advice("in validation; the mask is saved", lengths):
            begun = time.monotonic()
            metrics["validation"] = validate(recipe, backbone, mask, out)
            metrics["seconds"]["validation"] = round(time.monotonic() - begun, 1)
    stage1, stage2 = (records.get(stage, Recorder(1)) for stage in ("stage1", "stage2"))
    figures = plots.training_plots(
        stage1, stage2, learned.alpha, mask, rotary_pairs(backbone.model.config), out / "plots"
    )
    metrics["seconds"]["all"] = round(time.monotonic() - started, 1)
    write_json(out / "metrics.json", metrics)
    log_results(logger, metrics, figures, recipe.model.name, current.resolved, mask, out)
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

    That is a context too short for a task, a text shorter than a context, an answer without tokens, and a validation
    length that does not fit.
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


def pronounce(current: Run, backbone: Backbone, learned: Learned, metrics: Metrics, signals: Signals) -> None:
    """Compare masks on held-out documents: figures go into the masks' files, doubts into the log, too."""
    started, config, out = time.monotonic(), current.config, current.out
    verdict = judge(config, backbone, learned.masks, signals)
    if verdict is None or not current.first:
        return
    metrics["verdict"], metrics["seconds"]["verdict"] = verdict.metrics, round(time.monotonic() - started, 1)
    if verdict.documents < 2:
        log.warning("%s: one held-out document of each kind confirms and doubts nothing; raise validation.heldout", out)
    for name, mask in learned.masks.items():
        file, doubts = out / learned.file(name), verdict.doubts(name)
        for doubt in doubts:
            log.warning("%s: %s", file, doubt)
        told = {"heldout": verdict.figures(name), "heldout_documents": verdict.documents}
        mask.with_metadata(mask.metadata | told | ({"doubts": doubts} if doubts else {})).save(file)
