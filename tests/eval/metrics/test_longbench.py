import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Indel

from leank.eval.metrics import longbench, rouge, text
from tests.helpers import parity

METRICS = {
    "qa_f1_score": ("hotpotqa", text.qa_f1),
    "rouge_score": ("gov_report", rouge.rouge_l),
    "classification_score": (None, longbench.classification),
    "count_score": ("passage_count", longbench.count),
    "retrieval_score": ("passage_retrieval_en", longbench.retrieval),
    "code_sim_score": ("lcc", longbench.code_similarity),
    "rouge_zh_score": ("vcsum", longbench.rouge_chinese),
    "qa_f1_zh_score": ("multifieldqa_zh", longbench.qa_f1_chinese),
    "retrieval_zh_score": ("passage_retrieval_zh", longbench.retrieval_chinese),
}


@pytest.mark.parametrize("row", parity.rows("longbench_metrics"), ids=parity.label)
def test_scores_are_those_of_the_official_code(row):
    if row["type"] == "metric":
        task, metric = METRICS[row["fn"]]
        assert metric(row["prediction"], row["ground_truth"], **row["kwargs"]) == row["score"]
        if task:
            assert longbench.score(task, row["prediction"], [row["ground_truth"]]) == row["score"]
        return
    arguments = (row["dataset"], row["predictions"], row["answers"])
    if row["type"] == "scorer":
        assert longbench.score_all(*arguments, row["all_classes"]) == row["score"]
    else:
        assert longbench.score_buckets(*arguments, row["lengths"], row["all_classes"]) == row["score"]


@pytest.mark.parametrize("row", parity.rows("longbench_code_sim_levenshtein"), ids=parity.label)
def test_parity_levenshtein(row):
    got = longbench.score("lcc", row["prediction"], [row["ground_truth"]], code_backend="levenshtein")
    assert got == row["score"]


@given(st.text("abc( ", max_size=30), st.text("abc( ", max_size=30))
def test_levenshtein_backend_equals_rapidfuzz(prediction, reference):
    want = round(100 * Indel.normalized_similarity(prediction, reference)) / 100 if prediction and reference else 0.0
    if prediction == reference:
        want = 1.0
    assert longbench.code_similarity(prediction, reference, "levenshtein") == want


def test_empty_answers_score_zero_even_when_equal():
    assert longbench.score("hotpotqa", "The.", ["a"]) == 0.0


def test_maximum_over_references():
    assert longbench.score("hotpotqa", "Paris", ["Lyon", "the Paris!"]) == 1.0


@pytest.mark.parametrize(("task", "want"), [("triviaqa", 1.0), ("hotpotqa", 2 / 3)])
def test_first_line_rule(task, want):
    assert longbench.score(task, "\n\nParis\nLyon", ["Paris"]) == pytest.approx(want)


def test_first_line_rule_keeps_a_leading_blank():
    assert longbench.score("trec", " \nCity", ["City"], ["City"]) == 0.0


def test_classifier_skips_the_name_after_a_removed_one():
    # "num" is removed while the list is walked, so "number", which comes next, is never checked
    assert longbench.classification("Other number", "Other number", ["num", "number", "Other number"]) == 0.5
    assert longbench.classification("Other number", "Other number", ["number", "Other number"]) == 1.0


def test_code_line_skips_fences_and_comments():
    assert longbench.code_similarity("\n```py\n# c\nx = 1  # why\nreturn x\nx", "return x") == 1.0
    assert longbench.code_similarity("# only", "") == 1.0  # no line is the empty line
    assert longbench.code_similarity("# only", "x") == 0.0


def test_difflib_and_levenshtein_differ_on_long_lines():
    line, reference = "a" * 250 + "b" * 10, "b" * 10 + "a" * 250
    assert longbench.code_similarity(line, reference) == 0.0  # difflib ignores popular characters
    assert longbench.code_similarity(line, reference, "levenshtein") == 0.96


def test_buckets_and_e_tasks():
    got = longbench.score_buckets("qasper_e", ["x", "x", "y"], [["x"]] * 3, [3999, 4000, 7999])
    assert got == {"0-4k": 100.0, "4-8k": 50.0, "8k+": None}


def test_chinese_characters_match_digits_of_the_paragraph():
    assert longbench.score("passage_retrieval_zh", "段落12 或 13", ["段落12"]) == 0.5


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"task='squad' is not in LongBench; choose one of 2wikimqa"):
        longbench.score("squad", "x", ["x"])
    with pytest.raises(ValueError, match="needs all_classes"):
        longbench.score("trec", "x", ["x"])
    with pytest.raises(ValueError, match="names no paragraph"):
        longbench.score("passage_retrieval_en", "3", ["3"])
    with pytest.raises(ValueError, match="code_backend='fuzz'"):
        longbench.score("lcc", "x", ["y"], code_backend="fuzz")
    with pytest.raises(ValueError, match="0 predictions"):
        longbench.score_all("lcc", [], [])
