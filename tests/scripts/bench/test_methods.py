"""The table of methods and the cost of the first token, on a CPU, small."""

import gc
import itertools
import time

import pytest
import torch

from leank.eval.cache import CompressedCache, Sizes
from leank.eval.cache.graph import DecodeLoop
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods import Method
from leank.eval.methods.registry import REGISTRY, name_of
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from scripts.bench.common import one_method
from scripts.bench.common.shapes import ROOT
from scripts.bench.decoding import methods
from scripts.bench.pictures import read_table
from scripts.bench.prefill import first_token


def test_methods_beside_dense(tmp_path, capsys, monkeypatch):
    """Every kind of pass; one that is not there costs the others nothing; a second run measures nothing again."""
    names = ["dense", "leank", "nonesuch", "h2o", "adakv", "gemfilter"]
    line = f"--shape reference --lengths 260 340 --new 2 --batches 1 largest --methods {' '.join(names)}"
    with pytest.raises(SystemExit, match="failed: nonesuch"):
        methods.main([str(tmp_path), *line.split()])
    rows = {(r["method"], r["length"], r["rows"]): r for r in read_table(tmp_path / "methods.csv")}
    failed = [key for key, row in rows.items() if row["error"]]
    assert failed == [("nonesuch", length, asked) for length in ("260", "340") for asked in ("1", "largest")]
    rows = {key: row for key, row in rows.items() if key not in failed}
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
        assert float(row["read_gb"]) == pytest.approx(float(row["formula_gb"] or row["read_gb"]), rel=0.01)
        assert float(row["read_gb"]) < float(row["gb"])
        assert (row["loop"], row["why_eager"], row["error"]) == ("eager", "no GPU", "")
    assert float(rows["leank", "340", "1"]["gb"]) < 0.8 * float(rows["dense", "340", "1"]["gb"])
    assert "nonesuch" in capsys.readouterr().err
    assert (tmp_path / "bytes.png").is_file()
    assert (tmp_path / "first_token.png").is_file()

    monkeypatch.setattr(one_method.Bench, "prefill", lambda *given: 1 / 0)
    methods.main([str(tmp_path), *line.split(" nonesuch")[0].split()])
    assert [r for r in read_table(tmp_path / "methods.csv") if not r["error"]] == list(rows.values())


def test_a_pass_is_run_once_for_all_batches(tmp_path, monkeypatch):
    """Twice where its seconds are asked for; what a killed run left shares one again, which nobody times."""
    passes, prefill = [], one_method.Bench.prefill

    def counted(self, method, length, *given):
        passes.append((method.label, length))
        return prefill(self, method, length, *given)

    monkeypatch.setattr(one_method.Bench, "prefill", counted)
    line = "--shape reference --lengths 200 260 --new 2 --batches 1 2 3 --methods dense snapkv gemfilter"
    methods.main([str(tmp_path), *line.split()])
    assert passes == [(name, n) for n in (200, 260) for name in ("dense", "gemfilter") for _ in range(2)]
    whole = read_table(tmp_path / "methods.csv")
    keys = [(r["length"], r["method"], r["rows"]) for r in whole]
    kind = [(name, rows) for rows in "123" for name in ("dense", "snapkv")] + [("gemfilter", rows) for rows in "123"]
    assert keys == [(length, *one) for length in ("200", "260") for one in kind]

    lines = (tmp_path / "methods.csv").read_text().splitlines(keepends=True)
    (tmp_path / "methods.csv").write_text("".join(lines[:4] + lines[10:]))  # of 200: dense 1, snapkv 1, dense 2
    del passes[:]
    methods.main([str(tmp_path), *line.split()])
    assert passes == [("snapkv", 200), ("gemfilter", 200), ("gemfilter", 200)]
    again = {(r["length"], r["method"], r["rows"]): (r["gb"], r["batch"]) for r in read_table(tmp_path / "methods.csv")}
    assert again == {key: (r["gb"], r["batch"]) for key, r in zip(keys, whole, strict=True)}


