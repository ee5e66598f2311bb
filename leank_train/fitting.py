"""One stage of a run, from its documents to its last checkpoint, and where it ends early.

A stage with patience ends once documents that it does not train on no longer gain from it.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from pydantic import TypeAdapter
from torch import Tensor

from leank.backbone import Backbone
from leank.errors import out_of_memory
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank.typed import STRICT, BadConfig
from leank_train.data import HELD_OUT, Batch, RetrievalData, collate
from leank_train.forward.plan import to_device
from leank_train.objective import steering
from leank_train.run_folder import Run
from leank_train.running import parallel
from leank_train.running.preempt import SaveOnSignal, Signals
from leank_train.running.progress import Meter, StageProgress
from leank_train.running.recorder import AtomicCheckpointIO, Recorder, check_origin, cure_of, restoring
from leank_train.settings import RunConfig
from leank_train.stages import Stage, StageConfig, read_documents

log = logging.getLogger("leank_train")
LOOKS = TypeAdapter(list[tuple[int, float]], config=STRICT)
RISE = 0.2  # share of a stage in which the learning rate rises


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


def first_look(config: StageConfig) -> int:
    """Return the first step after which a stage may look at held-out documents: scores have fallen, or lr risen."""
    return math.ceil(config.steps * (steering.FALL if config.lam == steering.AUTO else RISE))


def best_look(looks: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return step and loss of the look with the smallest loss, the first of equals."""
    return min(looks, key=lambda look: look[1])


class EarlyStop(L.Callback):
    """Every few steps, measures the mask that the scores give on held-out documents, and keeps the best scores.

    The stage ends after `patience` looks in a row that found nothing better. All ranks see the loss of all documents,
    so they stop together. Checkpoints hold the looks (step, loss) and the best scores [L, H, D], None before a look.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config, self.first = config, first_look(config)
        self.looks: list[tuple[int, float]] = []
        self.best: Tensor | None = None
        self._batches: list[Batch] = []

    @property
    def over(self) -> bool:
        if not self.looks:
            return False
        since = len(self.looks) - 1 - self.looks.index(best_look(self.looks))
        return since >= self.config.patience

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Make the held-out documents; a stage that had ended when it was saved takes no step more."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, RetrievalData)
        # Lightning moves the batches of steps to the device, not these
        self._batches = [batch.to(module.device) for batch in data.held_out(self.config.heldout_documents)]
        if self.over:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Look, if it is time. Raises ValueError if the loss is not finite."""
        step = trainer.global_step
        if step < self.first or (step % self.config.heldout_every and step != trainer.max_steps):
            return
        assert isinstance(module, Stage)
        loss = module.heldout(self._batches)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of held-out documents is {loss}; set model.dtype=float32")
        self.looks.append((step, loss))
        if best_look(self.looks) == (step, loss):
            self.best = module.alpha.detach().cpu().clone()
        module.log(f"{type(module).__name__.lower()}/heldout", loss)
        if self.over:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, object]:
        return {"looks": self.looks, "best": self.best}

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise RuntimeError for best scores that the stage cannot have had."""
        best = checkpoint["callbacks"][self.state_key]["best"]
        assert isinstance(module, Stage)
        if best is not None:
            module.like_alpha(best)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looks, self.best = LOOKS.validate_python(state["looks"]), state["best"]

    def restore(self, stage: Stage) -> None:
        """Give the stage its best scores, if there was a look."""
        if self.best is not None:
            with torch.no_grad():
                stage.alpha.copy_(self.best)


def fit(current: Run, stage: Stage, name: str, logger: Logger | None, signals: Signals) -> Recorder:
    """Run one stage, go on from its checkpoint, or read what it left when it was done; its alpha is the result.

    Returns its course. Raises KeyboardInterrupt if the stage was interrupted before its end.
    """
    config, recorder = current.config, Recorder(stage.config.steps // 20)
    folder = current.out / "checkpoints" / name
    done, last = folder / "done.ckpt", folder / "last.ckpt"
    of = [name, current.fingerprint]
    stopper = EarlyStop(stage.config)
    trainer = stage_trainer(current, stage, recorder, name, logger, signals, stopper)
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
        if trainer.global_step < stage.config.steps and not stopper.over:
            raise KeyboardInterrupt(f"{name} stopped at step {trainer.global_step}; run the same command to go on")
        if stopper.looks:
            stopper.restore(stage)
            recorder.looks = stopper.looks
            at, loss = best_look(stopper.looks)
            if current.first:
                log.info("%s ended at step %d; held-out loss %.4g at step %d", name, trainer.global_step, loss, at)
    stage.finish()
    if trainer.is_global_zero:
        state = {"of": of, "alpha": stage.result.detach().cpu(), "record": recorder.state_dict()}
        write_checkpoint(done, state)
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
        plugins=[AtomicCheckpointIO([name, current.fingerprint])],
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
