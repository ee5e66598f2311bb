import pytest

from leank.eval.benchmarks import longbench
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.metrics import text
from tests.helpers import parity

METRICS = {
    "qa_f1_score": ("hotpotqa", text.qa_f1),
    "rouge_score": ("gov_report", text.rouge_l),
    "classification_score": (None, longbench.classification),
    "count_score": ("passage_count", longbench.count),
    "retrieval_score": ("passage_retrieval_en", longbench.retrieval),
    "code_sim_score": ("lcc", longbench.code_similarity),
    "rouge_zh_score": ("vcsum", longbench.rouge_chinese),
    "qa_f1_zh_score": ("multifieldqa_zh", longbench.qa_f1_chinese),
    "retrieval_zh_score": ("passage_retrieval_zh", longbench.retrieval_chinese),
}
BUCKETS = ("0-4k", "4-8k", "8k+")


def score(task, reply, answers, classes=None):
    return score_row(Row(task, "0", "c", "q", answers, 8, "longbench", all_classes=classes), reply)


def mean(scores):
    """As the official code averages: per cent with two decimals."""
    return round(100 * sum(scores) / len(scores), 2) if scores else None


@pytest.mark.parametrize("row", parity.rows("longbench_metrics"), ids=parity.label)
def test_scores_are_those_of_the_official_code(row):
    if row["type"] == "metric":
        task, metric = METRICS[row["fn"]]
        assert metric(row["prediction"], row["ground_truth"], **row["kwargs"]) == row["score"]
        if task:
            assert score(task, row["prediction"], [row["ground_truth"]]) == row["score"]
        return
    pairs = zip(row["predictions"], row["answers"], strict=True)
    scores = [score(row["dataset"], reply, answers, row["all_classes"]) for reply, answers in pairs]
    if row["type"] == "scorer":
        assert mean(scores) == row["score"]
    else:
        of = [BUCKETS[(n >= 4000) + (n >= 8000)] for n in row["lengths"]]
        found = {name: mean([s for s, at in zip(scores, of, strict=True) if at == name]) for name in BUCKETS}
        assert found == row["score"]


@pytest.mark.parametrize(
    ("task", "reply", "answers", "want"),
    [
        ("hotpotqa", "The.", ["a"], 0),  # empty answers score zero even when equal
        ("hotpotqa", "Paris", ["Lyon", "the Paris!"], 1),
        ("hotpotqa", "\n\nParis\nLyon", ["Paris"], 2 / 3),
        ("triviaqa", "\n\nParis\nLyon", ["Paris"], 1),  # the first line alone
        ("trec", " \nCity", ["City"], 0),  # a leading blank is a line
        ("passage_retrieval_zh", "段落12 或 13", ["段落12"], 0.5),
        ("lcc", "\n```py\n# c\nx = 1  # why\nreturn x\nx", ["return x"], 1),
        ("lcc", "# only", [""], 1),  # no line is the empty line
        ("lcc", "# only", ["x"], 0),
        ("lcc", "a" * 250 + "b" * 10, ["b" * 10 + "a" * 250], 0),  # difflib ignores popular characters
    ],
)
def test_scores_by_the_rule_of_each_task(task, reply, answers, want):
    assert score(task, reply, answers, ["City"]) == pytest.approx(want)


def test_classifier_skips_the_name_after_a_removed_one():
    # "num" is removed while the list is walked, so "number", which comes next, is never checked
    assert longbench.classification("Other number", "Other number", ["num", "number", "Other number"]) == 0.5
    assert longbench.classification("Other number", "Other number", ["number", "Other number"]) == 1.0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match='needs "all_classes"'):
        score("trec", "x", ["x"])
    with pytest.raises(ValueError, match="names no paragraph"):
        score("passage_retrieval_en", "3", ["3"])
