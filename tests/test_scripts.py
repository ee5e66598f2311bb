"""The benchmarks' command lines on a CPU, small: that they run and that what they print is what the cache says."""

import csv

import pytest

from scripts import bench_generation, bench_memory


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
    line = "--shape reference --prompt 300 --new 3 --batch 2 --prefill-rows 1"
    bench_generation.main([str(tmp_path), *line.split()])
    rows = list(csv.DictReader((tmp_path / "generation.csv").open()))
    caches = ["LeanK", "own cache, nothing pruned", "StaticCache", "DynamicCache"]
    assert [(r["cache"], r["loop"]) for r in rows] == [(c, loop) for c in caches for loop in ("prefill", "eager")]
    assert all(float(r["tokens_per_s"]) > 0 for r in rows if r["loop"] == "eager")
