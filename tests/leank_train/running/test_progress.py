"""A terminal shows a bar; a log file gets a line now and then, and no carriage return."""

import io
import sys
from types import SimpleNamespace

import pytest

from leank_train.running import progress
from leank_train.running.progress import PHASES, Meter, StageProgress


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
