"""What the benchmark of generate() times."""

from types import SimpleNamespace

import pytest
import torch

from leank.eval.cache.graph import CAPTURE_FOR
from scripts.bench.decoding import generate
from scripts.bench.pictures import read_table


def test_a_step_is_captured_before_the_calls_that_are_timed(monkeypatch):
    """A call too short to capture would be timed as an eager one, and taken from a longer one of replays."""
    called = []

    def call(model, contender, rows, prompt, new, captured, cache):
        called.append(new)
        return 1.0 + 0.5 * new + (100 if len(called) == 1 else 0)

    monkeypatch.setattr(generate, "call", call)
    contender = SimpleNamespace(name="LeanK", make=lambda rows, room: SimpleNamespace(rows=rows, room=room))
    model = SimpleNamespace(device=torch.device("cpu"))
    row = generate.per_token(model, contender, 2, 100, CAPTURE_FOR, 2, captured=True)
    assert called == [CAPTURE_FOR + 2, 2, 2, CAPTURE_FOR + 2, CAPTURE_FOR + 2]
    assert (row["step_ms"], row["first_tokens_s"]) == (500, 2)
    assert row["first_call_s"] - row["later_call_s"] == 100
    with pytest.raises(ValueError, match="too few to capture"):
        generate.per_token(model, contender, 2, 100, CAPTURE_FOR - 1, 2, captured=True)


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    line = "--shape reference --case 1x40 2x40 --new 17 --warm-up 1 --only LeanK"
    measured = []
    monkeypatch.setattr(generate, "per_token", lambda *given: measured.append(given[-1]) or {"step_ms": 7.0})
    monkeypatch.setattr(generate, "decode", lambda *given: 1 / 0)
    for _ in range(2):
        with pytest.raises(SystemExit, match="failed: LeanK"):
            generate.main([str(tmp_path), *line.split()])
    assert measured == [False, True] * 2
    rows = read_table(tmp_path / "generate.csv")
    found = {(r["batch"], r["loop"]): r["step_ms"] for r in rows}
    assert len(rows) == len(found) == 6
    for batch in "12":
        assert found[batch, "model.generate"] == found[batch, "cache.generate"] == "7.0"
        assert found[batch, "benchmark loop"] == ""
