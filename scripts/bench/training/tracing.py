"""A trace of some training steps, and the share of their time in which the GPU idles."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from lightning.pytorch.loggers import Logger
from torch.profiler import ProfilerActivity, profile

from leank.files import write_json
from scripts.bench.common.timing import wait

SETTLE = 5  # steps between the profiler's start-up and the trace: they use up the data made meanwhile (4 per worker)
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
WORK_CPU = ("cpu_op",)


class Trace(Logger):
    """Traces training steps into save_dir/trace.json.gz and writes their seconds to save_dir/trace.json.

    It is a logger because Lightning calls one at the end of every step. `traced_training` puts it in the place of the
    run's own logger.
    first: steps before the traced ones. steps: how many are traced.
    """

    name, version = "trace", None

    def __init__(self, save_dir: Path, first: int, steps: int) -> None:
        super().__init__()
        self.out, self.first, self.steps, self.taken = save_dir, first, steps, 0
        self.activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Ignore the settings: a trace has none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Count a step that ended, and start or stop the trace."""
        self.taken += 1
        if self.taken == self.first - SETTLE:
            warm_up = profile(activities=[self.activity])
            warm_up.start()  # the first takes seconds
            warm_up.stop()
        if self.taken == self.first:
            self.profile = profile(activities=[self.activity])
            wait()
            self.profile.start()
            self.begin = time.perf_counter()
        if self.taken == self.first + self.steps:
            wait()
            seconds = time.perf_counter() - self.begin
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.out / "trace.json.gz"))
            write_json(self.out / "trace.json", {"steps": self.steps, "seconds": seconds})


def traced_training(first: int, steps: int) -> None:
    """`python -m leank_train` with the arguments of this process, traced."""
    from leank_train import train as training
    from leank_train.__main__ import main as command

    def trace(config: object, folder: Path) -> Trace:
        return Trace(folder, first, steps)

    with patch.object(training, "make_logger", trace):
        command()


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of (begin, end) as spans that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def idle(trace: Path, seconds: float) -> dict[str, float]:
    """Of a chrome trace over `seconds`: the share of time without work, and the longest gap between work in ms.

    Raises ValueError for a trace without work.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK]
    work = work or [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK_CPU]
    spans = merged([(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in work])  # microseconds
    if not spans:
        raise ValueError(f"{trace} holds no kernels: is CUPTI there, and has the GPU no other profiler?")
    busy = sum(end - begin for begin, end in spans) / 1e6
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    return {"seconds": seconds, "busy_seconds": busy, "idle": 1 - busy / seconds, "gap_ms": max(gaps, default=0) / 1e3}
