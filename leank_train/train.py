"""The main job: stage 1, stage 2, mask, validation, plots; from a resolved Hydra config to a filled run directory."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from data_gen.tasks import RULER_NIAH, Mixture, task
from data_gen.tokens import TokenCounter
from leank_train import backbone as backbones
from leank_train import plots, validation
from leank_train.backbone import Backbone
from leank_train.baselines import StaticNorm, lowest_frequencies, random_mask
from leank_train.branching import branch, prefill
from leank_train.data import RetrievalData, collate
from leank_train.mask import ROUNDINGS, ChannelMask
from leank_train.recorder import AtomicCheckpointIO, Recorder, config_hash, write_json, write_text
from leank_train.stages import Stage, Stage1, Stage2, StageConfig

NOT_IN_HASH = ("trainer", "logger", "validation", "resume", "workers", "name", "checkpoint_every")


class BadConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and what to do."""


def check(config: DictConfig) -> None:
    """Look at every setting before weights are loaded. Raises BadConfig."""

    def need(fine: bool, message: str) -> None:
        if not fine:
            raise BadConfig(message)

    mask, data = config.mask, config.data
    need(
        0 <= mask.ratio < 1, f"mask.ratio={mask.ratio} is not in [0, 1): it is the share of channels to prune, e.g. 0.7"
    )
    need(
        mask.sink >= 0 and mask.window >= 1,
        f"mask.sink={mask.sink}, mask.window={mask.window}: use sink >= 0, window >= 1",
    )
    need(mask.rounding in ROUNDINGS, f"mask.rounding={mask.rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
    need(
        mask.sink + mask.window < data.min_length,
        f"mask.sink + mask.window = {mask.sink + mask.window} tokens leave no middle in contexts of "
        f"data.min_length={data.min_length}; lower mask.window or raise data.min_length",
    )
    for name in data.tasks:
        task(name)
    shape_of = backbones.load_config(config.model.name, _overrides(config))
    dim = backbones.kv_shape(shape_of)[2]
    need(
        dim % mask.align == 0,
        f"mask.align={mask.align} does not divide head_dim={dim} of {config.model.name}; use a divisor",
    )
    limit = shape_of.max_position_embeddings
    need(
        data.max_length <= limit,
        f"data.max_length={data.max_length} is beyond the {limit} positions of {config.model.name}; lower it, "
        "or extend the model (see conf/experiment/qwen_70pct_yarn.yaml)",
    )
    for stage in (config.stage1, config.stage2):
        need(
            stage.steps >= 0 and stage.lr > 0, f"stage.steps={stage.steps}, stage.lr={stage.lr}: use steps >= 0, lr > 0"
        )


def run(config: DictConfig, out: Path) -> dict[str, Any]:
    """Train a mask into the folder `out`, or go on with what is there. Returns the metrics written to metrics.json."""
    check(config)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    fingerprint = config_hash({str(k): v for k, v in resolved.items() if k not in NOT_IN_HASH})
    _check_folder(out, fingerprint, config.resume)
    write_text(out / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_text(out / "config.hash", fingerprint + "\n")
    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its notes on hardware and products
    L.seed_everything(config.seed, workers=True, verbose=False)
    logger = instantiate(config.logger, save_dir=str(out)) if config.logger else None
    started = time.time()
    device = "cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu"
    backbone = backbones.load(config.model.name, config.model.dtype, device, config.model.chat, _overrides(config))
    for name in (
        n for n, share in config.data.tasks.items() if share
    ):  # a context too short for a task: now, not later
        mixture(config, backbone, "stage1", 1).build(name, config.data.min_length, 0)
    metadata = {
        "model": config.model.name, "config": fingerprint, "sink": config.mask.sink, "window": config.mask.window,
        "lengths": [config.data.min_length, config.data.max_length], "seed": config.seed,
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
    }  # fmt: skip
    sizes = dict(ratio=config.mask.ratio, align=config.mask.align, rounding=config.mask.rounding)
    kept = dict(sink=config.mask.sink, window=config.mask.window)

    first = Stage1(backbone, StageConfig(**config.stage1), **kept)
    record1 = fit(config, first, "stage1", out, logger)
    scores1 = first.alpha.detach().clone()
    second = Stage2(backbone, StageConfig(**config.stage2), **kept, alpha=scores1, **sizes)
    record2 = fit(config, second, "stage2", out, logger)
    trained = time.time() - started
    alpha = second.alpha.detach().float().cpu()
    mask = ChannelMask.from_scores(alpha, **sizes, metadata=metadata)
    if second.trainer.is_global_zero:
        mask.save(out / "mask.safetensors")
        for align in {1, config.mask.align}:  # what stage 2 is worth (appendix E): the same scores without it
            alone = ChannelMask.from_scores(scores1, **{**sizes, "align": align}, metadata=metadata)
            alone.save(out / "stage1" / f"mask_align{align}.safetensors")
        save_file({"alpha": alpha.contiguous(), "stage1": scores1.float().cpu()}, out / "alpha.safetensors.partial")
        (out / "alpha.safetensors.partial").replace(out / "alpha.safetensors")
    metrics: dict[str, Any] = {
        "pruning_ratio": mask.pruning_ratio,
        "empty_heads": int((mask.channels_per_head == 0).sum()),
        "heads": mask.channels_per_head.numel(),
        "alpha_mean": float(alpha.mean()),
        "distillation": {
            s: r.steps[-1]["distillation"] for s, r in (("stage1", record1), ("stage2", record2)) if r.steps
        },
        "seconds": {"training": round(trained, 1)},
        "config": fingerprint,
    }
    if second.trainer.is_global_zero and config.validation.samples:
        validate(config, backbone, mask, out, metrics)
    if second.trainer.is_global_zero:
        metrics["seconds"]["all"] = round(time.time() - started, 1)
        write_json(out / "metrics.json", metrics)
        figures = plots.training_plots(record1, record2, alpha, mask, out / "plots")
        _log_wandb(logger, metrics, figures, out)
    return metrics


def mixture(config: DictConfig, backbone: Backbone, stage: str, world: int) -> Mixture:
    """The training documents of a stage; the documents of one step share a length."""
    data = config.data
    return Mixture(
        dict(data.tasks), backbone.tokenizer, data.min_length, data.max_length,
        seed=config.seed * 2 + (stage == "stage2"), questions=data.questions, group=data.documents * world,
        essays=data.essays, split="train",
    )  # fmt: skip


def fit(config: DictConfig, stage: Stage, name: str, out: Path, logger: Any) -> Recorder:
    """Run one stage, or go on from its checkpoint."""
    recorder = Recorder(stage.config.steps // 20)
    trainer_config = OmegaConf.to_container(config.trainer, resolve=True)
    trainer = L.Trainer(
        **trainer_config,  # type: ignore[arg-type]
        max_steps=stage.config.steps,
        max_epochs=-1,
        logger=logger or False,
        default_root_dir=str(out),
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            recorder,
            ModelCheckpoint(
                out / "checkpoints" / name, filename="last", every_n_train_steps=config.checkpoint_every,
                save_on_train_epoch_end=False, enable_version_counter=False,
            ),
            Progress(name),
        ],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1 if stage.config.steps < 500 else 10,
        use_distributed_sampler=False,
    )  # fmt: skip
    data = config.data
    documents = mixture(config, stage.backbone, name, trainer.world_size)
    module = RetrievalData(stage.backbone, documents, data.documents, config.workers)
    done = out / "checkpoints" / name / "done.ckpt"
    last = out / "checkpoints" / name / "last.ckpt"
    if done.exists():  # a finished stage is read, not run again
        state = torch.load(done, map_location="cpu", weights_only=True)
        with torch.no_grad():
            stage.alpha.copy_(state["alpha"])
        recorder.load_state_dict(state["record"])
        stage.trainer = trainer
        return recorder
    if stage.config.steps:
        try:
            trainer.fit(stage, module, ckpt_path=str(last) if last.exists() else None, weights_only=False)
        except torch.OutOfMemoryError as error:
            raise BadConfig(
                f"out of GPU memory in {name} at data.max_length={data.max_length}; lower data.max_length, "
                f"data.questions={data.questions} or data.documents={data.documents}"
            ) from error
        if trainer.global_step < stage.config.steps:
            raise KeyboardInterrupt(f"{name} stopped at step {trainer.global_step}; run the same command to go on")
    stage.trainer = trainer
    if trainer.is_global_zero:
        done.parent.mkdir(parents=True, exist_ok=True)
        partial = done.with_suffix(".partial")
        torch.save({"alpha": stage.alpha.detach().cpu(), "record": recorder.state_dict()}, partial)
        partial.replace(done)
    trainer.strategy.barrier()
    return recorder


def validate(config: DictConfig, backbone: Backbone, mask: ChannelMask, out: Path, metrics: dict[str, Any]) -> None:
    """Score the mask beside dense, ThinK and the masks that need no training; adds to `metrics`."""
    started, ratio, settings = time.time(), config.mask.ratio, config.validation
    counter = TokenCounter(backbone.tokenizer)
    methods: dict[str, Any] = {
        "dense": None,
        "leank": mask,
        "think": validation.think(ratio),
        "static_norm": static_norm_mask(backbone, config.data.max_length, settings.calibration, config.seed).mask(
            ratio
        ),
        "lowest_frequencies": lowest_frequencies(backbone.model.config, ratio),
        "random": random_mask(backbone.shape, ratio, config.seed),
    }
    tasks = list(settings.tasks or RULER_NIAH)
    batches = [
        [
            task(name).build(name, length, counter, config.seed + 1_000_003, i, exact=False, split="test")
            for i in range(at, min(at + settings.batch, settings.samples))
        ]
        for name in tasks
        for length in settings.lengths
        for at in range(0, settings.samples, settings.batch)
    ]
    bar = Progress.bar("validation", len(batches))
    results = validation.evaluate(
        backbone, methods, batches, config.mask.sink, config.mask.window, lambda n: bar.update(1) and None
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


def static_norm_mask(backbone: Backbone, length: int, samples: int, seed: int) -> StaticNorm:
    """Channel norms over multi-key samples of the training text (LeanK section 2.2, appendix L)."""
    found, counter, device = StaticNorm(), TokenCounter(backbone.tokenizer), backbone.model.device
    for i in range(samples):
        document = task("niah_multikey_3").build("niah_multikey_3", length, counter, seed, i, split="train")
        batch = collate(backbone, [document]).to(device)
        prefix = prefill(backbone.model, batch.documents, batch.document_lengths, validation.OBSERVED)
        question = batch.prompts[:, : int(batch.question_lengths[0])]
        asked = branch(backbone.model, prefix, question, batch.question_lengths, validation.OBSERVED)
        found.add(prefix, asked)
    return found


class Progress(TQDMProgressBar):
    """A bar over the steps of a stage, with the time that is left."""

    def __init__(self, name: str) -> None:
        super().__init__(refresh_rate=10 if not sys.stderr.isatty() else 1)
        self.name = name

    @staticmethod
    def bar(name: str, total: int) -> Any:
        """A plain bar of the same looks."""
        from tqdm import tqdm

        return tqdm(total=total, desc=name, mininterval=10 if not sys.stderr.isatty() else 0.5)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Count the steps, not the endless epoch."""
        super().on_train_start(trainer)
        self.train_progress_bar.reset(trainer.max_steps)
        self.train_progress_bar.initial = trainer.global_step
        self.train_progress_bar.set_description(self.name)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the bar of on_train_start: a stage is one epoch."""


def _overrides(config: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(config.model.get("overrides") or OmegaConf.create({}), resolve=True)
    assert isinstance(found, dict)
    return {str(k): v for k, v in found.items()}


def _check_folder(out: Path, fingerprint: str, resume: bool) -> None:
    before = out / "config.hash"
    if not (out / "checkpoints").exists() or not before.exists():
        return
    if not resume:
        raise BadConfig(
            f"{out} holds a run already; set hydra.run.dir to a new folder, or resume=true to go on with it"
        )
    if before.read_text().strip() != fingerprint:
        raise BadConfig(
            f"{out} holds checkpoints of another config ({before.read_text().strip()}, this one is {fingerprint}; "
            f"compare {out}/config.yaml): set hydra.run.dir to a new folder, or remove that one"
        )


def _log_wandb(logger: Any, metrics: dict[str, Any], figures: dict[str, Path], out: Path) -> None:
    experiment = getattr(logger, "experiment", None)
    if experiment is None or not hasattr(experiment, "summary"):
        return
    import wandb

    flat = {k: v for k, v in metrics.items() if not isinstance(v, dict)}
    for method, row in metrics.get("validation", {}).get("recall", {}).items():
        flat[f"recall/{method}"] = row["average"]
    experiment.summary.update(flat)
    experiment.log({f"plots/{k}": wandb.Image(str(p)) for k, p in figures.items()})
    if "validation" in metrics:
        rows = metrics["validation"]["recall"]
        tasks = list(next(iter(rows.values())))
        experiment.log(
            {"validation": wandb.Table(columns=["method", *tasks], data=[[m, *r.values()] for m, r in rows.items()])}
        )
    artifact = wandb.Artifact("mask", type="mask", metadata={"config": metrics["config"]})
    artifact.add_file(str(out / "mask.safetensors"))
    experiment.log_artifact(artifact)
    experiment.finish()
