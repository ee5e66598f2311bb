"""Figures: the needle's grid, the front of methods, and that names on a plot do not cover each other."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from leank.eval.report import summarise
from leank.eval.report.plots import FIGURES, axes_of, draw, front
from leank.eval.report.style import svg
from tests.helpers.report_rows import grid, row

COORDINATE = st.integers(0, 8).map(float)


def needle(method, length, depth, score, sample=0):
    return row(method, f"{length}-{depth}-{sample}", score, "niah", length, benchmark="niah", metric="niah_recall",
               meta={"depth_percent": depth})  # fmt: skip


def test_needle_grid_holds_the_mean_of_every_place():
    draw_ = np.random.default_rng(0)
    rows = [
        needle(method, length, depth, float(draw_.random()), sample)
        for method in ("dense", "leank") for length in (2048, 1024) for depth in (100, 0, 50) for sample in range(3)
        if (length, depth) != (2048, 50)
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    places = [(m["method"], m["length"], m["depth"]) for m in run["by_depth"]]
    assert places == [
        (method, length, depth)
        for method in ("dense", "leank") for length in (1024, 2048) for depth in (0, 50, 100)
        if (length, depth) != (2048, 50)
    ]  # fmt: skip
    for found, place in zip(run["by_depth"], places, strict=True):
        mine = [100 * r["score"] for r in rows if (r["method"], r["length"], r["meta"]["depth_percent"]) == place]
        assert found["score"] == pytest.approx(np.mean(mine))
    figure = draw("needle_by_depth", run)
    maps = [axes for axes in figure.axes if axes.get_title() in ("dense", "leank")]
    assert len(maps) == 2
    values = maps[0].collections[0].get_array()
    assert values.mask.tolist() == [[False, False], [False, True], [False, False]]
    assert maps[0].get_ylim() == (3, 0)  # the start of the text is above


@given(st.lists(st.tuples(COORDINATE, COORDINATE), min_size=1))
def test_front_is_what_no_other_beats(points):
    found = front(points)

    def beaten(point):
        return any(o != point and o[0] <= point[0] and o[1] >= point[1] for o in points)

    assert set(found) == {p for p in points if not beaten(p)}
    assert found == sorted(found)


def test_axes_in_words():
    assert axes_of({}) == "dense"
    combined = {"channels": {"name": "leank"}, "bits": {"name": "kivi", "bits": 2}, "sink": 4, "window": 32}
    assert axes_of(combined) == "channels + bits"
    assert axes_of({**combined, "matched": {"settings": ["channels.ratio"], "to": "leank"}}) == "channels + bits"


def test_names_do_not_cover_each_other():
    draw_ = np.random.default_rng(3)
    rows = [
        row(f"method_{m}" if m else "dense", s, float(draw_.random()), cache_bytes={"total": int(1000 * share)},
            config={"tokens": {"name": str(m)}} if m else None)
        for m, share in enumerate([1.0, *draw_.uniform(0.1, 0.4, 14)]) for s in range(4)
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    figure = draw("accuracy_by_axes", run)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for text in figure.axes[0].texts:
        text.update_positions(canvas.get_renderer())
    texts = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the line to its point
    assert len(texts) == 15
    for a, b in combinations(texts, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0 or up <= 0.15 * min(a.height, b.height)


@pytest.mark.parametrize("name", list(FIGURES))
def test_the_same_rows_give_the_same_files(name):
    (run,) = summarise(grid())["runs"]
    twice = [draw(name, run) for _ in range(2)]
    drawn = name not in ("needle_by_depth", "kl_by_length", "kl_against_bytes")  # such rows have neither
    assert [figure is not None for figure in twice] == [drawn, drawn]
    if drawn:  # PNG: test_report makes a whole report twice
        assert svg(twice[0], "a") == svg(twice[1], "a")
