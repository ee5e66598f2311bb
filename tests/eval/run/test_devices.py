"""One evaluation on several devices: rows, progress and ends of one device."""

import logging
import os
import signal

import pytest
import torch

from leank.eval.__main__ import run
from leank.eval.inference.models import ModelConfig
from leank.eval.rows import key_of, read
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
    """Let the process of a device end in its second batch."""
    answers, batches = Replay.answers, []

    def ends(self, *given):
        batches.append(given)
        if self.settings.shard.startswith(f"{device}/") and len(batches) == 2:
            end()
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


def test_devices_share_a_shard(evaluate, tmp_path, monkeypatch):
    """Two machines with two devices each do every batch once."""
    monkeypatch.setattr("leank.eval.report.write_report", lambda *_: None)
    assert evaluate("all", "devices=2", "shard=1/2") + evaluate("all", "devices=2", "shard=0/2") == 24
    assert {file.name for file in (tmp_path / "all").glob("*.jsonl")} == {f"results-{i}-of-4.jsonl" for i in range(4)}


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
