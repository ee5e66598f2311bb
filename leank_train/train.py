"""The main job: stage 1, stage 2, mask, validation, plots; from a resolved Hydra config to a filled run directory."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from data_gen.tasks import Mixture
from leank_train import backbone as backbones
from leank_train.backbone import Backbone
from leank_train.common.files import Lock, write_json, write_text
from leank_train.common.tensor_files import read_checkpoint, write_checkpoint, write_tensors
from leank_train.data import RetrievalData, collate
from leank_train.mask import ChannelMask, check_ratio
from leank_train.objective.steering import Separation
from leank_train.running import parallel, plots
from leank_train.running.preempt import SaveOnSignal, Signals
from leank_train.running.recorder import AtomicCheckpointIO, Progress, Recorder
from leank_train.running.wandb_log import log_results, make_logger
from leank_train.settings import BadConfig, RunConfig, check, check_folder, fingerprint, plain
from leank_train.stages import Stage, Stage1, Stage2
from leank_train.validation.compare import check_lengths, validate

REQUEUED = 120.0  # seconds that a requeued job waits for the lock of its predecessor


def run(given: DictConfig, out: Path, signals: Signals | None = None) -> dict[str, Any]:
    """Train a mask into the folder `out`, or go on with what is there.

    Returns the metrics written to metrics.json; of several processes, in the first alone. Where `signals` listens, a
    signal ends the run at the next step with a checkpoint (SystemExit).

    Raises BadConfig where no stage has a step: such a mask would keep the first channels of the first heads, which
    nobody has chosen. Raises BlockingIOError where another run is writing into `out`.
    """
    resolved = plain(given)
    config = check(resolved)
    with claimed(config, resolved, out) as identity:
        return train(config, resolved, identity, out, signals or Signals())


@contextmanager
def claimed(config: RunConfig, resolved: dict[str, Any], out: Path) -> Iterator[str]:
    """The folder `out`, for this run alone; yields the fingerprint of its config, which it holds from now on.

    The first process holds the lock, for all of the run. A job that Slurm requeued waits for the one before, whose lock
    a file server may keep for a while after its end.
    """
    identity = fingerprint(resolved)
    if not parallel.is_first(config.trainer):
        check_folder(out, identity, config.resume)
        yield identity
        return
    out.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being written by another training; wait for it, or set hydra.run.dir to a new folder"
    with Lock(out / "run.lock", busy, patience=REQUEUED if "SLURM_RESTART_COUNT" in os.environ else 0):
        check_folder(out, identity, config.resume)
        write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
        write_text(out / "config.hash", identity + "\n")
        yield identity


def train(config: RunConfig, resolved: dict[str, Any], identity: str, out: Path, signals: Signals) -> dict[str, Any]:
    """What `run` does in a folder that is claimed."""
    started = time.time()
    torch.set_float32_matmul_precision("high")
    L.seed_everything(config.seed, workers=True, verbose=False)
    place, shared = parallel.device(config.trainer), parallel.settings(config.trainer)
    kind = str(backbones.torch_dtype(config.model.dtype, place)).removeprefix("torch.")
    loaded = torch.device("cpu") if shared.shard_weights else place  # shared out when the processes know each other
    with memory("while loading the model", f"the precision, model.dtype={config.model.dtype}"):
        backbone = backbones.load(config.model.name, kind, loaded, config.model.chat, dict(config.model.overrides))
    # a context too short for a task, or an answer without tokens, is an error now, not in the middle of the night
    first = mixture(config, backbone, "stage1", 1)
    documents = [first.build(name, config.data.min_length, 0) for name, share in config.data.tasks.items() if share]
    for together in [documents] if config.data.documents > 1 else [[d] for d in documents]:
        collate(backbone, together)
    check_lengths(config, backbone)
    check_ratio(backbone.shape, config.pruning.ratio, config.pruning.align, config.pruning.rounding)
    logger = make_logger(config.logger, out)
    if logger:
        logger.log_hyperparams(resolved)

    pruning = config.pruning
    span: dict[str, Any] = dict(sink=pruning.sink, window=pruning.window)
    size: dict[str, Any] = dict(ratio=pruning.ratio, align=pruning.align, rounding=pruning.rounding)
    stage1 = Stage1(backbone, config.stage1, **span, parallel=shared, ratio=pruning.ratio)
    record1 = fit(config, stage1, "stage1", out, logger, signals)
    stage2 = Stage2(backbone, config.stage2, **span, alpha=stage1.alpha, parallel=shared, **size)
    record2 = fit(config, stage2, "stage2", out, logger, signals)
    if not stage2.trainer.is_global_zero:
        return {}
    signals.leave_at_once()

    scores1, alpha = (stage.alpha.detach().float().cpu().contiguous() for stage in (stage1, stage2))
    metadata = {
        "model": config.model.name, "config": identity, **span, "seed": config.seed,
        "lengths": [config.data.min_length, config.data.max_length],
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
    }  # fmt: skip
    mask = ChannelMask.from_scores(alpha, **size, metadata=metadata)
    separation = Separation.of(scores1, pruning.ratio)
    if warning := separation.warning(pruning.ratio):
        warnings.warn(warning, stacklevel=2)
    metrics: dict[str, Any] = {
        "pruning_ratio": mask.pruning_ratio,
        "empty_heads": int((mask.channels_per_head == 0).sum()),
        "heads": mask.channels_per_head.numel(),
        "alpha_mean": float(alpha.mean()),
        "separation": separation.metrics,
        "distillation": {
            name: r.steps[-1]["distillation"] for name, r in (("stage1", record1), ("stage2", record2)) if r.steps
        },
        "seconds": {"training": round(record1.seconds + record2.seconds, 1)},  # those before a stop included
        "config": identity,
    }
    for doubt in mask.doubts():
        warnings.warn(f"{out / 'mask.safetensors'}: {doubt}", stacklevel=1)
    mask.save(out / "mask.safetensors")
    write_tensors(out / "alpha.safetensors", {"alpha": alpha, "stage1": scores1})
    for align in {1, pruning.align}:  # what stage 2 is worth (appendix E): the same scores without it
        alone = ChannelMask.from_scores(scores1, **{**size, "align": align}, metadata=metadata)
        alone.save(out / "stage1" / f"mask_align{align}.safetensors")
    for other in config.extra_ratios:  # stage 2 is trained for the configured ratio: others are cut from stage 1
        cut = ChannelMask.from_scores(scores1, **{**size, "ratio": other}, metadata=metadata)
        cut.save(out / "masks" / f"mask_{100 * other:g}pct.safetensors")
    if config.validation.samples:
        lengths = f"validation.batch={config.validation.batch}, validation.lengths={list(config.validation.lengths)}"
        with memory("in validation; the mask is saved", lengths):
            validate(config, backbone, mask, out, metrics)
    figures = plots.training_plots(record1, record2, alpha, mask, out / "plots")
    metrics["seconds"]["all"] = round(time.time() - started, 1)
    write_json(out / "metrics.json", metrics)
    log_results(logger, metrics, figures, resolved, mask, out)
    return metrics


@contextmanager
def memory(when: str, settings: str) -> Iterator[None]:
    """Say which settings take less, where the GPU's memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BadConfig(
            f"out of GPU memory {when}; lower {settings}, or take a larger GPU, or several: "
            "trainer=sequence_parallel for long contexts, trainer=fsdp for large weights"
        ) from error


