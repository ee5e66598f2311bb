"""Tables of a run by method and task: figures of the rows, dense first, and no sample with two scores."""

import csv

import pytest

from leank.eval.rows.results import Results
from scripts.bench.quality import by_task_page, main, one_run, put_together
from tests.helpers.report_rows import row

ASL = {"prefill": {"name": "asl"}}


def written(folder, rows):
    with Results(folder) as results:
        for one in rows:
            results.append(one)
    return folder


def rows():
    """Dense finds all of eight samples in two tasks, asl half of one and none of the other, leank all."""
    for task in ("niah_single_1", "vt"):
        for sample in range(4):
            yield row("dense", sample, 1.0, task)
            asl = float(task == "vt" and sample < 2)
            yield row("asl", sample, asl, task, config=ASL, selected_layer=5 if sample else -1)
            yield row("leank", sample, 1.0, task)


def test_the_csv_has_every_cell_and_the_whole(tmp_path):
    main(["by_task", str(written(tmp_path / "run", rows())), "--out", str(tmp_path / "methods.csv")])
    with (tmp_path / "methods.csv").open(newline="") as file:
        found = {(line["method"], line["task"]): line for line in csv.DictReader(file)}
    assert set(found) == {(m, t) for m in ("dense", "asl", "leank") for t in ("all", "niah_single_1", "vt")}
    whole = found["asl", "all"]
    assert (float(whole["score"]), float(whole["minus dense"]), int(whole["n"])) == (25, -75, 8)
    assert (whole["selected"], whole["not selected"]) == ("none: 2, layer 5: 6", "2")
    assert float(found["asl", "vt"]["score"]) == 50
    assert float(found["leank", "all"]["share of dense"]) == 0.25
    assert (found["dense", "all"]["minus dense"], found["leank", "all"]["selected"]) == ("", "")


def test_dense_stands_first_and_a_short_cell_is_marked(capsys, tmp_path):
    short = [one for one in rows() if not (one["method"] == "asl" and one["task"] == "vt" and one["sample"] == "3")]
    main(["by_task", str(written(tmp_path / "run", short)), "--out", str(tmp_path / "methods.csv")])
    printed = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")]
    assert [names[0], *names[2:]] == ["method", "dense", "leank", "asl"]
    assert "| 67* |" in " ".join(printed.split())
    assert printed.splitlines()[-1] == "asl, vt: none: 1, layer 5: 2"
    assert "*" not in by_task_page(one_run(rows()))


def test_folders_are_put_together_unless_they_contradict_each_other(tmp_path):
    every = list(rows())
    first = written(tmp_path / "first", every[:15])
    second = written(tmp_path / "second", every[10:])  # five rows stand in both
    assert len(put_together([first, second])) == len(every)
    wrong = written(tmp_path / "wrong", [{**every[0], "score": 0.25}])
    with pytest.raises(ValueError, match=r"dense, niah_single_1, sample 0: 1 in .*first, 0.25 in .*wrong; take"):
        put_together([first, wrong])


@pytest.mark.parametrize("other", [{"length": 8192}, {"model": "another"}])
def test_rows_of_two_runs_are_refused(tmp_path, other):
    folder = written(tmp_path / "run", [row("dense", 0, 1.0), {**row("dense", 1, 1.0), **other}])
    with pytest.raises(ValueError, match=r"th(e|ese) rows are "):
        main(["by_task", str(folder), "--out", str(tmp_path / "none.csv")])
    assert not (tmp_path / "none.csv").exists()
