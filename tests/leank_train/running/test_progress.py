"""A terminal shows a bar; a log file gets a line now and then, with the time left, and no carriage return."""

import io
from types import SimpleNamespace

import pytest

from leank_train.running import progress
from leank_train.running.progress import PHASES, Meter, StageProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def lines(clock, total, seconds, done=0):
    """What a phase of `total` steps of so many seconds each writes to a log file."""
    out = io.StringIO()
    meter = Meter("stage1: learns", total, done=done, out=out)
    for _ in range(done, total):
        clock.now += seconds
        meter.advance(1, {"loss": 0.123456})
    meter.close()
    assert "\r" not in out.getvalue()
    assert out.getvalue().endswith("\n")
    return out.getvalue().splitlines()


def test_a_log_file_gets_a_line_now_and_then(clock):
    found = lines(clock, 1000, 1.0)
    assert found[0] == "stage1: learns: 1000 steps"
    assert found[1] == "stage1: learns: 5 of 1000 steps, loss 0.1235; 00:05 so far, about 16:35 left"
    assert found[-1] == "stage1: learns: 1000 of 1000 steps, loss 0.1235; took 16:40"
    assert len(found) == 2 + 995 // 30 + 1  # one per half a minute, whatever the number of steps


def test_a_short_phase_is_two_lines(clock):
    assert lines(clock, 3, 0.1) == ["stage1: learns: 3 steps", "stage1: learns: 3 of 3 steps, loss 0.1235; took 00:00"]


def test_the_time_left_counts_the_steps_of_this_run_alone(clock):
    found = lines(clock, 100, 10.0, done=90)
    assert found[0] == "stage1: learns: 100 steps, 90 of them done before"
    assert found[1] == "stage1: learns: 91 of 100 steps, loss 0.1235; 00:10 so far, about 01:30 left"


def test_a_terminal_shows_a_bar():
    out = Terminal()
    meter = Meter("stage1: learns", 2, out=out)
    meter.advance(1)
    meter.advance(1, {"loss": 0.5})
    meter.close()
    assert "\rstage1: learns: 100%" in out.getvalue()
    assert "2/2" in out.getvalue()


def test_only_the_first_process_reports_and_goes_on_where_it_stopped(capsys):
    trainer = SimpleNamespace(max_steps=5, global_step=3, progress_bar_metrics={"loss": 0.5, "v_num": "x"})
    trainer.loggers = []
    for enabled in (False, True):
        bar = StageProgress("stage2")
        if not enabled:
            bar.disable()
        bar.on_train_start(trainer)
        for trainer.global_step in (4, 5):
            bar.on_train_batch_end(trainer, None)
        bar.teardown()
        trainer.global_step = 3
        begun, *rest = capsys.readouterr().out.splitlines() or [""]
        if enabled:
            assert begun == f"stage2: {PHASES['stage2']}: 5 steps, 3 of them done before"
            assert rest[-1].startswith(f"stage2: {PHASES['stage2']}: 5 of 5 steps, loss 0.5; took")
        else:
            assert not begun