def test_what_does_not_fit_is_said_and_not_tried_again(tmp_path, monkeypatch, capsys):
    """At the largest batch a twentieth less each time; a pass that runs out of memory costs its methods alone."""
    tried, update, prefill = [], CompressedCache.update, one_method.Bench.prefill

    def full(cache, keys, values, layer, *given, **more):
        if layer == 3 and tried[-1:] != [len(keys)]:
            tried.append(len(keys))
        if layer == 3 and len(keys) > 14:  # so that some layers have the step's token
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return update(cache, keys, values, layer, *given, **more)

    def without_gemfilter(self, method, *given):
        if method.label == "gemfilter":
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return prefill(self, method, *given)

    monkeypatch.setattr(one_method, "most_rows", lambda held: 20)
    monkeypatch.setattr(CompressedCache, "update", full)
    monkeypatch.setattr(one_method.Bench, "prefill", without_gemfilter)
    line = "--shape reference --lengths 200 --new 2 --batches 1 largest 16 --methods leank gemfilter"
    methods.main([str(tmp_path), *line.split()])
    assert tried == [1, 20, 19, 18, 17, 16, 15, 14, 16]
    rows = read_table(tmp_path / "methods.csv")
    found = {(r["method"], r["rows"]): (r["batch"], r["error"][:12]) for r in rows}
    assert found.pop(("leank", "1")) == ("1", "")
    assert found.pop(("leank", "largest")) == ("14", "")
    assert set(found.values()) == {("", "does not fit")}
    assert len(found) == 4
    methods.main([str(tmp_path), *line.split()])
    assert tried[9:] == []
    assert "no room for 18 rows" in capsys.readouterr().out


def test_nothing_is_held_from_one_method_to_the_next(tmp_path, monkeypatch):
    """Neither caches nor the K and V of a pass outlive their rows."""
    held = []

    def cleared():
        gc.collect()
        held.append(sum(type(one) is CompressedCache for one in gc.get_objects()))

    monkeypatch.setattr(methods, "clear", cleared)
    monkeypatch.setattr(one_method.Bench, "_steps", lambda *given: 1 / 0)
    names = "dense adakv lethe quest kivi gemfilter"
    line = f"--shape reference --lengths 200 --new 2 --batches 1 2 --methods {names}"
    with pytest.raises(SystemExit, match="failed: dense; adakv; quest"):
        methods.main([str(tmp_path), *line.split()])
    assert len(held) > 12
    assert not any(held)
    assert not any(type(one) is PromptLayer for one in gc.get_objects())


def test_a_pass_makes_place_and_comes_back():
    """A method decodes the same from it before and after."""
    model, tokenizer = load_model(ModelConfig()), load_config(ModelConfig())[1]
    bench = one_method.Bench(Replay(model, tokenizer, Settings()), 2)
    method = Method("snapkv", tokens=SnapKV(budget=64), sink=0, window=32)
    prompt, _ = bench.prefill(method, 200, method.obs_queries)
    aside, logits = one_method.Aside(prompt, goes=True), []
    for _ in range(2):
        cache, _ = bench.cache(method, prompt)
        logits.append(DecodeLoop(model, cache, prompt.lengths[:, None]).step(torch.tensor([[7]])))
        aside.leave()
        aside.come_back()
    assert torch.equal(*logits)


def test_a_pass_that_is_left_for_good_holds_nothing():
    """The last batch of a pass has its place, and its cache is not changed by that."""
    model, tokenizer = load_model(ModelConfig()), load_config(ModelConfig())[1]
    bench = one_method.Bench(Replay(model, tokenizer, Settings()), 2)
    method = Method("snapkv", tokens=SnapKV(budget=64), sink=0, window=32)
    prompt, _ = bench.prefill(method, 200, method.obs_queries)
    aside, row = one_method.Aside(prompt, goes=True), {"method": "snapkv", "length": 200, "rows": 3}
    bench.decode(row, method, prompt, aside, 3)
    assert all(layer.keys.numel() for layer in prompt.layers)
    again = {"method": "snapkv", "length": 200, "rows": 3}
    bench.decode(again, method, prompt, aside, 3, last=True)
    assert not any(layer.keys.numel() + layer.values.numel() for layer in prompt.layers)
    assert [again[name] for name in ("gb", "read_gb", "batch")] == [row[name] for name in ("gb", "read_gb", "batch")]


