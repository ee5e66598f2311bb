"""The benchmarks' command lines on a CPU, small: that they run and that what they print is what the cache says."""

import csv
from types import SimpleNamespace

import pytest
import torch

from leank.eval.cache import Sizes
from leank.eval.inference.models import ModelConfig, load_model
from scripts.bench.common.caches import Decoding, fill
from scripts.bench.common.timing import Launches, where
from scripts.bench.decoding import generation as bench_generation
from scripts.bench.decoding import memory as bench_memory
from scripts.bench.decoding.generation import largest, timed


def test_memory_saved_is_the_masks_ratio(tmp_path, capsys):
    bench_memory.main([str(tmp_path), "--layers", "2", "--context", "2048", "--batch", "1", "2"])
    first = capsys.readouterr().out.splitlines()[0]
    shares = [float(word.rstrip("%;,")) for word in first.split() if word.rstrip(";,").endswith("%")]
    for measured, expected in zip(shares[::2], shares[1::2], strict=True):
        assert measured == pytest.approx(expected, abs=0.03 * 100)
    rows = list(csv.DictReader((tmp_path / "memory.csv").open()))
    assert [r["batch"] for r in rows] == ["1", "2"]
    assert all(float(r["leank_gb"]) < float(r["dense_gb"]) for r in rows)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:attention over the compressed cache")
def test_generation_with_every_cache(tmp_path):
    line = "--shape reference --prompt 300 --new 3 --batch 2 1 --prefill-rows 1"
    bench_generation.main([str(tmp_path), *line.split()])
    rows = list(csv.DictReader((tmp_path / "generation.csv").open()))
    packed = [f"LeanK, {bits} bits" for bits in (8, 4, 2)]
    caches = ["LeanK", *packed, "own cache, nothing pruned", "StaticCache", "DynamicCache"]
    asked = (("prefill", "1"), ("eager", "2"), ("eager", "1"))
    assert [(r["cache"], r["loop"], r["batch"]) for r in rows] == [(c, *one) for c in caches for one in asked]
    assert all(float(r["tokens_per_s"]) > 0 for r in rows if r["loop"] == "eager")
    assert "error" not in rows[0]


def test_timed_steps_are_whole_flushes():
    assert [timed(new, 32) for new in (3, 32, 39, 128, 1024)] == [3, 32, 32, 96, 992]


def test_kernels_by_kind():
    names = {"decode": "attention_ms", "flash_fwd_splitkv_combine_kernel": "attention_ms",
             "nvjet_tst_128x8_64x12_v_bz_splitK_TNT": "products_ms", "gemvx::kernel": "products_ms",
             "Memcpy DtoD (Device -> Device)": "other_ms"}  # fmt: skip
    assert {name: Launches(name, 1, 1).kind for name in names} == names
    assert where([Launches("decode", 2, 1.5), Launches("nvjet", 7, 3), Launches("add", 1, 0.5)]) == {
        "gpu_ms": 5, "attention_ms": 1.5, "products_ms": 3, "other_ms": 0.5, "kernels": 10}  # fmt: skip


def test_the_largest_batch_gives_way_to_memory_alone(monkeypatch):
    tried = []

    def decode(model, contender, rows, *rest):
        tried.append(rows)
        if rows > 96:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return {"batch": rows}

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(4e9) + 1000, 0))
    monkeypatch.setattr(bench_generation, "decode", decode)
    contender = SimpleNamespace(name="ten bytes", bytes=lambda tokens: 10)
    assert largest(None, contender, 64, 32, 32) == {"batch": 94}
    assert tried == [100, 97, 94]
    monkeypatch.setattr(bench_generation, "decode", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        largest(None, contender, 64, 32, 32)


@pytest.fixture(scope="module")
def model():
    return load_model(ModelConfig())


def test_every_cache_decodes_what_the_model_does(model):
    """fill() and Decoding against a plain loop over the same keys and values."""
    found = []
    for contender in bench_generation.contenders(model, torch.ones(7, 4, 64, dtype=torch.bool), Sizes()):
        model.set_attn_implementation(contender.attention)
        cache = contender.make(2, 340)
        torch.manual_seed(0)
        fill(model, cache, 2, 300)
        decoding = Decoding(model, cache, torch.full((2, 1), 300))
        tokens = []
        for _ in range(5):
            decoding.step()
            tokens.append(decoding.token.flatten().tolist())
        assert decoding.loop.positions.tolist() == [[305], [305]]
        found.append(tokens)
    assert found[1:] == found[:1] * 3
