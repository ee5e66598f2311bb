"""What a stage keeps while it runs: its course, checkpoints that are never half-written, a bar with the time left."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO

from leank_train.common.files import write_bytes
from leank_train.common.tensor_files import read_checkpoint, write_checkpoint

BINS = 50
PREVIOUS = "previous.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all and are checked when read; the one before is kept beside the last."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """A checkpoint is small (alpha and two moments): made in memory, written at once."""
        last = Path(path)
        if last.exists():
            write_bytes(last.with_name(PREVIOUS), last.read_bytes())
        write_checkpoint(last, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Raises DamagedFile, which says how to go on; nothing is unpickled, whatever `weights_only` says."""
        cure = "remove it to start the stage anew"
        if (previous := Path(path).with_name(PREVIOUS)).exists():
            cure = f"copy {previous} over it to go on from the checkpoint before, or {cure}"
        return read_checkpoint(path, cure, map_location)


class Recorder(L.Callback):
    """Losses, learning rate and seconds of every step, a histogram of alpha every `every` steps, the seconds of all.

    Kept in checkpoints: a run that was stopped and went on has them whole.
    """

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.steps: list[dict[str, float]] = []
        self.histograms: list[tuple[int, list[int]]] = []
        self.times: list[float] = []  # seconds of every step, waiting for its data included; the first: set-up, too
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock."""
        self._last = time.time()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Keep the step's values."""
        values = {k: float(v.detach()) for k, v in outputs.items() if k != "loss"}  # of this process alone
        now = time.time()  # reading the values has waited for the GPU
        self.times.append(now - self._last)
        self.seconds, self._last = self.seconds + self.times[-1], now
        step = trainer.global_step
        self.steps.append({"step": step, **values, "lr": trainer.optimizers[0].param_groups[0]["lr"]})
        if step % self.every == 0 or step == trainer.max_steps:
            alpha = module.alpha.detach().float().cpu()
            self.histograms.append((step, torch.histc(alpha, BINS, 0.0, 1.0).int().tolist()))

    def state_dict(self) -> dict[str, Any]:
        """The record so far."""
        return {"steps": self.steps, "histograms": self.histograms, "times": self.times, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an earlier record."""
        self.steps, self.histograms = list(state["steps"]), [tuple(h) for h in state["histograms"]]
        self.times, self.seconds = list(state.get("times", [])), state["seconds"]  # older checkpoints have no times


class Progress(TQDMProgressBar):
    """A bar over the steps of a stage, with the time that is left."""

    def __init__(self, name: str) -> None:
        super().__init__(refresh_rate=10 if not sys.stderr.isatty() else 1)
        self.name = name

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Count the steps, not the endless epoch."""
        super().on_train_start(trainer)
        self.train_progress_bar.reset(trainer.max_steps)
        self.train_progress_bar.initial = trainer.global_step
        self.train_progress_bar.set_description(self.name)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the bar of on_train_start: a stage is one epoch."""