def mixture(config: RunConfig, backbone: Backbone, stage: str, world: int) -> Mixture:
    """The training documents of a stage; the documents of one step share a length."""
    data = config.data
    return Mixture(
        dict(data.tasks), backbone.tokenizer, data.min_length, data.max_length,
        seed=config.seed * 2 + (stage == "stage2"), questions=data.questions, group=data.documents * world,
        essays=data.essays, split="train", reserve=backbone.reserve,
    )  # fmt: skip


def fit(config: RunConfig, stage: Stage, name: str, out: Path, logger: Any, signals: Signals) -> Recorder:
    """Run one stage, go on from its checkpoint, or read what it left when it was done."""
    folder, recorder = out / "checkpoints" / name, Recorder(stage.config.steps // 20)
    done, last = folder / "done.ckpt", folder / "last.ckpt"
    trainer = parallel.trainer(
        config.trainer,
        max_steps=stage.config.steps,
        max_epochs=-1,
        logger=logger or False,
        default_root_dir=str(out),
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            recorder,
            Progress(name),
            SaveOnSignal(signals, last),
            ModelCheckpoint(
                folder, filename="last", every_n_train_steps=config.checkpoint_every,
                save_on_train_epoch_end=False, enable_version_counter=False,
            ),
        ],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1 if stage.config.steps < 500 else 10,
        use_distributed_sampler=False,
    )  # fmt: skip
    stage.trainer = trainer
    finished = done.exists()
    trainer.strategy.barrier()  # a stage of no steps is written at once, maybe before another rank has looked
    if finished:
        state = read_checkpoint(done, f"remove it, and the stage goes on from {last.name}")
        stage.alpha.data.copy_(state["alpha"])
        recorder.load_state_dict(state["record"])
        return recorder
    data = config.data
    if stage.config.steps:
        together = config.trainer.sequence_parallel  # ranks that see the same documents
        contexts = mixture(config, stage.backbone, name, trainer.world_size // together)
        module = RetrievalData(stage.backbone, contexts, data.documents, config.workers, together)
        sizes = f"data.max_length={data.max_length}, data.questions={data.questions}, data.documents={data.documents}"
        with memory(f"in {name}", sizes):
            trainer.fit(stage, module, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        if signals.agreed:
            signals.leave(first=trainer.is_global_zero)
        if trainer.global_step < stage.config.steps:
            raise KeyboardInterrupt(f"{name} stopped at step {trainer.global_step}; run the same command to go on")
    if trainer.is_global_zero:
        write_checkpoint(done, {"alpha": stage.alpha.detach().cpu(), "record": recorder.state_dict()})
    trainer.strategy.barrier()
    return recorder
