"""How far a phase of a run is: a bar in a terminal, a line now and then in a log file."""

import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from leank.data_gen.amount import plural

LINE = "{desc}: {n_fmt} of {total_fmt}{unit}; {elapsed} so far, about {remaining} left{postfix}"  # in a log file
BETWEEN_LINES = 15.0  # seconds


class Meter(tqdm):
    """Reports `total` steps on standard output, after `done` earlier ones; a log file gets whole lines.

    silent: in all processes of a run but the first.
    """

    monitor_interval = 0  # no thread of tqdm's own: a run forks

    def __init__(self, phase: str, total: int, unit: str = "step", done: int = 0, silent: bool = False) -> None:
        self.lines = not sys.stdout.isatty()
        form: dict[str, Any] = {"mininterval": BETWEEN_LINES, "miniters": 1, "bar_format": LINE} if self.lines else {}
        super().__init__(
            desc=phase, total=total, initial=done, unit=f" {plural(unit)}", file=sys.stdout, dynamic_ncols=True,
            smoothing=0.1, disable=silent, **form,
        )  # fmt: skip

    def display(self, *given: Any, **more: Any) -> None:
        """Show how far the phase is; tqdm calls this."""
        if self.lines:
            print(self, flush=True)
        else:
            super().display(*given, **more)


class StageProgress(ProgressBar):
    """Reports the steps of a stage, stage1 or stage2, in the first process alone; the module says what it learns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._enabled = True
        self._meter: Meter | None = None

    def disable(self) -> None:
        """Lightning calls this in every process but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._enabled:
            phase = f"{self.name}: learns {module.learned}"
            self._meter = Meter(phase, trainer.max_steps, done=trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        if self._meter is not None:
            shown = self.get_metrics(trainer, module)
            shown.pop("v_num", None)  # the logger's name of the run
            self._meter.set_postfix(shown, refresh=False)
            self._meter.update(trainer.global_step - self._meter.n)

    def teardown(self, *_: object, **__: object) -> None:
        """End the bar, also where an error or a signal ends the stage."""
        if self._meter is not None:
            self._meter.close()
