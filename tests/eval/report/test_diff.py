"""Two methods sample by sample: every changed reply is shown once, losses first, numbers are those of the rows."""

import re
import subprocess
import sys

import pytest

from leank.eval.__main__ import command_line
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.groups import changed, frame, paired
from leank.eval.rows.results import Results
from tests.helpers.report_rows import Checker, grid, row


@pytest.fixture
def folder(tmp_path):
    rows = [*grid(), row("dense", 99, 1.0), row("think", 98, 0.0)]  # two samples that only one method has
    rows[1] = {**rows[1], "prediction": "a ```fence``` & <script>", "score": 0.0}
    with Results(tmp_path) as results:
        for r in rows:
            results.append(r)
    return tmp_path, rows


def test_pairs_are_the_samples_that_both_have():
    rows = [*grid(), row("dense", 99, 1.0), row("think", 98, 0.0)]
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
    checker = Checker()
    checker.feed(shown)
    assert checker.open == []
    assert checker.loads == []
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


def test_an_unknown_method_names_those_there_are(folder):
    path, _ = folder
    with pytest.raises(ValueError, match="its methods are dense, leank, think"):
        write_diff(path, "dense", "snapkv")


def test_command_line(folder):
    path, _ = folder
    done = subprocess.run([sys.executable, "-m", "eval", "diff", str(path), "dense", "think"], capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.rstrip().endswith("diff_dense_think.html")


def test_missing_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval", "diff", "somewhere"])
    with pytest.raises(SystemExit, match="usage: python -m eval diff DIR METHOD METHOD"):
        command_line()


def test_a_run_without_dense_has_a_report(tmp_path):
    with Results(tmp_path) as results:
        for r in grid():
            if r["method"] != "dense":
                results.append(r)
    write_report(tmp_path)
    assert "Replies" not in (tmp_path / "report.html").read_text()
