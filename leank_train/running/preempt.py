"""Stop on a signal without losing a step: a handler sets a flag; at the end of a step the ranks agree, save and leave.

Slurm sends USR1 when a job's time is nearly up (sbatch --signal=USR1@120): the run saves, and the job goes back into
the queue. TERM comes with scancel, or when Slurm itself requeues the job, and INT with Ctrl-C: the run saves. A second
Ctrl-C does not wait for the end of the step. A handler starts no collective operation, because other ranks may be in
another one, and both would wait for ever.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from leank.cli import again, stopped

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Signals:
    """Listens for SIGNALS within its context; `kept` says what is saved and how to go on."""

    def __init__(self, requeues: int = 0, kept: Callable[[], str] | None = None) -> None:
        self.requeues = requeues  # how many times a job may put itself back into the queue
        self.received, self.agreed = 0, False  # the first signal, 0 if none; whether ranks have stopped because of it
        self.kept = kept or (lambda: f"to go on: {again('leank_train')}")
        self._process = os.getpid()  # data workers inherit the handlers, and the signal is not for them
        self._at_once = False
        self._before: dict[signal.Signals, Handler] = {}  # handlers that `_note` replaces

    def listen(self) -> None:
        """Note signals from here on, also after a library has set handlers; outside of the context do nothing."""
        self._at_once = False
        for number in self._before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        impatient = number == self.received == signal.SIGINT
        self.received = self.received or number
        if self._at_once or impatient:
            self.leave(first=True)

    def leave_at_once(self) -> None:
        """Let a signal end the process at once from here on, where no rank waits for it and nothing is to be saved."""
        self._at_once = True
        if self.received:
            self.leave(first=True)

    def leave(self, first: bool) -> NoReturn:
        """Raise SystemExit; after USR1 the first process requeues the job (RuntimeError if Slurm refuses)."""
        job, starts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
        again = bool(job) and self.received == signal.SIGUSR1 and starts < self.requeues
        if first and again:
            self._at_once = False  # Slurm sends TERM to a job that it requeues
            print(f"signal {self.received}: saved; job {job} goes back into the queue", flush=True)
            found = subprocess.run(["scontrol", "requeue", str(job)], capture_output=True, text=True)
            if found.returncode:
                raise RuntimeError(
                    f"scontrol requeue {job}: {found.stderr.strip()}; submit it with --requeue, or run the same "
                    "command again: it goes on from its checkpoint"
                )
        elif first:
            print(stopped("leank_train", self.received, self.kept()), file=sys.stderr, flush=True)
        raise SystemExit(0 if again else 128 + self.received)

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class SaveOnSignal(L.Callback):
    """All ranks save to `path` and end the fit, at the end of the step in which a signal came to any of them."""

    def __init__(self, signals: Signals, path: Path) -> None:
        self.signals, self.path = signals, path

    def on_train_start(self, trainer: L.Trainer, *_: object) -> None:
        """Replace Lightning's handler of TERM, which broadcasts within the handler; from here on, steps are saved."""
        self.signals.listen()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        flag = torch.tensor(self.signals.received, device=module.device)
        number = int(trainer.strategy.reduce(flag, reduce_op="max"))
        if number:
            self.signals.received, self.signals.agreed = number, True
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def environments() -> list[SLURMEnvironment]:
    """Lightning's plugin for processes that srun started, with its own requeueing off; an empty list elsewhere."""
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    return [SLURMEnvironment(auto_requeue=False)]
