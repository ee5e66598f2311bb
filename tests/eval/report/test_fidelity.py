"""KL, top-1 agreement and loss in every form of a report, and reports of rows that have none."""

import csv
import json
import math

import numpy as np
import pytest

from leank import stats
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.plots import draw
from leank.eval.report.tables import from_dense, from_dense_by_length
from tests.helpers.report_rows import grid, row, stored

LEVEL = {"dense": 0.0, "leank": 1e-4, "think": 0.3}


def near(method, draw_, text=False):
    kl = LEVEL[method] * float(draw_.random())
    loss = 2 + float(draw_.random())
    return {
        "tokens": 30, "kl": kl, "top1": 1 - LEVEL[method] * float(draw_.random()),
        "loss": loss + LEVEL[method] if text else None, "dense_loss": loss if text else None, "non_finite": None,
    }  # fmt: skip


def rows(text=False):
    draw_ = np.random.default_rng(1)
    return [{**r, "fidelity": near(r["method"], draw_, text)} for r in grid()]


def lines(table):
    return table.cells.set_index("method", drop=False).to_dict("index")


def test_means_and_intervals_are_those_of_the_rows():
    made = rows()
    (run,) = summarise(made)["runs"]
    for cell in run["overall"]:
        strata = [
            [r["fidelity"]["kl"] for r in made if (r["method"], r["task"], r["length"]) == (cell["method"], task, n)]
            for task in ("vt", "niah_single_1") for n in (4096, 8192)
        ]  # fmt: skip
        assert cell["kl"] == pytest.approx(np.mean(strata))
        assert (cell["kl_low"], cell["kl_high"]) == pytest.approx(stats.interval(strata), rel=0.05)
        assert (cell["compared"], cell["tokens_compared"], cell["compared_non_finite"]) == (48, 48 * 30, 0)
        assert cell["loss"] is None
    table = lines(from_dense(run))
    assert table["dense"]["KL, nats a token"] == "0 [0, 0]"
    assert table["dense"]["top-1 agreement"] == "100.00% [100.00, 100.00]"
    assert "perplexity" not in table["dense"]
    assert set(lines(from_dense_by_length(run))["leank"]) == {"method", "4096", "8192"}


def test_texts_have_a_loss_paired_with_dense_and_a_perplexity():
    made = rows(text=True)
    (run,) = summarise(made)["runs"]
    think = next(c for c in run["overall"] if c["method"] == "think")
    ends = think["loss_minus_dense_low"], think["loss_minus_dense_high"]
    assert (think["loss_minus_dense"], *ends) == pytest.approx((0.3, 0.3, 0.3))  # paired: the texts' spread cancels
    line = lines(from_dense(run))["think"]
    assert line["loss minus dense"] == "+0.3 [+0.3, +0.3]"
    assert float(line["perplexity"]) == pytest.approx(math.exp(think["loss"]), rel=1e-3)


def test_samples_with_broken_logits_are_counted_and_left_out():
    made = rows()
    broken = {"tokens": 30, "kl": None, "top1": None, "loss": None, "dense_loss": None, "non_finite": 3}
    first = next(r for r in made if r["method"] == "think")
    first["fidelity"] = broken
    (run,) = summarise(made)["runs"]
    think = next(c for c in run["overall"] if c["method"] == "think")
    assert (think["compared"], think["compared_non_finite"]) == (48, 1)
    assert 0 < think["kl"] < 0.3
    table = from_dense(run)
    assert lines(table)["think"]["KL, nats a token"].endswith("]§")
    assert "§ Logits of the method or of dense were NaN or infinite" in table.note
    assert "think 1 of 48" in table.note
    for r in made:
        r["fidelity"] = broken if r["method"] == "think" else r["fidelity"]
    (run,) = summarise(made)["runs"]
    assert lines(from_dense(run))["think"]["KL, nats a token"] == "-§"
    assert draw("kl_by_length", run) is not None


def test_every_file_of_a_report_has_them(tmp_path):
    write_report(stored(tmp_path, rows(text=True)))
    for file in ("summary.md", "report.html", "tables.tex"):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert "Distance from dense" in text
        assert "KL, nats a token" in text
    assert {"kl_by_length.png", "kl_against_bytes.png"} <= {file.name for file in tmp_path.iterdir()}
    with (tmp_path / "cells.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    summary = json.loads((tmp_path / "summary.json").read_text())
    for cell, line in zip(summary["runs"][0]["cells"], cells, strict=True):
        assert {name: line[name] for name in ("method", "task")} == {name: cell[name] for name in ("method", "task")}
        for name in ("kl", "loss_minus_dense"):
            assert float(line[name]) == pytest.approx(cell[name])
    text = " ".join(write_diff(tmp_path, "leank", "think")[1].split())
    assert "KL leank | KL think | KL difference | top-1 leank | top-1 think" in text
    top1 = {cell["method"]: cell["top1"] for cell in summary["runs"][0]["overall"]}
    assert f"| {top1['leank']:.2f}% | {top1['think']:.2f}% |" in text[text.index("all samples") :]


def test_rows_that_measured_none_have_a_report_without_them(tmp_path):
    old = grid()
    write_report(stored(tmp_path, old))
    assert "Distance from dense" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not list(tmp_path.glob("kl_*.png"))
    assert "KL" not in write_diff(tmp_path, "dense", "leank")[1]
    (run,) = summarise([*old, *({**r, "sample": f"{r['sample']}b"} for r in rows())])["runs"]
    assert next(c["compared"] for c in run["overall"] if c["method"] == "leank") == 48


def test_a_sample_done_with_and_without_counts_once_and_with():
    without = row("leank", 0, 1.0)
    settings = {**without["settings"], "fidelity": 64}
    measured = {**without, "config": "other", "settings": settings, "fidelity": near("leank", np.random.default_rng(0))}
    for order in ([without, measured], [measured, without]):
        (run,) = summarise(order)["runs"]
        assert [(c["method"], c["n"], c["compared"]) for c in run["overall"]] == [("leank", 1, 1)]
