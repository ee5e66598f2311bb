"""How far a phase of a run is: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from leank.data_gen.amount import amount, plural

PHASES = {
    "stage1": "learns a score for every key channel",
    "stage2": "learns which channels stay at the pruning ratio",
}
SECONDS_PER_LINE = 30.0  # in a log file
FIRST_ESTIMATE = 5.0  # seconds after which the first line says how long the phase will take


class Meter:
    """Reports the steps of one phase. A log file gets whole lines, and no carriage return.

    phase: name of the phase and what it does.
    total: number of steps.
    unit: name of a step.
    done: steps that an earlier run has done.
    out: where to report; sys.stdout by default.
    """

    def __init__(self, phase: str, total: int, unit: str = "step", done: int = 0, out: TextIO | None = None) -> None:
        self.phase, self.total, self.unit, self.done, self.before = phase, total, unit, done, done
        self.out = out or sys.stdout
        self.started = time.monotonic()
        self._next_line = self.started + FIRST_ESTIMATE
        self._bar: tqdm | None = None
        if self.out.isatty():
            self._bar = tqdm(
                desc=phase, total=total, initial=done, unit=f" {plural(unit)}", dynamic_ncols=True, file=self.out,
                smoothing=0.1,
            )  # fmt: skip
        else:
            begun = f", {done} of them done before" if done else ""
            self._line(f"{amount(total, unit)}{begun}")

    def advance(self, steps: int, figures: Mapping[str, object] | None = None) -> None:
        """Report that so many more steps are done; figures: name -> value of the last step."""
        self.done += steps
        if self._bar is not None:
            if figures:
                self._bar.set_postfix({name: _short(value) for name, value in figures.items()}, refresh=False)
            self._bar.update(steps)
        elif (now := time.monotonic()) >= self._next_line or self.done == self.total:
            self._next_line = now + SECONDS_PER_LINE
            shown = "".join(f", {name} {_short(value)}" for name, value in (figures or {}).items())
            self._line(f"{self.done} of {amount(self.total, self.unit)}{shown}; {self._time(now)}")

    def close(self) -> None:
        """End the bar; a log file has had its last line."""
        if self._bar is not None:
            self._bar.close()

    def _time(self, now: float) -> str:
        """Time since the phase began, and about how much is left."""
        passed = now - self.started
        if self.done == self.total:
            return f"took {tqdm.format_interval(passed)}"
        left = passed / max(1, self.done - self.before) * (self.total - self.done)
        return f"{tqdm.format_interval(passed)} so far, about {tqdm.format_interval(left)} left"

    def _line(self, text: str) -> None:
        print(f"{self.phase}: {text}", file=self.out, flush=True)


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


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
