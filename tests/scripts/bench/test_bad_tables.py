"""Rows and tables that no picture and no mean can be made of are refused in one line that names them."""

import json

import pytest

from leank.eval.papers.make import Workshop
from leank.eval.papers.registry import find
from leank.eval.papers.steps import Options
from scripts.bench import pictures
from scripts.bench.quality import ratios, turns
from tests.helpers.report_rows import row

GOOD = [row(method, sample, 1.0) for method in ("dense", "leank_50") for sample in range(3)]
TABLES = {"": "", "label,ratio,recall,low,high\n": "", "a,b\n1,2\n": "'recall'",
          "label,ratio,recall,low,high\na,50\n": "",
          "label,ratio,recall,low,high\na,50,nan,1,2\n": "recall, low, high of a are",
          "label,ratio,recall,low,high\na,x,1,1,2\n": "'x'", b"\xff\xfe": "utf-8"}  # fmt: skip


def refused(command, arguments):
    with pytest.raises(SystemExit) as stopped:
        command([str(one) for one in arguments])
    said = str(stopped.value)
    assert len(said.splitlines()) == 1
    return said


def folder_of(rows, folder):
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


@pytest.mark.parametrize("content", TABLES)
def test_a_table_that_cannot_be_drawn_is_named(content, tmp_path):
    file = tmp_path / "recall.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refused(pictures.main, ["recall", file, tmp_path / "out.svg"])
    assert f"pictures: {file} is no table for this picture" in said
    assert TABLES[content] in said
    assert not (tmp_path / "out.svg").exists()


def test_tables_of_speed_are_named_too(tmp_path):
    (tmp_path / "generation.csv").write_text("a\n")
    said = refused(pictures.main, ["speed", tmp_path, tmp_path / "out.svg"])
    assert "generation.csv is no table for this picture" in said


def test_rows_without_a_figure_are_refused(tmp_path):
    unnamed = folder_of([row("mine", 0, 1.0)], tmp_path / "a")
    assert "no row is of dense" in refused(ratios.main, [unnamed, "--out", "out.csv"])
    nan = folder_of([{**one, "score": float("nan")} for one in GOOD], tmp_path / "b")
    assert "'score' is wrong" in refused(ratios.main, [nan, "--out", "out.csv"])


@pytest.mark.parametrize("field", ["model", "benchmark", "compress"])
def test_rows_of_two_runs_have_no_common_mean(field, tmp_path):
    talks = [{**one, "benchmark": "multi_turn", "meta": {"turn": 1, "mode": "reuse"}} for one in GOOD]
    mixed = folder_of(talks + [{**one, field: "another"} for one in talks], tmp_path / "mixed")
    for command in (ratios.main, turns.main):
        assert f"of several values of {field!r} (" in refused(command, [mixed, "--out", tmp_path / "o"])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": 3}', '{"rows": [3]}', "{"])
def test_a_damaged_analysis_is_named(content, tmp_path):
    workshop, item = Workshop(tmp_path, Options()), find("leank:fig9")
    file = tmp_path / "analyses" / workshop._resolve(item.here[0]).file
    file.parent.mkdir()
    (tmp_path / "rows").mkdir()
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"{file.name} is damaged \(.*; remove it") as said:
        workshop.collect([item])
    assert "\n" not in str(said.value)
