"""The figures of validation, from scores whose means are known; the replay itself is tested in tests/eval/run."""

import pandas as pd
import pytest

from leank_train.validation import above, markdown, table


def lines(method, task, scores, length=512):
    return [
        {"method": method, "task": task, "length": length, "sample": str(i), "score": s} for i, s in enumerate(scores)
    ]


KNOWN = [
    *lines("dense", "kv", [1.0, 1.0, 1.0]), *lines("dense", "vt", [0.5]),
    *lines("leank", "kv", [1.0, 0.5, 0.0]), *lines("leank", "vt", [1.0]),
]  # fmt: skip


def test_tasks_count_alike_in_the_average():
    found = table(pd.DataFrame(KNOWN))
    assert found == {
        "dense": {"kv": 100.0, "vt": 50.0, "average": 75.0},
        "leank": {"kv": 50.0, "vt": 100.0, "average": 75.0},
    }
    assert [line.split("|")[1:-1] for line in markdown(found).replace(" ", "").splitlines()[2:]] == [
        ["dense", "100.0", "50.0", "75.0"], ["leank", "50.0", "100.0", "75.0"]
    ]  # fmt: skip


def test_a_difference_is_the_learned_mask_minus_the_other():
    scores = pd.DataFrame(lines("leank", "kv", [1.0] * 20) + lines("think", "kv", [0.25] * 20))
    assert above(scores, "think") == {"mean": 75.0, "low": 75.0, "high": 75.0}


def test_a_difference_pairs_samples_and_counts_tasks_alike():
    """Of samples that one method lacks nothing is taken, and a task of one sample counts as one of many."""
    found = above(pd.DataFrame([*KNOWN, {**KNOWN[4], "sample": "9", "score": 0.0}]), "dense")
    assert found["mean"] == pytest.approx((-50 + 50) / 2)
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["low"] < 0 < found["high"]
