"""One stage of a run, from its documents to its last checkpoint, and the mean keys that stand for pruned channels."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor

from leank.backbone import Backbone
from leank.errors import out_of_memory
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank.typed import BadConfig
from leank_train.data import HELD_OUT, RetrievalData, collate
from leank_train.forward.plan import to_device
from leank_train.run_folder import Run
from leank_train.running import parallel
from leank_train.running.preempt import SaveOnSignal, Signals
from leank_train.running.progress import Meter, StageProgress
from leank_train.running.recorder import AtomicCheckpointIO, Recorder, check_origin, cure_of, restoring
from leank_train.settings import RunConfig
from leank_train.stages import Stage, read_documents


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


@torch.no_grad()
def calibrate(config: RunConfig, backbone: Backbone, signals: Signals | None = None) -> Tensor:
    """Return the mean keys that stand for pruned channels (`ChannelMask.mean_keys`), [L, H, D] float32.

    The mean is over middle tokens, after RoPE, that a reply's first token finds in documents that no step trains on,
    which the processes divide among themselves.
    """
    device, count, division = backbone.model.device, config.data.calibration, parallel.Division.of(config.trainer)
    documents, pruning = config.mixture(backbone, per_length=config.data.documents * division.width), config.pruning
    total = torch.zeros(tuple(backbone.shape), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    phase = "means: the keys that stand for pruned channels"
    with Meter(phase, count, "document", silent=not division.first) as meter:
        for i, counts, done in division.rounds(count):
            read = collate(backbone, [documents[3 * HELD_OUT + i]]).to(device).documents
            prefix = read_documents(backbone.model, read, config.trainer.prefill_kernel, pruning.sink, division.ranks)
            at = prefix.k_positions[0]
            middle = (at >= pruning.sink) & (at < read.lengths[0] - pruning.window)
            if counts:
                total += torch.stack([keys[0][:, to_device(middle, device)].double().sum(1) for keys in prefix.keys])
                tokens += int(middle.sum())
            meter.update(done - meter.n)
            division.leave_together(signals, device)
    division.sum_(total, tokens)
    if not tokens:
        raise ValueError(
            f"pruning.compensation=mean: none of {config.data.calibration} documents has a middle behind "
            f"sink={pruning.sink} and before window={pruning.window}; raise data.min_length"
        )
    return (total / tokens).float().cpu()


def fit(current: Run, stage: Stage, name: str, logger: Logger | None, signals: Signals) -> Recorder:
    """Run one stage, go on from its checkpoint, or read what it left when it was done; its alpha is the result.

    Returns its course. Raises KeyboardInterrupt if the stage was interrupted before its end.
    """
    config, recorder = current.config, Recorder(stage.config.steps // 20)
    folder = current.out / "checkpoints" / name
    done, last = folder / "done.ckpt", folder / "last.ckpt"
    of = [name, current.fingerprint]
    trainer = stage_trainer(current, stage, recorder, name, logger, signals)
    finished = done.exists()
    trainer.strategy.barrier()  # a stage without steps is written at once, maybe before another rank has looked
    if finished:
        cure = f"remove it, and the stage goes on from {last.name}"
        state = read_checkpoint(done, cure)
        check_origin(state, of, done, cure)
        with restoring(done, cure):
            recorder.load_state_dict(state["record"])
            stage.result.data.copy_(stage.like_alpha(state["alpha"]))
        return recorder
    if stage.config.steps:
        data = config.data
        together = config.trainer.sequence_parallel  # ranks that see the same documents
        contexts = config.mixture(stage.backbone, name, data.documents * (trainer.world_size // together))
        module = RetrievalData(stage.backbone, contexts, data.documents, config.workers, together)
        sizes = f"data.max_length={data.max_length}, data.questions={data.questions}, data.documents={data.documents}"
        with memory_advice(f"in {name}", sizes), restoring(last, cure_of(last), "checkpoint_connector"):
            trainer.fit(stage, module, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        if signals.agreed:
            signals.leave(first=trainer.is_global_zero)
        if trainer.global_step < stage.config.steps:
            raise KeyboardInterrupt(f"{name} stopped at step {trainer.global_step}; run the same command to go on")
    stage.finish()
    if trainer.is_global_zero:
        state = {"of": of, "alpha": stage.result.detach().cpu(), "record": recorder.state_dict()}
        write_checkpoint(done, state)
    trainer.strategy.barrier()
    return recorder


def stage_trainer(
    current: Run, stage: Stage, recorder: Recorder, name: str, logger: Logger | None, signals: Signals
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
        plugins=[AtomicCheckpointIO([name, current.fingerprint])],
        callbacks=[
            recorder,
            StageProgress(name),
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
