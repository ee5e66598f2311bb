"""One stage of a run, from its documents to its last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from leank.backbone import Backbone
from leank.data_gen.tasks import Mixture
from leank.errors import out_of_memory
from leank.mask import refuse_not_finite
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank.typed import BadConfig
from leank_train.data import RetrievalData
from leank_train.run_folder import Run
from leank_train.running import parallel
from leank_train.running.preempt import SaveOnSignal, Signals
from leank_train.running.progress import StageProgress
from leank_train.running.recorder import AtomicCheckpointIO, Recorder
from leank_train.settings import RunConfig
from leank_train.stages import Stage
from leank_train.stopping import EarlyStop, best_look

log = logging.getLogger("leank_train")


@contextmanager
def memory_advice(when: str, settings: str) -> Iterator[None]:
    """Raise BadConfig that names the settings to lower if memory runs out; `when` says in which phase."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        if isinstance(error, MemoryError) or "CPU" in str(error):
            raise BadConfig(f"out of memory {when}; lower {settings}") from error
        raise BadConfig(
            f"out of GPU memory {when}; lower {settings}, or take a larger GPU, or several: "
            "trainer=sequence_parallel for long contexts, trainer=fsdp for large weights"
        ) from error


def mixture(config: RunConfig, backbone: Backbone, stage: str, world: int) -> Mixture:
    """Return the training documents of a stage; those of one step share a length.

    stage: "stage1" or "stage2".
    world: groups of ranks with documents of their own.
    """
    data = config.data
    return Mixture(
        dict(data.tasks), backbone.tokenizer, data.min_length, data.max_length,
        seed=config.seed * 2 + (stage == "stage2"), questions=data.questions, per_length=data.documents * world,
        essays=data.essays, split="train", reserve=backbone.reserve,
    )  # fmt: skip


def fit(current: Run, stage: Stage, name: str, logger: Logger | None, signals: Signals) -> Recorder:
    """Run one stage, go on from its checkpoint, or read what it left when it was done.

    stage: learns in place; its alpha is the result.
    name: "stage1" or "stage2".

    Returns the course of the stage. Raises KeyboardInterrupt if the stage was interrupted before its end.
    """
    config, recorder = current.config, Recorder(stage.config.steps // 20)
    folder = current.out / "checkpoints" / name
    done, last = folder / "done.ckpt", folder / "last.ckpt"
    stopper = EarlyStop(stage.config)
    trainer = stage_trainer(current, stage, recorder, name, logger, signals, stopper)
    finished = done.exists()
    trainer.strategy.barrier()  # a stage without steps is written at once, maybe before another rank has looked
    if finished:
        cure = f"remove it, and the stage goes on from {last.name}"
        state = read_checkpoint(done, cure)
        refuse_not_finite(state["alpha"], cure, str(done))
        stage.alpha.data.copy_(state["alpha"])
        recorder.load_state_dict(state["record"])
        return recorder
    if stage.config.steps:
        data = config.data
        together = config.trainer.sequence_parallel  # ranks that see the same documents
        contexts = mixture(config, stage.backbone, name, trainer.world_size // together)
        module = RetrievalData(stage.backbone, contexts, data.documents, config.workers, together)
        sizes = f"data.max_length={data.max_length}, data.questions={data.questions}, data.documents={data.documents}"
        with memory_advice(f"in {name}", sizes):
            trainer.fit(stage, module, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        if signals.agreed:
            signals.leave(first=trainer.is_global_zero)
        if trainer.global_step < stage.config.steps and not stopper.over:
            raise KeyboardInterrupt(f"{name} stopped at step {trainer.global_step}; run the same command to go on")
        if stopper.looks:
            stopper.restore(stage)
            recorder.looks = stopper.looks
            at, loss = best_look(stopper.looks)
            if current.first:
                log.info("%s ended at step %d; held-out loss %.4g at step %d", name, trainer.global_step, loss, at)
    if trainer.is_global_zero:
        write_checkpoint(done, {"alpha": stage.alpha.detach().cpu(), "record": recorder.state_dict()})
    trainer.strategy.barrier()
    return recorder


def stage_trainer(
    current: Run,
    stage: Stage,
    recorder: Recorder,
    name: str,
    logger: Logger | None,
    signals: Signals,
    stopper: EarlyStop,
) -> L.Trainer:
    """Return the trainer of a stage, with its checkpoints under checkpoints/NAME."""
    config, steps = current.config, stage.config.steps
    folder = current.out / "checkpoints" / name
    return parallel.trainer(
        config.trainer,
        max_steps=steps,
        max_epochs=-1,
        logger=logger or False,
        default_root_dir=str(current.out),
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            recorder,
            StageProgress(name),
            *([stopper] if stage.config.patience else []),  # before what saves, so that a checkpoint has its look
            SaveOnSignal(signals, folder / "last.ckpt"),
            ModelCheckpoint(
                folder, filename="last", every_n_train_steps=config.checkpoint_every,
                save_on_train_epoch_end=False, enable_version_counter=False,
            ),
        ],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1 if steps < 500 else 10,
        use_distributed_sampler=False,
    )  # fmt: skip
