"""A terminal shows a bar; a log file gets a line now and then, and no carriage return."""

import io
from types import SimpleNamespace

import pytest

from leank_train.running import progress
from leank_train.running.progress import PHASES, Meter, StageProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("total", "seconds", "done"), [(1000, 1.0, 0), (3, 0.1, 0), (100, 10.0, 90)])
def test_a_log_file_gets_a_line_now_and_then(monkeypatch, total, seconds, done):
    """One at the start, one after 5 seconds and each half a minute from then on, and one at the end."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    out = io.StringIO()
    meter = Meter("stage1: learns", total, done=done, out=out)
    for _ in range(done, total):
        clock.now += seconds
        meter.advance(1, {"loss": 0.123456})
    meter.close()
    assert "\r" not in out.getvalue()
    first, *between, last = out.getvalue().splitlines()
    assert first == f"stage1: learns: {done} of {total} steps; 00:00 so far, about ? left"
    assert last.startswith(f"stage1: learns: {total} of {total} steps; ")
    assert last.endswith(" left, loss=0.123")
    after = seconds * (total - done)
    assert abs(len(between) - (1 + (after - 5) // 30 if after > 5 else 0)) <= 1


def test_a_terminal_shows_a_bar():
    out = Terminal()
    meter = Meter("stage1: learns", 2, out=out)
    meter.advance(1)
    meter.advance(1, {"loss": 0.5})
    meter.close()
    assert "\rstage1: learns: 100%" in out.getvalue()
    assert "2/2" in out.getvalue()


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
    told = capsys.readouterr().out.splitlines()
    if not enabled:
        assert told == []
        return
    assert told[0].startswith(f"stage2: {PHASES['stage2']}: 3 of 5 steps;")
    assert told[-1].startswith(f"stage2: {PHASES['stage2']}: 5 of 5 steps;")
    assert told[-1].endswith("loss=0.5")
