"""Recall by turn, whose intervals take conversations and not turns as samples."""

import csv

import pytest

from leank.eval.rows.results import Results
from scripts.bench.quality import by_turn, main
from tests.helpers.report_rows import row


def turn(method, conversation, number, score, size, task="kv"):
    made = {**row(method, 0, score), "task": f"{task}_reuse", "sample": f"{conversation}.{number}"}
    return {**made, "meta": {"turn": number, "mode": "reuse"}, "cache_bytes": {"total": size}}


def test_a_conversation_is_one_sample():
    rows = [turn("dense", c, n, 1.0, 100.0) for c in range(4) for n in (1, 2)]
    rows += [turn("leank", c, n, float(c < 2), 40.0) for c in range(4) for n in (1, 2)]
    dense, _, leank, of_kv = by_turn(rows)
    assert (dense["task"], dense["method"], dense["all"], dense["low"], dense["share of dense"]) == (
        "all",
        "dense",
        100,
        100,
        1,
    )
    assert (leank["turn 1"], leank["turn 2"], leank["all"], leank["conversations"]) == (50, 50, 50, 4)
    assert leank["share of dense"] == 0.4
    assert (leank["low"], leank["high"]) == (0, 100)  # of 4 conversations; 8 turns would give a narrower one
    assert of_kv == {**leank, "task": "kv"}


def test_tasks_count_alike_and_a_cache_without_dense_has_no_share():
    rows = [turn("leank", 0, 1, 1.0, 40.0), *(turn("leank", c, 1, 0.0, 40.0, "passkey") for c in range(3))]
    whole = by_turn(rows)[0]
    assert (whole["all"], whole["conversations"], whole["share of dense"]) == (50, 4, None)


def test_the_command_writes_a_table_and_refuses_other_runs(tmp_path):
    with Results(tmp_path / "run") as results:
        results.append(turn("dense", 0, 1, 1.0, 100.0))
    main(["turns", str(tmp_path / "run"), "--out", str(tmp_path / "turns.csv")])
    with (tmp_path / "turns.csv").open() as file:
        assert [line["all"] for line in csv.DictReader(file)] == ["100.0", "100.0"]
    with Results(tmp_path / "other") as results:
        results.append(row("dense", 0, 1.0))
    with pytest.raises(ValueError, match="no row is of benchmark=multi_turn"):
        main(["turns", str(tmp_path / "other"), "--out", str(tmp_path / "none.csv")])
