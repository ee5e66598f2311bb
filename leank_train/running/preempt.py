"""Stop on a signal without losing a step: a handler sets a flag, the ranks agree at the end of a step, save and leave.

USR1 is Slurm's word that a job's time is nearly up (sbatch --signal=USR1@120): saved, and back into the queue. TERM
comes with scancel, or where Slurm itself requeues: saved. Nothing collective happens in a handler: the other ranks may
be in another collective, and both would wait for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Signals:
    """Which of SIGNALS has come; a context manager that listens. requeues: times that a job may requeue itself."""

    def __init__(self, requeues: int = 0) -> None:
        self.requeues, self.received, self.agreed = requeues, 0, False
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}  # the handlers that ours stand in for

    def listen(self) -> None:
        """Take the signals back from who took them since; does nothing outside of the context."""
        for number in self._before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._at_once:
            self.leave(first=True)

    def leave_at_once(self) -> None:
        """For what needs no other rank and has nothing to save: from here on a signal ends the process as it comes."""
        self._at_once = True
        if self.received:
            self.leave(first=True)

    def leave(self, first: bool) -> NoReturn:
        """End this process; the first of a job whose time is nearly up puts the job back into the queue.

        Raises SystemExit, which launchers do not take for a result; RuntimeError where Slurm refuses to requeue.
        """
        job, starts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
        again = bool(job) and self.received == signal.SIGUSR1 and starts < self.requeues
        if first and again:
            self._at_once = False  # requeueing sends TERM
            print(f"signal {self.received}: saved; job {job} goes back into the queue", flush=True)
            found = subprocess.run(["scontrol", "requeue", str(job)], capture_output=True, text=True)
            if found.returncode:
                raise RuntimeError(
                    f"scontrol requeue {job}: {found.stderr.strip()}; submit it with --requeue, or run the same "
                    "command again: it goes on from its checkpoint"
                )
        elif first:
            print(f"signal {self.received}: saved; the same command goes on (requeues={self.requeues})", flush=True)
        raise SystemExit(0 if again else 128 + self.received)

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class SaveOnSignal(L.Callback):
    """At the end of the step in which a signal came to any rank, all ranks save to `path` and end the fit."""

    def __init__(self, signals: Signals, path: Path) -> None:
        self.signals, self.path = signals, path

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Take back TERM: Lightning's handler broadcasts inside of it."""
        self.signals.listen()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Ask every rank; where one has a signal, save."""
        flag = torch.tensor(self.signals.received, device=module.device)
        number = int(trainer.strategy.reduce(flag, reduce_op="max"))
        if number:
            self.signals.received, self.signals.agreed = number, True
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def environments() -> list[SLURMEnvironment]:
    """Lightning's plugin for processes that srun started, without its own requeueing; none elsewhere."""
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    return [SLURMEnvironment(auto_requeue=False)]