@pytest.mark.parametrize("name", ["leank", "papers/kivi4_iap", "snapkv", "quest", "h2o", "rkv"])
def test_what_a_row_will_hold_is_known_before_it_decodes(name):
    """The bytes by which the largest batch is guessed are those of a cache that has decoded as many tokens."""
    model, (config, tokenizer) = load_model(ModelConfig()), load_config(ModelConfig())
    mask = ROOT / "leank_train/assets/reference/mask_70pct.safetensors"
    method = one_method.configured(name, "reference", mask, Sizes(16, 144), config, tokenizer)[0]
    bench = one_method.Bench(Replay(model, tokenizer, Settings()), 2)
    bench.replay.calibrate([method])
    prompt, _ = bench.prefill(method, 700, method.obs_queries, timed=False)
    cache = method.compressed(model, prompt)
    guessed, before = one_method.grown(cache, 70), cache.memory().total
    loop = DecodeLoop(model, cache, prompt.lengths[:, None])
    for _ in range(70):
        loop.step(torch.tensor([[7]]))
    found = cache.memory()
    assert guessed == pytest.approx(found.total - found.tables, rel=0.05 if name == "quest" else 0.015)  # plain bounds
    assert guessed > before


def test_a_row_that_takes_too_long_or_loses_the_gpu_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(one_method.Bench, "decode_one", lambda *given: time.sleep(20))
    line = "--shape reference --lengths 200 --batches 1 --limit 2 --methods leank snapkv"
    with pytest.raises(SystemExit, match="failed: leank; snapkv"):
        methods.main([str(tmp_path), *line.split()])
    assert [r["error"] for r in read_table(tmp_path / "methods.csv")] == ["too slow: it took more than 2 s"] * 2

    monkeypatch.setattr(one_method.Bench, "decode_one", lambda *given: 1 / 0)
    monkeypatch.setattr(methods, "gpu_lost", lambda: True)
    for name in ("think", "tova"):
        with pytest.raises(SystemExit) as stopped:
            methods.main([str(tmp_path), *line.split(), "think", "tova"])
        assert stopped.value.code == methods.AGAIN
        assert read_table(tmp_path / "methods.csv")[-1]["method"] == name
    with pytest.raises(SystemExit, match="failed: leank; snapkv; think; tova"):
        methods.main([str(tmp_path), *line.split(), "think", "tova"])


@pytest.mark.slow
def test_every_method_has_its_rows(tmp_path):
    names = [name for name in methods.METHODS if not name.startswith("papers/")]
    line = f"--shape reference --lengths 200 --new 2 --batches 1 3 --methods {' '.join(names)}"
    methods.main([str(tmp_path), *line.split()])
    rows = read_table(tmp_path / "methods.csv")
    assert {(r["method"], r["rows"]) for r in rows} >= set(itertools.product(names, ("1", "3")))
    assert not [r["error"] for r in rows if r["error"]]


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


@pytest.mark.parametrize("slow", [0.5, 5.0])
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_run_that_compiles_is_no_time_to_the_first_token(slow, repeats):
    """The first run of a case never counts, however long or short it is."""
    runs = itertools.chain([slow], itertools.repeat(1.4))

    class Bench:
        def prefill(self, method, length):
            return Prompt(), next(runs)

        def cache_s(self, method, prompt):
            return 0.1

    class Prompt:
        selected_at = (3,)

    assert first_token.timed(Bench(), Method("dense"), 300, repeats) == (pytest.approx(1.5), 3)


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
