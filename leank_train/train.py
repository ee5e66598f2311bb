"""The main job: stage 1, stage 2, mask, validation, plots; from a resolved Hydra config to a filled run directory."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save

from data_gen.tasks import Mixture
from leank_train import backbone as backbones
from leank_train import parallel, plots
from leank_train.backbone import Backbone
from leank_train.compare import check_lengths, validate
from leank_train.data import RetrievalData, collate
from leank_train.files import write_bytes, write_json, write_text
from leank_train.mask import ChannelMask
from leank_train.preempt import SaveOnSignal, Signals
from leank_train.recorder import AtomicCheckpointIO, Progress, Recorder
from leank_train.settings import BadConfig, check, check_folder, fingerprint, overrides, stage_config
from leank_train.stages import Stage, Stage1, Stage2
from leank_train.steering import Separation
from leank_train.wandb_log import log_results


def run(config: DictConfig, out: Path, signals: Signals | None = None) -> dict[str, Any]:
    """Train a mask into the folder `out`, or go on with what is there.

    Returns the metrics written to metrics.json; of several processes, in the first alone. Where `signals` listens, a
    signal ends the run at the next step with a checkpoint (SystemExit).
    """
    started, signals = time.time(), signals or Signals()
    check(config)
    identity = fingerprint(config)
    check_folder(out, identity, config.resume)
    write_text(out / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_text(out / "config.hash", identity + "\n")
    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its notes on hardware and products
    L.seed_everything(config.seed, workers=True, verbose=False)
    place, shared = parallel.device(config), parallel.settings(config)
    kind = str(backbones.torch_dtype(config.model.dtype, place)).removeprefix("torch.")
    loaded = torch.device("cpu") if shared.shard_weights else place  # shared out when the processes know each other
    with memory("while loading the model", f"the precision, model.dtype={config.model.dtype}"):
        backbone = backbones.load(config.model.name, kind, loaded, config.model.chat, overrides(config))
    # a context too short for a task, or an answer without tokens, is an error now, not in the middle of the night
    first = mixture(config, backbone, "stage1", 1)
    documents = [first.build(name, config.data.min_length, 0) for name, share in config.data.tasks.items() if share]
    for together in [documents] if config.data.documents > 1 else [[d] for d in documents]:
        collate(backbone, together)
    check_lengths(config, backbone)
    logger = instantiate(config.logger, save_dir=str(out)) if config.logger else None
    if logger:
        logger.log_hyperparams(OmegaConf.to_container(config, resolve=True))

    span = dict(sink=config.mask.sink, window=config.mask.window)
    size = dict(ratio=config.mask.ratio, align=config.mask.align, rounding=config.mask.rounding)
    ratio = config.mask.ratio
    stage1 = Stage1(backbone, stage_config(config, "stage1"), **span, parallel=shared, ratio=ratio)
    record1 = fit(config, stage1, "stage1", out, logger, signals)
    stage2 = Stage2(backbone, stage_config(config, "stage2"), **span, alpha=stage1.alpha, parallel=shared, **size)
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
    separation = Separation.of(scores1, ratio)
    if warning := separation.warning(ratio):
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
    mask.save(out / "mask.safetensors")
    write_bytes(out / "alpha.safetensors", save({"alpha": alpha, "stage1": scores1}))
    for align in {1, config.mask.align}:  # what stage 2 is worth (appendix E): the same scores without it
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
    resolved = OmegaConf.to_container(config, resolve=True)
    log_results(logger, metrics, figures, resolved, mask, out)  # type: ignore[arg-type]
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


def mixture(config: DictConfig, backbone: Backbone, stage: str, world: int) -> Mixture:
    """The training documents of a stage; the documents of one step share a length."""
    data = config.data
    return Mixture(
        dict(data.tasks), backbone.tokenizer, data.min_length, data.max_length,
        seed=config.seed * 2 + (stage == "stage2"), questions=data.questions, group=data.documents * world,
        essays=data.essays, split="train", reserve=backbone.reserve,
    )  # fmt: skip


def fit(config: DictConfig, stage: Stage, name: str, out: Path, logger: Any, signals: Signals) -> Recorder:
    """Run one stage, go on from its checkpoint, or read what it left when it was done."""
    folder, recorder = out / "checkpoints" / name, Recorder(stage.config.steps // 20)
    done, last = folder / "done.ckpt", folder / "last.ckpt"
    trainer = parallel.trainer(
        config,
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
        state = torch.load(done, map_location="cpu", weights_only=True)
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
        buffer = io.BytesIO()
        torch.save({"alpha": stage.alpha.detach().cpu(), "record": recorder.state_dict()}, buffer)
        write_bytes(done, buffer.getvalue())
    trainer.strategy.barrier()
    return recorder
