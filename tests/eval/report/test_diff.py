"""Two methods sample by sample: every changed reply is shown once, losses first, numbers are those of the rows."""

import json
import re
import sys

import pytest

from leank.eval.__main__ import command_line
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.groups import changed, frame, paired
from tests.helpers.report_rows import checked, grid, row, stored


@pytest.fixture
def folder(tmp_path):
    rows = [*grid(), row("dense", 99, 1.0), row("think", 98, 0.0)]  # two samples that only one method has
    rows[1] = {**rows[1], "prediction": "a ```fence``` & <script>", "score": 0.0}
    return stored(tmp_path, rows), rows


def test_pairs_are_the_samples_that_both_have(folder):
    _, rows = folder
    table = frame(rows)
    found = paired(table, "dense", "think")
    assert len(found) == 2 * 2 * 12
    score = {(r["method"], r["task"], r["length"], r["sample"]): 100 * r["score"] for r in rows}
    for line in found.itertuples():
        place = line.task, line.length, line.sample
        assert (line.score_first, line.score_second) == (score["dense", *place], score["think", *place])
    other = changed(table, "dense", "think")
    assert (other["score_second"] - other["score_first"]).is_monotonic_increasing
    assert len(other) == (found["prediction_first"] != found["prediction_second"]).sum()


def test_files_show_every_changed_reply_once(folder):
    path, rows = folder
    page, text = write_diff(path, "dense", "think")
    assert page.name == "diff_dense_think.html"
    of = changed(frame(rows), "dense", "think")
    shown = page.read_text()
    checked(shown)
    assert shown.count("<details>") == len(of)
    assert "<script>" not in shown
    markdown = page.with_suffix(".md").read_text()
    assert len(re.findall("^### ", markdown, re.M)) == len(of)
    assert "````text\na ```fence``` & <script>\n````" in markdown  # a longer fence than the reply's
    assert "| all samples | 48 |" in " ".join(text.split())


def test_difference_of_a_task_and_length_is_that_of_the_report(folder):
    path, rows = folder
    (run,) = summarise(rows)["runs"]
    _, text = write_diff(path, "dense", "leank")
    for cell in run["cells"]:
        if cell["method"] == "leank":
            line = next(x for x in text.splitlines() if x.startswith(f"| {cell['task']}, {cell['length']} tokens "))
            assert f"{cell['difference']:+.1f} [{cell['difference_low']:+.1f}, " in line


def test_command_line(folder, monkeypatch, capsys):
    path, _ = folder

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["eval", *words])
        command_line()

    typed("diff", str(path), "dense", "think")
    assert capsys.readouterr().out.rstrip().endswith("diff_dense_think.html")
    with pytest.raises(SystemExit, match="its methods are dense, leank, think"):
        typed("diff", str(path), "dense", "snapkv")
    with pytest.raises(SystemExit, match="dense and dense are the same method"):
        typed("diff", str(path), "dense", "dense")
    typed("report", str(path), "think")
    summary = json.loads((path / "summary.json").read_text())
    assert {d["method"] for d in summary["runs"][0]["differences"]} == {"think"}
    assert "## Methods minus other methods" in (path / "summary.md").read_text()
    with pytest.raises(SystemExit, match=r"no row in .* is of a method 'thin'; its methods are dense, leank"):
        typed("report", str(path), "thin")
    for words in (["report"], ["diff", "somewhere"]):
        with pytest.raises(SystemExit):
            typed(*words)
        assert "the following arguments are required" in capsys.readouterr().err


def test_a_run_without_dense_has_a_report(tmp_path):
    write_report(stored(tmp_path, [r for r in grid() if r["method"] != "dense"]))
    assert "Replies" not in (tmp_path / "report.html").read_text()
