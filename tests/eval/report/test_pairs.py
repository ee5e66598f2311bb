"""Reports of many methods: which pairs are shown, and that the work does not grow with the number of pairs."""

import warnings

import numpy as np
import pytest

from leank import stats
from leank.eval.report import summarise, write_report
from leank.eval.report.summary import COLUMNS, summarise_groups
from leank.eval.report.tables import differences, overall
from tests.helpers.report_rows import row, stored


def rows_of(masks, others=2, samples=3, lengths=(1024,)):
    """Rows of dense, of so many learned masks and of so many other methods."""
    configs = {"dense": None}
    configs |= {f"leank_{i}": {"channels": {"name": "leank", "mask": str(i)}} for i in range(masks)}
    configs |= {f"think_{i}": {"channels": {"name": "think", "ratio": i / 100}} for i in range(others)}
    draw = np.random.default_rng(0)
    return [
        row(method, sample, float(draw.integers(0, 5)) / 4, task, length, config=config)
        for length in lengths for task in ("vt", "cwe")
        for method, config in configs.items() for sample in range(samples)
    ]  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """How many samples were drawn, and how many intervals were computed."""
    count = {"samples": 0, "intervals": 0}
    picks, alike = stats._picks, stats._alike

    def counted(sizes, *args):
        for at, found in picks(sizes, *args):
            count["samples"] += sum(one.size for one in found)
            yield at, found

    def computed(wanted, *args):
        count["intervals"] += len(wanted)
        return alike(wanted, *args)

    monkeypatch.setattr(stats, "_picks", counted)
    monkeypatch.setattr(stats, "_alike", computed)
    return count


def test_the_work_of_a_report_grows_with_methods_and_not_with_their_pairs(drawn):
    counts = []
    for masks in (20, 40, 80):
        summarise(rows_of(masks))
        counts.append(dict(drawn))
        drawn.update(samples=0, intervals=0)
    assert len({count["samples"] for count in counts}) == 1  # all methods share their resamples
    first, second, third = (count["intervals"] for count in counts)
    assert third - second == 2 * (second - first)
    summarise_groups([rows_of(20)], columns=[f"leank_{i}" for i in range(20)])  # and so do their differences
    assert drawn["samples"] == counts[0]["samples"]


def test_a_few_masks_are_compared_unasked_and_many_where_they_are_named():
    (few,) = summarise(rows_of(COLUMNS))["runs"]
    assert differences(few).cells.shape[1] == COLUMNS + 1
    assert "not compared" not in overall(few).note
    rows = rows_of(COLUMNS + 1)
    (many,) = summarise(rows)["runs"]
    assert many["differences"] == []
    assert f"The {COLUMNS + 1} learned masks are compared with dense alone" in overall(many).note
    (named,) = summarise_groups([rows], columns=["think_1", "leank_3"])["runs"]
    table = differences(named)
    assert table.title == "Methods minus other methods"
    assert list(table.cells) == ["minus", "think_1", "leank_3"]
    assert len(table.cells) == COLUMNS + 4
    assert "not compared" not in overall(named).note
    (all_of,) = summarise_groups([rows], columns=["leank_0"])["runs"]
    assert differences(all_of).title == "Learned masks minus other methods"


def test_every_difference_is_that_of_the_plain_bootstrap():
    rows = rows_of(2, samples=7, lengths=(1024, 2048))
    (run,) = summarise(rows)["runs"]
    for found in run["differences"]:
        strata = []
        for length in (1024, 2048):
            for task in ("vt", "cwe"):
                mine, other = (
                    [r["score"] for r in rows if (r["method"], r["task"], r["length"]) == (m, task, length)]
                    for m in (found["method"], found["minus"])
                )
                strata.append([100 * (a - b) for a, b in zip(mine, other, strict=True)])
        assert (found["difference_low"], found["difference_high"]) == pytest.approx(stats.interval(strata), abs=1e-9)


def test_pictures_of_many_methods_of_equal_bytes_are_drawn(tmp_path):
    stored(tmp_path, rows_of(24, 24, samples=1, lengths=(1024, 2048)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a layout that has no room for the names
        write_report(tmp_path)
    assert (tmp_path / "accuracy_by_axes.png").stat().st_size > 10_000
