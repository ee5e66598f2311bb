"""How much of a training is over."""

from __future__ import annotations

import multiprocessing
import time

import torch
from lightning.fabric import Fabric

_TICK = 10  # steps after which the ranks agree on the time


class Clock:
    """Tells how much of the training is over: by steps, or by the seconds it has taken where a limit is given.

    Data workers read it too, which make their batches a little ahead.
    """

    def __init__(self, steps: int, limit: float | None, seconds: float) -> None:
        self.steps, self.limit, self.before, self.start = steps, limit, seconds, time.time()
        self.over = multiprocessing.Value("d", seconds / limit if limit else 0.0)

    def share(self, step: int) -> float:
        """The share that is over before step number `step`, counted from 0."""
        return self.over.value if self.limit else step / self.steps

    @property
    def here(self) -> float:
        """Seconds since this process began to train."""
        return time.time() - self.start

    @property
    def seconds(self) -> float:
        """Seconds of training in all."""
        return self.before + self.here

    def tick(self, step: int, fabric: Fabric) -> None:
        """Let the time go on, alike on every rank."""
        if self.limit and step % _TICK == 0:
            seconds = fabric.all_reduce(torch.tensor(self.seconds, device=fabric.device), reduce_op="mean")
            self.over.value = min(1.0, float(seconds) / self.limit)  # type: ignore[arg-type]
