"""Seconds of a step by the clock, and what it runs on the GPU: kernels, by kind, and their time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

WARM_UP, PROFILED = 3, 4  # steps before those that are timed, and steps under the profiler after them
# Without it, CUPTI stays in the process after the first profile, and a launch of 1,432 captured kernels takes the host
# 0.4 to 0.5 ms instead of 0.01 to 0.05: docs/results/generation.md#profiled-processes.
TEARDOWN = "TEARDOWN_CUPTI"
# in the names of kernels
ATTENTIONS = ("decode", "flash", "fmha", "sdpa", "attention", "attend", "score_", "choose", "softmax")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")


def wait() -> None:
    """Wait until the GPU has done its work, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear() -> None:
    """Free what no name holds any more, on the host and on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name() -> str:
    """The GPU's name, or CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def seconds(step: Callable[[], None], steps: int, cuda: bool) -> float:
    """Seconds of one step, over `steps` of them."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def each_ms(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps as the GPU sees them, from the end of the one before."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(ends)]


@dataclass(frozen=True)
class Launches:
    """A kernel (or copy) by name: launches and milliseconds on the GPU of one step."""

    name: str
    count: float
    ms: float

    @property
    def kind(self) -> str:
        """The column that its time belongs to: attention_ms, products_ms or other_ms."""
        name = self.name.lower()
        if any(part in name for part in ATTENTIONS):
            return "attention_ms"
        return "products_ms" if any(part in name for part in PRODUCTS) else "other_ms"


def profiled(step: Callable[[], None], steps: int = PROFILED) -> list[Launches]:
    """What one step runs on the GPU, the longest first.

    The sum of kernels is the figure to compare across the cases of one process: from about the fourth on, a step takes
    0.4 us more per kernel by the clock, for a reason that is not known (docs/results/generation.md#later-graphs).

    Afterwards the profiler is taken down, so that later launches take what they took before. TEARDOWN_CUPTI=0 in the
    environment leaves it there.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault(TEARDOWN, "1")  # Kineto reads it when a session starts and when it ends
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    _let_go()
    launches = [
        Launches(event.key, event.count / steps, event.self_device_time_total / 1e3 / steps)
        for event in found.key_averages()
        if event.device_type != DeviceType.CPU
    ]
    return sorted(launches, key=lambda launch: -launch.ms)


def _let_go() -> None:
    """Give the profiler what it needs to be taken down: a little time, for its own thread, and then a call of CUDA."""
    for _ in range(5):
        time.sleep(0.02)
        torch.cuda.synchronize()


def where(found: Iterable[Launches]) -> dict[str, float]:
    """Milliseconds of one step on the GPU, in all and by kind of kernel, and how many kernels it launches.

    Attention in plain PyTorch has no kernel of its own: it is among the products and the others.
    """
    total = {"gpu_ms": 0.0, "attention_ms": 0.0, "products_ms": 0.0, "other_ms": 0.0, "kernels": 0.0}
    for launches in found:
        total[launches.kind] += launches.ms
        total["gpu_ms"] += launches.ms
        total["kernels"] += launches.count
    return total
