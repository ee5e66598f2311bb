"""What bench_attention makes of its measurements."""

import csv
import math

import pytest

from scripts.bench.kernels.attention import fitted, plot, variants


def layer(size, us):
    return {"shape": "a shape", "dense_us": 400, "layer": 0, "method": "LeanK", "us": us, "bytes": size}


def test_a_line_through_the_layers():
    """7 us a launch and 4000 GB/s come back, also from the strings of a CSV."""
    rows = [layer(str(size), str(7 + size / 4e6)) for size in (3e8, 4e8, 9e8)]
    assert fitted(rows) == pytest.approx((7, 4000))
    assert all(map(math.isnan, fitted(rows[:1] * 3)))


def test_a_picture_of_measurements_made_before(tmp_path):
    rows = [layer(size, 7 + size / 4e6) for size in (300_000_000, 900_000_000)]
    rows.append({**layer(1_600_000_000, 400), "method": "SDPA flash", "layer": ""})
    with open(tmp_path / "attention.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot(tmp_path)
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_every_kernel_configuration_is_tried_once():
    """Times are summed by configuration: one that is there twice would seem twice as slow."""
    pytest.importorskip("triton")
    assert len(set(variants())) == len(variants())
