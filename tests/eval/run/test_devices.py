"""One evaluation on several devices: rows, progress and ends of one device."""

import json
import logging
import os
import signal
import time
from multiprocessing import current_process, get_context
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from leank.eval.__main__ import run
from leank.eval.inference.models import ModelConfig
from leank.eval.rows import Results, key_of, read
from leank.eval.run import devices
from leank.eval.run.build import composed
from leank.eval.run.replay import Replay
from leank.typed import BadConfig

OVERRIDES = (
    "benchmark.tasks=[niah_single_1,niah_multikey_2]", "benchmark.lengths=[320]", "benchmark.samples=3",
    "method=[dense,think]", "cache.sink=4", "cache.window=16", "cache.flush=4", "max_new_tokens=3",
    "sampling.temperature=0.7", "sampling.replies=2",
)  # fmt: skip


def rows(folder):
    """Rows by key, less what a clock says."""
    found = [(key_of(row), {k: v for k, v in row.items() if k != "seconds"}) for row in read(folder)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture
def evaluate(model_folder, tmp_path, monkeypatch):
    """An evaluation in a folder of `tmp_path`, whose processes are forks, which have imported all."""
    monkeypatch.setattr(devices, "START", "fork")
    return lambda name, *more: run(composed([*OVERRIDES, f"model.name={model_folder}", *more]), tmp_path / name)


@pytest.fixture(scope="module")
def of_one(model_folder, tmp_path_factory):
    """The rows of one device."""
    out = tmp_path_factory.mktemp("one")
    assert run(composed([*OVERRIDES, f"model.name={model_folder}"]), out) == 24
    return rows(out)


def failing(monkeypatch, device, end):
    """Let the process of a device end in its second batch; another one that is as far waits for its own end."""
    answers, batches = Replay.answers, []

    def ends(self, *given):
        batches.append(given)
        if len(batches) == 2:
            end() if current_process().name == f"device {device}" else time.sleep(300)
        return answers(self, *given)

    monkeypatch.setattr(Replay, "answers", ends)


def test_rows_of_two_devices_are_those_of_one(evaluate, of_one, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert evaluate("two", "devices=2") == 24
    assert rows(tmp_path / "two") == of_one
    assert {file.name for file in (tmp_path / "two").glob("*.jsonl")} == {
        "results-0-of-2.jsonl",
        "results-1-of-2.jsonl",
    }
    assert (tmp_path / "two/report.html").exists()
    lines = [record.getMessage() for record in caplog.records if " replayed: batch " in record.getMessage()]
    assert len(lines) == 2  # a line for each task, as one device has
    assert "batch 6 of 6, 24 new rows" in lines[-1]


def test_what_a_device_warns_of_is_said_once(evaluate, caplog):
    evaluate("long", "devices=2", "cache.window=1024")
    said = [one.getMessage() for one in caplog.records if "nothing is compressed" in one.getMessage()]
    assert len(said) == len({*said}) > 0


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        (lambda: torch.zeros(2) @ torch.zeros(3), ChildProcessError, "RuntimeError: .* with devices=1 says more"),
        (lambda: int("x"), ValueError, "invalid literal"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ChildProcessError, "its process was ended by SIGKILL"),
        (lambda: os._exit(0), ChildProcessError, "its process ended with 0"),
    ],
)  # fmt: skip
def test_a_device_that_fails_ends_all_and_the_same_command_goes_on(
    evaluate, of_one, tmp_path, monkeypatch, end, kind, message
):
    monkeypatch.setattr("leank.eval.report.write_report", lambda *_: None)
    with monkeypatch.context() as patch:
        failing(patch, 1, end)
        with pytest.raises(kind, match=f"^device 1 of 2: {message}"):
            evaluate("two", "devices=2")
    there = len(rows(tmp_path / "two"))
    assert 4 <= there < 24  # the first batch of that device at least
    assert evaluate("two", "devices=3") == 24 - there  # on any number of them
    assert rows(tmp_path / "two") == of_one
    assert evaluate("two") == evaluate("two", "devices=2") == 0


