"""Timing: a profile leaves nothing behind that slows what is timed after it."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from scripts.bench.common import TEARDOWN, profiled

KERNELS = 4000


@pytest.mark.parametrize(("given", "read"), [(None, "1"), ("0", "0")])
def test_a_profile_is_taken_down_unless_the_user_says_otherwise(monkeypatch, given, read):
    """Kineto asks the environment when a session starts, whether it may come back, and when it ends, whether to go."""
    asked = []

    class Session:
        def __init__(self, **_):
            pass

        def __enter__(self):
            asked.append(os.environ.get(TEARDOWN))
            return SimpleNamespace(key_averages=list)

        def __exit__(self, *_):
            asked.append(os.environ.get(TEARDOWN))

    monkeypatch.setenv(TEARDOWN, "to be restored")
    monkeypatch.delenv(TEARDOWN) if given is None else monkeypatch.setenv(TEARDOWN, given)
    monkeypatch.setattr("torch.profiler.profile", Session)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert profiled(lambda: None) == []
    assert asked == [read, read]


@pytest.mark.gpu
def test_a_graph_is_launched_as_fast_after_a_profile(monkeypatch):
    """With CUPTI left in the process, a launch takes the host 0.3 us per kernel and more; without it, tens in all."""
    monkeypatch.setenv(TEARDOWN, "1")
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x.add_(1)

    def launch():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        return time.perf_counter() - begin

    for _ in range(3):
        assert sum(launches.count for launches in profiled(graph.replay)) == KERNELS
        assert min(launch() for _ in range(10)) < 0.1e-6 * KERNELS
