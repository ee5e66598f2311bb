"""The table of methods, on a CPU, small."""

import csv
import itertools

import pytest
import torch

from leank.eval.cache import Sizes
from leank.eval.cache.graph import DecodeLoop
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.methods import Method
from leank.eval.methods.registry import REGISTRY, name_of
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.run.replay import Replay, Settings
from scripts.bench import methods
from scripts.bench.common import ROOT
from tests.helpers.thinned import thinned


def read_table(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_methods_beside_dense(tmp_path, monkeypatch):
    """Every kind of pass, one row and several; a run that goes on measures nothing again; a failure costs its rows."""
    names = ["dense", "leank", "h2o", "gemfilter"]
    line = f"--shape reference --lengths 340 --new 2 --batches 1 largest --methods {' '.join(names)}".split()
    methods.main([str(tmp_path), *line])
    rows = {(r["method"], r["length"], r["rows"]): r for r in read_table(tmp_path / "methods.csv")}
    assert set(rows) == set(itertools.product(names, ("340",), ("1", "largest")))
    for (name, length, asked), row in rows.items():
        parts = [row[part] for part in ("ttft_s", "prefill_s", "cache_s")]
        if asked == "1":
            assert float(parts[0]) == pytest.approx(float(parts[1]) + float(parts[2]))
        else:
            assert parts == [""] * 3
            assert float(row["gb"]) == pytest.approx(2 * float(rows[name, length, "1"]["gb"]), rel=0.02)
        assert row["batch"] == ("1" if asked == "1" else "2")
        assert float(row["token_ms"]) > 0
        assert float(row["read_gb"]) == pytest.approx(float(row["formula_gb"] or row["read_gb"]), rel=0.01)
        assert float(row["read_gb"]) < float(row["gb"])
        assert row["loop"] == "eager"
    assert float(rows["leank", "340", "1"]["gb"]) < 0.8 * float(rows["dense", "340", "1"]["gb"])

    def full(*given):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(methods.Bench, "prefill", full)
    methods.main([str(tmp_path), *line])
    with pytest.raises(SystemExit, match="failed: snapkv 340 1; snapkv 340 largest"):
        methods.main([str(tmp_path), *line, "snapkv"])
    assert [r for r in read_table(tmp_path / "methods.csv") if not r["error"]] == [
        r | {"error": ""} for r in rows.values()
    ]


@pytest.fixture
def passed():
    """SnapKV's measurements, the method, its pass over a prompt, and the place of this pass."""
    bench = methods.Bench(Replay(load_model(ModelConfig()), load_config(ModelConfig())[1], Settings()), 2)
    method = Method("snapkv", tokens=SnapKV(budget=64), sink=0, window=32)
    prompt, _ = bench.prefill(method, 200, method.obs_queries)
    return bench, method, prompt, methods.Aside(prompt, goes=True)


def test_a_pass_makes_place_and_comes_back(passed):
    """A method decodes the same from it before and after."""
    (bench, method, prompt, aside), logits = passed, []
    for _ in range(2):
        cache, _ = bench.cache(method, prompt)
        logits.append(DecodeLoop(bench.model, cache, prompt.lengths[:, None]).step(torch.tensor([[7]])))
        aside.leave()
        aside.come_back()
    assert torch.equal(*logits)


def test_a_pass_that_is_left_for_good_holds_nothing(passed):
    """The last batch of a pass has its place, and its cache is not changed by that."""
    bench, method, prompt, aside = passed
    row, again = ({"method": "snapkv", "length": 200, "rows": 3} for _ in range(2))
    bench.decode(row, method, prompt, aside, 3)
    assert all(layer.keys.numel() for layer in prompt.layers)
    bench.decode(again, method, prompt, aside, 3, last=True)
    assert not any(layer.keys.numel() + layer.values.numel() for layer in prompt.layers)
    assert [again[name] for name in ("gb", "read_gb", "batch")] == [row[name] for name in ("gb", "read_gb", "batch")]


@pytest.mark.parametrize("name", thinned(["leank", "papers/kivi4_iap", "quest", "h2o"], keep=(1, 2)))
def test_what_a_row_will_hold_is_known_before_it_decodes(name):
    """The bytes by which the largest batch is guessed are those of a cache that has decoded as many tokens."""
    model, (config, tokenizer) = load_model(ModelConfig()), load_config(ModelConfig())
    mask = ROOT / "models/reference/mask_70pct.safetensors"
    method = methods.configured([name], "reference", mask, Sizes(16, 144), config, tokenizer)[0]
    bench = methods.Bench(Replay(model, tokenizer, Settings()), 2)
    bench.replay.calibrate([method])
    prompt, _ = bench.prefill(method, 400, method.obs_queries, timed=False)
    cache = method.compressed(model, prompt)
    guessed, before = methods.grown(cache, 40), cache.memory().total
    loop = DecodeLoop(model, cache, prompt.lengths[:, None])
    for _ in range(40):
        loop.step(torch.tensor([[7]]))
    found = cache.memory()
    assert guessed == pytest.approx(found.total - found.tables, rel=0.05 if name == "quest" else 0.015)  # plain bounds
    assert guessed > before


@pytest.mark.slow
def test_every_method_has_its_rows(tmp_path):
    names = [name for name in methods.every_method() if not name.startswith("papers/")]
    line = f"--shape reference --lengths 200 --new 2 --batches 1 3 --methods {' '.join(names)}"
    methods.main([str(tmp_path), *line.split()])
    rows = read_table(tmp_path / "methods.csv")
    assert {(r["method"], r["rows"]) for r in rows} >= set(itertools.product(names, ("1", "3")))
    assert not [r["error"] for r in rows if r["error"]]


def test_every_method_is_configured():
    """Every choice of the registry is measured; by_length hands on to another choice."""
    config, tokenizer = load_config(ModelConfig())
    mask = ROOT / "models/reference/mask_70pct.safetensors"
    names = methods.every_method()
    given = ([*names, "papers/kivi4_think"], "reference", mask, Sizes(16, 144), config, tokenizer)
    found = methods.configured(*given, ["+method.asl.each={prefill:{layer:[3,4]}}"])
    labels = [one.label for one in found]
    assert {*names} - {*labels} == {"asl"}
    assert len({*labels} - {*names}) == 2 + 2  # asl's layers, and ThinK's ratios in the preset
    choices = [choice for one in found for choice in one.axes.values()]
    assert all(getattr(choice, "samples", 0) <= 8 for choice in choices)
    assert {*map(name_of, choices)} == {name for registry in REGISTRY.values() for name in registry} - {"by_length"}
