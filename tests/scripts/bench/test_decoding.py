"""The measurements of decoding on a CPU, small: that they run, and that what they say is what the cache says."""

import csv
from types import SimpleNamespace

import pytest
import torch

from leank.eval.cache import Sizes
from leank.eval.cache.graph import CAPTURE_FOR
from leank.eval.inference.models import ModelConfig, load_model
from scripts.bench import decoding
from scripts.bench.common import Decoding, Launches, Table, by_kind
from scripts.bench.decoding import contenders, fill


def read(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_memory_saved_is_the_masks_ratio(tmp_path, capsys):
    decoding.main(["memory", str(tmp_path), "--layers", "2", "--context", "2048", "--batch", "1", "2"])
    first = capsys.readouterr().out.splitlines()[0]
    shares = [float(word.rstrip("%;,")) for word in first.split() if word.rstrip(";,").endswith("%")]
    for measured, expected in zip(shares[::2], shares[1::2], strict=True):
        assert measured == pytest.approx(expected, abs=3)
    rows = read(tmp_path / "memory.csv")
    assert [r["batch"] for r in rows] == ["1", "2"]
    assert all(float(r["leank_gb"]) < float(r["dense_gb"]) for r in rows)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_generate(tmp_path):
    line = "--shape reference --case 1x300 --new 17 --warm-up 1 --only LeanK"
    decoding.main(["generate", str(tmp_path), *line.split()])
    rows = read(tmp_path / "generate.csv")
    assert [(row["cache"], row["loop"]) for row in rows if row["step_ms"]] == [
        ("LeanK", loop) for loop in decoding.LOOPS
    ]


def test_a_step_is_captured_before_the_calls_that_are_timed(monkeypatch):
    """A call too short to capture would be timed as an eager one, and taken from a longer one of replays."""
    called = []

    def call(model, contender, rows, prompt, new, captured, cache):
        called.append(new)
        return 1.0 + 0.5 * new + (100 if len(called) == 1 else 0)

    monkeypatch.setattr(decoding, "call", call)
    contender = SimpleNamespace(name="LeanK", make=lambda rows, room: SimpleNamespace(rows=rows, room=room))
    model, row = SimpleNamespace(device=torch.device("cpu")), {}
    decoding.generate(row, model, contender, 2, 100, CAPTURE_FOR, 2, captured=True)
    assert called == [CAPTURE_FOR + 2, 2, 2, CAPTURE_FOR + 2, CAPTURE_FOR + 2]
    assert (row["step_ms"], row["first_tokens_s"]) == (500, 2)
    assert row["first_call_s"] - row["later_call_s"] == 100
    with pytest.raises(ValueError, match="too few to capture"):
        decoding.generate({}, model, contender, 2, 100, CAPTURE_FOR - 1, 2, captured=True)


def test_a_table_keeps_what_a_killed_run_measured_and_measures_failures_again(tmp_path):
    def work(row):
        row["ms"] = 1 / row["batch"]

    table = Table(tmp_path / "out/table.csv", ("cache", "batch"))
    for batch in (0, 2):
        table.add({"cache": "LeanK", "batch": batch}, work)
    with pytest.raises(SystemExit, match="failed: LeanK 0"):
        table.check()
    again = Table(table.path, table.keys)
    assert [again.has({"cache": "LeanK", "batch": batch}) for batch in (0, 2)] == [False, True]
    again.add({"cache": "LeanK", "batch": 2}, lambda row: 1 / 0)
    again.check()


def test_kernels_by_kind():
    names = {"decode": "attention_ms", "flash_fwd_splitkv_combine_kernel": "attention_ms",
             "nvjet_tst_128x8_64x12_v_bz_splitK_TNT": "products_ms", "gemvx::kernel": "products_ms",
             "Memcpy DtoD (Device -> Device)": "other_ms"}  # fmt: skip
    assert {name: Launches(name, 1, 1).kind for name in names} == names
    assert by_kind([Launches("decode", 2, 1.5), Launches("nvjet", 7, 3), Launches("add", 1, 0.5)]) == {
        "gpu_ms": 5, "attention_ms": 1.5, "products_ms": 3, "other_ms": 0.5, "kernels": 10}  # fmt: skip


def test_every_cache_decodes_what_the_model_does():
    """fill() and Decoding against a plain loop over the same keys and values."""
    found, model = [], load_model(ModelConfig())
    for contender in contenders(model, torch.ones(7, 4, 64, dtype=torch.bool), Sizes()):
        model.set_attn_implementation(contender.attention)
        cache = contender.make(2, 340)
        torch.manual_seed(0)
        fill(model, cache, 2, 300)
        steps = Decoding(model, cache, torch.full((2, 1), 300))
        tokens = []
        for _ in range(5):
            steps.step()
            tokens.append(steps.token.flatten().tolist())
        assert steps.loop.positions.tolist() == [[305], [305]]
        found.append(tokens)
    assert found[1:] == found[:1] * 3
