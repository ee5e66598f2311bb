"""The table of methods and the cost of the first token, on a CPU, small."""

import itertools

import pytest
import torch

from eval.cache import Sizes
from eval.inference.models import ModelConfig, load_config
from eval.methods.registry import REGISTRY, name_of
from scripts.bench import first_token, methods, one_method
from scripts.bench.common import ROOT
from scripts.bench.pictures import read_table


def test_methods_beside_dense(tmp_path, capsys, monkeypatch):
    """Every kind of pass; one that is not there costs the others nothing; a second run measures nothing again."""
    names = ["dense", "leank", "nonesuch", "h2o", "adakv", "gemfilter"]
    line = f"--shape reference --lengths 260 340 --new 2 --batches 1 largest --methods {' '.join(names)}"
    with pytest.raises(SystemExit, match="failed: nonesuch"):
        methods.main([str(tmp_path), *line.split()])
    rows = {(r["method"], r["length"], r["rows"]): r for r in read_table(tmp_path / "methods.csv")}
    names.remove("nonesuch")
    assert set(rows) == set(itertools.product(names, ("260", "340"), ("1", "largest")))
    for (name, length, asked), row in rows.items():
        parts = [row[part] for part in ("ttft_s", "prefill_s", "cache_s")]
        if asked == "1":
            assert float(parts[0]) == pytest.approx(float(parts[1]) + float(parts[2]))
        else:
            assert parts == [""] * 3
            assert float(row["gb"]) == pytest.approx(2 * float(rows[name, length, "1"]["gb"]), rel=0.02)
        assert row["batch"] == ("1" if asked == "1" else "2")
        assert float(row["token_ms"]) > 0
        assert (row["loop"], row["why_eager"], row["error"]) == ("eager", "no GPU", "")
    assert float(rows["leank", "340", "1"]["gb"]) < 0.8 * float(rows["dense", "340", "1"]["gb"])
    assert "nonesuch" in capsys.readouterr().err
    assert (tmp_path / "bytes.png").is_file()
    assert (tmp_path / "first_token.png").is_file()

    monkeypatch.setattr(one_method.Bench, "prefill", lambda *given: 1 / 0)
    methods.main([str(tmp_path), *line.split(" nonesuch")[0].split()])
    assert len((tmp_path / "methods.csv").read_text().splitlines()) == 1 + len(rows)


def test_what_does_not_fit_is_said_and_not_tried_again(tmp_path, monkeypatch, capsys):
    """At the largest batch a tenth less each time; a pass that runs out of memory costs its methods alone."""
    tried, repeated, prefill = [], one_method.repeated, one_method.Bench.prefill

    def full(cache, rows):
        repeated(cache, rows)
        tried.append(rows)
        if rows > 14:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def without_gemfilter(self, method, *given):
        if method.label == "gemfilter":
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return prefill(self, method, *given)

    monkeypatch.setattr(one_method, "most_rows", lambda held: 20)
    monkeypatch.setattr(one_method, "repeated", full)
    monkeypatch.setattr(one_method.Bench, "prefill", without_gemfilter)
    line = "--shape reference --lengths 200 --new 2 --batches 1 largest 16 --methods leank gemfilter"
    methods.main([str(tmp_path), *line.split()])
    assert tried == [20, 1, 18, 1, 16, 1, 14, 16]
    rows = read_table(tmp_path / "methods.csv")
    assert [(r["rows"], r["batch"]) for r in rows[:2]] == [("1", "1"), ("largest", "14")]
    assert [r["error"][:12] for r in rows] == ["", "", *["does not fit"] * 4]
    methods.main([str(tmp_path), *line.split()])
    assert tried[8:] == []
    assert "18 rows do not fit" in capsys.readouterr().out


def test_first_token_as_a_share_of_dense(tmp_path):
    """ASL at layers that are given, in one pass and in two, beside what it finds by itself."""
    line = "--shape reference --lengths 300 --layers 3 5 --budget 128 --repeats 1"
    for _ in range(2):
        first_token.main([str(tmp_path), *line.split()])
    rows = {(r["method"], r["asked"]): r for r in read_table(tmp_path / "first_token.csv")}
    assert len((tmp_path / "first_token.csv").read_text().splitlines()) == 1 + len(rows)
    assert float(rows["dense", "its own"]["share"]) == 1
    for name, anew in (("asl", False), ("asl_two_pass", True)):
        assert {asked for method, asked in rows if method == name} == {"its own", "3", "5"}
        row = rows[name, "3"]
        depth, expected = float(row["depth"]), float(row["expected"])
        assert (row["layer"], depth) == ("3", pytest.approx(4 / 7))
        less = expected - depth if anew else (expected - depth) / (1 - depth)
        assert 0 < less < 1.5  # of a prompt of 128 tokens
    assert rows["fastkv", "its own"]["layer"] == "5"  # of its configuration for this model
    assert rows["gemfilter", "its own"]["layer"] == "4"
    assert (tmp_path / "first_token.png").is_file()


def test_every_method_is_configured():
    """Every choice of the registry is measured; by_length hands on to another choice."""
    config, tokenizer = load_config(ModelConfig())
    mask = ROOT / "leank_train/assets/reference/mask_70pct.safetensors"
    seen = set()
    for name in [*methods.METHODS, "papers/kivi4_think"]:
        found = one_method.configured(name, "reference", mask, Sizes(16, 144), config, tokenizer)
        assert len(found) == (2 if "/" in name else 1)
        assert all(one.label.startswith(name.split("/")[-1]) for one in found)
        seen |= {name_of(choice) for one in found for choice in one.axes.values()}
        assert all(getattr(choice, "samples", 0) <= 8 for one in found for choice in one.axes.values())
    assert seen == {name for registry in REGISTRY.values() for name in registry} - {"by_length"}