def test_a_start_waits_for_no_process(monkeypatch):
    """What a start hands to a process fits its pipe, of 64 KB on Linux; the job and its tokenizer would not."""
    started = []

    class Process:
        pid, exitcode = 1, 0

        def __init__(self, target, args, name, daemon):
            started.append((name, target, args[:-1]))

        def __getattr__(self, what):
            return lambda *given: None

    context = type("Context", (), {"Process": Process, "Pipe": get_context().Pipe})
    monkeypatch.setattr(devices, "get_context", lambda kind: context)
    with devices._processes([None, None, None]) as made:
        assert len(made) == 3
    assert [name for name, *_ in started] == ["device 0", "device 1", "device 2"]
    assert all(len(ForkingPickler.dumps(one)) < 4096 for one in started)


def test_costly_batches_go_first_to_whichever_device_is_free(evaluate, tmp_path, monkeypatch):
    """Device 1 is slow in its first batch of twelve, and leaves the others to device 0, which waits for this one.

    Both files stay locked until the last batch is done: a second run of the same command is refused until then.
    """
    monkeypatch.setattr("leank.eval.report.write_report", lambda *_: None)
    answers, close = Replay.answers, Results.close
    own = [tmp_path / f"two/results-{number}-of-2.jsonl" for number in range(2)]

    begun = get_context("fork").Event()

    def slow(self, *given):
        until = time.monotonic() + 60
        if current_process().name == "device 1":
            begun.set()
            while len(own[0].read_text().splitlines()) < 11 * 4:
                assert time.monotonic() < until
                time.sleep(0.01)
        assert begun.wait(60)
        return answers(self, *given)

    def checked(self):
        assert sum(len(file.read_text().splitlines()) for file in own) == 48
        close(self)

    monkeypatch.setattr(Replay, "answers", slow)
    monkeypatch.setattr(Results, "close", checked)
    assert evaluate("two", "devices=2", "benchmark.lengths=[320,400]") == 48
    assert [row["length"] for row in map(json.loads, own[0].read_text().splitlines())] == [400] * 20 + [320] * 24
    assert len(own[1].read_text().splitlines()) == 4


def test_devices_share_a_shard(evaluate, tmp_path, monkeypatch):
    """Two machines with two devices each do every batch once."""
    monkeypatch.setattr("leank.eval.report.write_report", lambda *_: None)
    assert evaluate("all", "devices=2", "shard=1/2") + evaluate("all", "devices=2", "shard=0/2") == 24
    assert {file.name for file in (tmp_path / "all").glob("*.jsonl")} == {f"results-{i}-of-4.jsonl" for i in range(4)}


def test_files_are_named_by_the_devices_asked_for(evaluate, tmp_path, monkeypatch):
    """One batch starts one process, which finds the file of its number locked by a run of as many devices."""
    monkeypatch.setattr("leank.eval.report.write_report", lambda *_: None)
    one_batch = "devices=2", "benchmark.tasks=[niah_single_1]", "benchmark.samples=1"
    with Results(tmp_path / "all", "-0-of-2"), pytest.raises(OSError, match=r"0-of-2\.jsonl is being written"):
        evaluate("all", *one_batch)
    assert evaluate("all", *one_batch) == 4
    assert {file.name for file in (tmp_path / "all").glob("*.jsonl")} == {"results-0-of-2.jsonl"}


def test_devices_that_are_not_there_are_refused(evaluate, monkeypatch):
    job = type(
        "Job", (), {"settings": type("Settings", (), {"devices": 3}), "model": ModelConfig("tiny", device="cuda")}
    )
    monkeypatch.setattr(ModelConfig, "torch_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert devices.visible_gpus(job) == ["7", "5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.visible_gpus(job) == ["0", "1", "2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadConfig, match="devices=3: there are 2 GPUs"):
        devices.visible_gpus(job)
    monkeypatch.setattr(ModelConfig, "torch_device", torch.device("cuda:1"))
    with pytest.raises(BadConfig, match=r"model\.device=cuda is one GPU, and devices=3 takes several"):
        devices.visible_gpus(job)
    with pytest.raises(BadConfig, match="devices=0"):
        evaluate("none", "devices=0")
