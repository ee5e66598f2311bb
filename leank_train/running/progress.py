"""How far a phase of a run is: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from leank.data_gen.amount import plural

PHASES = {
    "stage1": "learns a score for every key channel",
    "stage2": "learns which channels stay at the pruning ratio",
}
LINE = "{desc}: {n_fmt} of {total_fmt}{unit}; {elapsed} so far, about {remaining} left{postfix}"  # in a log file
FIRST_LINE, BETWEEN_LINES = 5.0, 30.0  # seconds


class _Bar(tqdm):
    monitor_interval = 0  # no thread of tqdm's own: a run forks


class Meter:
    """Reports the steps of one phase. A log file gets whole lines, and no carriage return.

    phase: name of the phase and what it does.
    total: number of steps.
    unit: name of a step.
    done: steps that an earlier run has done.
    out: where to report; sys.stdout by default.
    """

    def __init__(self, phase: str, total: int, unit: str = "step", done: int = 0, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self._lines = not self.out.isatty()
        self._bar = _Bar(
            desc=phase, total=total, initial=done, unit=f" {plural(unit)}", dynamic_ncols=True, smoothing=0.1,
            file=io.StringIO() if self._lines else self.out, bar_format=LINE if self._lines else None,
        )  # fmt: skip
        self._next_line = time.monotonic() + FIRST_LINE
        if self._lines:
            print(self._bar, file=self.out, flush=True)

    @property
    def done(self) -> int:
        """Steps that are done."""
        return int(self._bar.n)

    def advance(self, steps: int, figures: Mapping[str, object] | None = None) -> None:
        """Report that so many more steps are done; figures: name -> value of the last step."""
        if figures:
            self._bar.set_postfix(figures, refresh=False)
        self._bar.update(steps)
        if self._lines and (time.monotonic() >= self._next_line or self.done == self._bar.total):
            self._next_line = time.monotonic() + BETWEEN_LINES
            print(self._bar, file=self.out, flush=True)

    def close(self) -> None:
        """End the bar; a log file has had its last line."""
        self._bar.close()


class StageProgress(ProgressBar):
    """Reports the steps of a stage, in the first process alone.

    name: stage1 or stage2.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._enabled = True
        self._meter: Meter | None = None

    def disable(self) -> None:
        """Lightning calls this in every process but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, *_: object) -> None:
        """Say what the stage does, and how many steps it has."""
        if self._enabled:
            phase = f"{self.name}: {PHASES[self.name]}"
            self._meter = Meter(phase, trainer.max_steps, done=trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Report the step, with loss and mean alpha."""
        if self._meter is not None:
            shown = self.get_metrics(trainer, module)
            shown.pop("v_num", None)  # the logger's name of the run
            self._meter.advance(trainer.global_step - self._meter.done, shown)

    def teardown(self, *_: object, **__: object) -> None:
        """End the bar, also where an error or a signal ends the stage."""
        if self._meter is not None:
            self._meter.close()
