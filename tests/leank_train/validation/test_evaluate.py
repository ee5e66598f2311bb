"""The figures of validation, from results whose means are known."""

import pytest

from leank_train.validation.evaluate import Result, markdown, paired_difference, table


def result(method, task, index, recall, length=512):
    return Result(task, length, index, method, recall, "reply")


RESULTS = [
    *(result("dense", "kv", i, 1.0) for i in range(3)), result("dense", "vt", 0, 0.5),
    *(result("leank", "kv", i, recall) for i, recall in enumerate([1.0, 0.5, 0.0])), result("leank", "vt", 0, 1.0),
]  # fmt: skip


def test_tasks_count_alike_in_the_average():
    found = table(RESULTS)
    assert found == {
        "dense": {"kv": 100.0, "vt": 50.0, "average": 75.0},
        "leank": {"kv": 50.0, "vt": 100.0, "average": 75.0},
    }
    assert table(RESULTS, "exact")["leank"] == {
        "kv": pytest.approx(100 / 3),
        "vt": 100.0,
        "average": pytest.approx(200 / 3),
    }
    assert [line.split("|")[1:-1] for line in markdown(found).replace(" ", "").splitlines()[2:]] == [
        ["dense", "100.0", "50.0", "75.0"], ["leank", "50.0", "100.0", "75.0"]
    ]  # fmt: skip


def test_a_difference_is_the_first_method_minus_the_second():
    results = [result("leank", "kv", i, 1.0) for i in range(20)] + [result("think", "kv", i, 0.25) for i in range(20)]
    assert paired_difference(results, "leank", "think") == (75.0, 75.0, 75.0)
    assert paired_difference(results, "think", "leank") == (-75.0, -75.0, -75.0)


def test_a_difference_pairs_samples_and_counts_tasks_alike():
    """Of samples that one method lacks nothing is taken, and a task of one sample counts as one of many."""
    mean, low, high = paired_difference([*RESULTS, result("leank", "kv", 9, 0.0)], "leank", "dense")
    assert mean == pytest.approx((-50 + 50) / 2)
    assert low <= mean <= high
    assert low < 0 < high


def test_questions_of_one_document_are_pairs_of_their_own():
    results = [
        result(method, "kv", 0, recall) for method, recalls in (("a", (1, 0)), ("b", (0, 0))) for recall in recalls
    ]
    assert paired_difference(results, "a", "b")[0] == 50.0
