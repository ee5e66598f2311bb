"""A run that is told to stop saves itself and goes on; its progress is written down."""

import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from leank_train.running import progress
from leank_train.running.preempt import Signals
from leank_train.running.progress import PHASES, Meter, StageProgress
from leank_train.running.recorder import Recorder
from leank_train.train import run
from tests.helpers.ranks import two_ranks
from tests.helpers.tiny_run import VALIDATION, alpha, at_step, settings

NEVER = "checkpoint_every=1000"  # what is saved is saved by the signal


@pytest.fixture
def slurm_job(tmp_path, monkeypatch):
    """Pretend to be job 7 and return the file in which `scontrol` would find what it is asked."""
    asked = tmp_path / "asked"
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n[ ! -e {tmp_path}/refuse ] || {{ echo disabled >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return asked


@pytest.fixture(scope="module")
def whole(model_folder, tmp_path_factory):
    """The scores of a run that nothing has stopped."""
    out = tmp_path_factory.mktemp("whole")
    run(settings(model_folder, NEVER), out)
    return alpha(out)


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGUSR1), (6, signal.SIGTERM), (8, signal.SIGINT)])
def test_a_signal_saves_the_step_and_the_run_goes_on(model_folder, whole, tmp_path, monkeypatch, step, number):
    config, before = settings(model_folder, NEVER), [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with monkeypatch.context() as patch, Signals() as signals:
        patch.setattr(Recorder, "on_train_batch_end", Recorder.on_train_batch_end)  # is put back
        at_step(step, number)
        with pytest.raises(SystemExit) as stopped:
            run(config, tmp_path / "stopped", signals)
    assert stopped.value.code == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)] == before
    stage, done = ("stage1", step) if step <= 6 else ("stage2", step - 6)
    state = torch.load(tmp_path / f"stopped/checkpoints/{stage}/last.ckpt", weights_only=True)
    assert state["global_step"] == done
    assert not (tmp_path / "stopped/mask.safetensors").exists()
    monkeypatch.setattr(Recorder, "on_train_batch_end", Recorder.on_train_batch_end)
    taken = at_step(0)
    run(config, tmp_path / "stopped")
    assert len(taken) == 6 + 4 - step  # no step is done twice
    assert torch.equal(alpha(tmp_path / "stopped"), whole)


def test_a_signal_during_validation_ends_at_once(model_folder, tmp_path, monkeypatch):
    """Nothing is lost by it: the stages are done, and the other ranks have left."""
    config = settings(model_folder, *VALIDATION)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("leank_train.train.validate", lambda *args: os.kill(os.getpid(), signal.SIGUSR1))
    with Signals() as signals, pytest.raises(SystemExit):
        run(config, tmp_path, signals)
    assert (tmp_path / "mask.safetensors").exists()
    assert not (tmp_path / "metrics.json").exists()


def test_a_second_ctrl_c_does_not_wait_for_the_step(capsys):
    with Signals(kept=lambda: "3 steps are kept") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(SystemExit) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "leank_train: stopped by Ctrl-C; 3 steps are kept\n"


def test_ctrl_c_before_the_first_step_stops_at_once():
    with Signals() as signals:
        signals.leave_at_once()
        with pytest.raises(SystemExit) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped.value.code == 130


def leave(requeues, number=signal.SIGUSR1, first=True):
    signals = Signals(requeues)
    signals.received = number
    with pytest.raises(SystemExit) as stopped:
        signals.leave(first)
    return stopped.value.code


def test_only_the_first_rank_requeues_and_only_when_the_time_is_up(slurm_job, monkeypatch):
    assert leave(2) == 0
    assert slurm_job.read_text() == "requeue 7\n"
    assert leave(2, first=False) == 0  # the others end well, so that nothing kills the first before it has asked
    assert leave(2, signal.SIGTERM) == 128 + signal.SIGTERM  # scancel means it
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert leave(2) == leave(2, first=False) == 128 + signal.SIGUSR1
    assert slurm_job.read_text() == "requeue 7\n"


def test_a_refused_requeue_says_what_to_do(slurm_job, tmp_path):
    (tmp_path / "refuse").touch()
    signals = Signals(1)
    signals.received = signal.SIGUSR1
    with pytest.raises(RuntimeError, match=r"scontrol requeue 7: disabled; submit it with --requeue"):
        signals.leave(first=True)


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both(model_folder, tmp_path):
    process = two_ranks(model_folder, tmp_path, "out", "stage1.steps=2000", NEVER)
    while process.poll() is None and not list(tmp_path.glob("out/config.yaml")):
        time.sleep(0.05)
    for line in process.stdout:
        if "stage1:" in line:
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGTERM)  # not the first
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert (tmp_path / "out/checkpoints/stage1/last.ckpt").exists()


@pytest.mark.parametrize(("seconds", "between"), [(0.0, 3), (1e9, 0)])
def test_a_log_file_gets_a_line_now_and_then(monkeypatch, capsys, seconds, between):
    monkeypatch.setattr(progress, "BETWEEN_LINES", seconds)
    with Meter("stage1: learns", 12, done=9) as meter:
        for _ in range(3):
            meter.set_postfix({"loss": 0.123456}, refresh=False)
            meter.update()
    said = capsys.readouterr().out
    assert "\r" not in said
    lines = said.split("\n")
    assert lines[0] == "stage1: learns: 9 of 12 steps; 00:00 so far, about ? left"
    assert len([line for line in lines if line]) == between + 2
    assert lines[-3].startswith("stage1: learns: 12 of 12 steps; ")
    assert lines[-3].endswith(" left, loss=0.123")


def test_a_terminal_shows_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    with Meter("stage1: learns", 2) as meter:
        meter.update(2)
    assert "\rstage1: learns: 100%" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


@pytest.mark.parametrize("enabled", [False, True])
def test_only_the_first_process_reports_and_goes_on_where_it_stopped(capsys, enabled):
    trainer = SimpleNamespace(
        max_steps=5, global_step=3, progress_bar_metrics={"loss": 0.5, "v_num": "x"}, loggers=[]
    )  # fmt: skip
    bar = StageProgress("stage2")
    if not enabled:
        bar.disable()
    bar.on_train_start(trainer)
    for trainer.global_step in (4, 5):
        bar.on_train_batch_end(trainer, None)
    bar.teardown()
    told = [line for line in capsys.readouterr().out.splitlines() if line]
    if not enabled:
        assert told == []
        return
    assert told[0].startswith(f"stage2: {PHASES['stage2']}: 3 of 5 steps;")
    assert told[-1].startswith(f"stage2: {PHASES['stage2']}: 5 of 5 steps;")
    assert told[-1].endswith("loss=0.5")
