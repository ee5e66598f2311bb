"""Every benchmark's scores: those of the official code, and where its rules surprise.

GSM-Infinite's own examples may not be redistributed: its replies are ours.
"""

import sys

import pytest

from leank.eval.benchmarks import gsm_infinite as gsm
from leank.eval.benchmarks import longbench
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.ruler import postprocess
from leank.eval.metrics import text
from tests.helpers import parity

LONGBENCH = {
    "qa_f1_score": ("hotpotqa", text.qa_f1),
    "rouge_score": ("gov_report", text.rouge_l),
    "classification_score": (None, longbench.classification),
    "count_score": ("passage_count", longbench.count),
    "retrieval_score": ("passage_retrieval_en", longbench.retrieval),
    "code_sim_score": ("lcc", longbench.code_similarity),
    "rouge_zh_score": ("vcsum", longbench.rouge_chinese),
    "qa_f1_zh_score": ("multifieldqa_zh", longbench.qa_f1_chinese),
    "retrieval_zh_score": ("passage_retrieval_zh", longbench.METRIC_OF_TASK["passage_retrieval_zh"]),
}
RULER = {"string_match_all": "ruler_all", "string_match_part": "ruler_part"}
BUCKETS = ("0-4k", "4-8k", "8k+")


def score(metric, task, reply, answers, classes=None):
    return score_row(Row(task, "0", "c", "q", answers, 8, metric, all_classes=classes), reply)


def mean(scores):
    """As the official code averages: per cent with two decimals."""
    return round(100 * sum(scores) / len(scores), 2) if scores else None


@pytest.mark.parametrize("row", parity.rows("longbench_metrics"), ids=parity.label)
def test_longbench_s_scores_are_those_of_the_official_code(row):
    if row["type"] == "metric":
        task, metric = LONGBENCH[row["fn"]]
        assert metric(row["prediction"], row["ground_truth"], **row["kwargs"]) == row["score"]
        if task:
            assert score("longbench", task, row["prediction"], [row["ground_truth"]]) == row["score"]
        return
    pairs = zip(row["predictions"], row["answers"], strict=True)
    scores = [score("longbench", row["dataset"], reply, answers, row["all_classes"]) for reply, answers in pairs]
    if row["type"] == "scorer":
        assert mean(scores) == row["score"]
    else:
        of = [BUCKETS[(n >= 4000) + (n >= 8000)] for n in row["lengths"]]
        found = {name: mean([s for s, at in zip(scores, of, strict=True) if at == name]) for name in BUCKETS}
        assert found == row["score"]


@pytest.mark.parametrize("row", parity.rows("ruler_metrics"), ids=parity.label)
def test_ruler_s_scores_are_those_of_the_official_code(row):
    """Officially 0-100 with two decimals, over one reply or several."""
    if row["type"] == "batch":
        pairs = list(zip(row["predictions_postprocessed"], row["references"], strict=True))
        scores = [score(RULER[row["metric"]], "t", *pair) for pair in pairs]
        assert round(100 * sum(scores) / len(scores), 2) == pytest.approx(row["score"], abs=0.011)
    else:
        assert postprocess(row["prediction_raw"]) == row["prediction_postprocessed"]
        assert 100 * score(RULER[row["metric"]], "t", row["prediction_raw"], row["references"]) == pytest.approx(
            row["score"]
        )


def test_postprocess_turns_tabs_and_breaks_into_newlines():
    assert postprocess("\t a\tb\r\nc\x7f\x1f ") == "a\nb\n\nc\x7f"


def listed(answers):
    return answers if isinstance(answers, list) else [answers]


@pytest.mark.parametrize("row", parity.rows("infinitebench_scores"), ids=parity.label)
def test_infinitebench_s_scores_are_those_of_the_official_code(row):
    assert score("infinitebench", row["task"], row["prediction"], listed(row["label"])) == row["score"]


@pytest.mark.parametrize(
    ("metric", "task", "reply", "answers", "want"),
    [
        ("infinitebench", "passkey", "12 then 34", "12", 1),
        ("infinitebench", "passkey", "no number", "12", 0),
        ("infinitebench", "number_string", "x0012y", ["0012"], 1),
        ("infinitebench", "kv_retrieval", '"abc-1".', "abc-1", 1),
        ("infinitebench", "kv_retrieval", "xabc-1", "abc-1", 0),
        ("infinitebench", "longdialogue_qa_eng", "It is paul.", ["PAUL", "PAUL D."], 1),
        ("infinitebench", "longdialogue_qa_eng", "Walter", ["WALT", "WALTER"], 0),  # only the first label counts
        ("infinitebench", "longdialogue_qa_eng", "Paul Garner", ["PAUL GARNER"], 0),  # a name of two words is no word
        ("infinitebench", "code_run", "it returns `-8`.", -8, 1),
        ("infinitebench", "code_run", "it returns 2.5", 5, 1),  # "." is a blank
        ("infinitebench", "code_run", "it returns five", 5, 0),
        ("infinitebench", "code_run", "", 5, 0),
        ("infinitebench", "code_run", "9" * 5000, 5, 0),  # more digits than int() takes
        ("infinitebench", "math_find", "9" * 5000, 9, 0),
        ("infinitebench", "math_find", "9" * 5000, 9.5, 0),
        ("infinitebench", "math_calc", "7 " + "9" * 5000, [7, 9], 0.5),
        ("infinitebench", "code_debug", " B. f", ["f", "B"], 1),
        ("infinitebench", "code_debug", "The answer is: **Option B**", ["f", "B"], 1),
        ("infinitebench", "code_debug", "The answer is:B", ["f", "B"], 0),  # one character after the phrase is skipped
        ("infinitebench", "code_debug", "The error is: `g.f`", ["g.f", "B"], 1),
        ("infinitebench", "code_debug", "answer:", ["f", "B"], 0),
        ("infinitebench", "longbook_choice_eng", "", ["x", "B"], 0),
        ("infinitebench", "longbook_choice_eng", "Because", ["x", "B"], 1),
        ("infinitebench", "longbook_choice_eng", "\nBecause", ["x", "B"], 1),
        ("infinitebench", "longbook_choice_eng", "x", ["x", "B"], 1),
        # what follows the phrase decides
        ("infinitebench", "longbook_choice_eng", "the answer is not B", ["x", "B"], 0),
        ("infinitebench", "longbook_choice_eng", "the answer is B", ["x", "B"], 1),
        ("infinitebench", "longbook_choice_eng", "the answer is:\nB", ["x", "B"], 1),
        ("infinitebench", "longbook_choice_eng", "I say AB or B", ["x", "B"], 0),
        ("infinitebench", "longbook_choice_eng", "I say B", ["x", "B"], 1),
        ("infinitebench", "longbook_choice_eng", "none of them", ["x", "B"], 0),
        ("infinitebench", "longbook_qa_eng", "The cat", ["dog", "a cat"], 1),
        ("infinitebench", "longbook_qa_chn", "猫。", ["猫"], 1),
        ("infinitebench", "longbook_qa_chn", "KV猫", ["kv猫"], 1),
        ("infinitebench", "longbook_sum_eng", "One.\nTwo", ["one\ntwo", "x"], 1),
        ("infinitebench", "math_find", "It is 4.0", [4.0], 1),
        ("infinitebench", "math_find", "It is -4", 4, 1),  # the sign is not read
        ("infinitebench", "math_find", "It is 4.5", 4, 0),  # officially an uncaught ValueError
        ("infinitebench", "math_find", "none", 4, 0),
        ("infinitebench", "math_calc", "[1, 2, 9]", [1, 2, 3, 4], 0.5),
        ("infinitebench", "math_calc", "1 2", [[1, 2]], 1),
        ("infinitebench", "math_calc", "", [1], 0),
        ("longbench", "hotpotqa", "The.", ["a"], 0),  # empty answers score zero even when equal
        ("longbench", "hotpotqa", "Paris", ["Lyon", "the Paris!"], 1),
        ("longbench", "hotpotqa", "\n\nParis\nLyon", ["Paris"], 2 / 3),
        ("longbench", "triviaqa", "\n\nParis\nLyon", ["Paris"], 1),  # the first line alone
        ("longbench", "trec", " \nCity", ["City"], 0),  # a leading blank is a line
        ("longbench", "passage_retrieval_zh", "段落12 或 13", ["段落12"], 0.5),
        ("longbench", "lcc", "\n```py\n# c\nx = 1  # why\nreturn x\nx", ["return x"], 1),
        ("longbench", "lcc", "# only", [""], 1),  # no line is the empty line
        ("longbench", "lcc", "# only", ["x"], 0),
        ("longbench", "lcc", "a" * 250 + "b" * 10, ["b" * 10 + "a" * 250], 0),  # difflib ignores popular characters
        ("ruler_part", "t", "I don't know", ["no"], 1),  # matches inside words
        ("ruler_part", "t", "yes", ["no", "maybe"], 0),
        ("ruler_part", "t", "maybe", ["no", "maybe"], 1),
        ("ruler_all", "t", "maybe", ["no", "maybe"], 0.5),
        ("ruler_all", "t", "a b", ["a", "b", "c"], 0.6667),  # per cent with two decimals
    ],
)
def test_scores_by_the_rule_of_each_task(metric, task, reply, answers, want):
    assert score(metric, task, reply, listed(answers), ["City"]) == pytest.approx(want, abs=1e-9)


def test_classifier_skips_the_name_after_a_removed_one():
    # "num" is removed while the list is walked, so "number", which comes next, is never checked
    assert longbench.classification("Other number", "Other number", ["num", "number", "Other number"]) == 0.5
    assert longbench.classification("Other number", "Other number", ["number", "Other number"]) == 1.0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match='needs "all_classes"'):
        score("longbench", "trec", "x", ["x"])
    with pytest.raises(ValueError, match="names no paragraph"):
        score("longbench", "passage_retrieval_en", "3", ["3"])


# ROUGE where the packages' habits matter


def test_exact_match_is_not_quite_one():
    assert text.rouge_l("the cat sat", "the cat sat") == 0.999999995
    assert text.rouge_lsum("the cat sat", "the cat sat") == 1.0


def test_blank_and_empty_texts():
    assert text.rouge_l("   ", " ") == 0.999999995
    assert text.rouge_l("...", "word") == text.rouge_l("", "word") == text.rouge_lsum("", "word") == 0.0


def deeper(frames, call):
    return deeper(frames - 1, call) if frames else call()


@pytest.mark.parametrize("depth", [0, 200])
def test_long_sentences_overflow_the_official_recursion_wherever_they_are_scored(depth):
    before = sys.getrecursionlimit()
    fits, overflows = (" ".join(f"w{i}" for i in range(n)) for n in (990, 991))
    assert deeper(depth, lambda: text.rouge_l(fits, fits)) == 0.999999995
    assert deeper(depth, lambda: text.rouge_l(overflows, overflows)) == 0.0
    assert sys.getrecursionlimit() == before


def test_sentences_of_600_unlike_words_overflow_too():
    """They need 600 + 600 steps once their only common word stands first."""
    x, y = ("same " + " ".join(f"{side}{i}" for i in range(600)) for side in "xy")
    assert text.rouge_l(x, y) == 0.0


# GSM-Infinite

RIGHT = [
    "Answer: 31.",
    "so the ANSWER: 31.",
    "Answer: 31",
    "Answer: +31.",
    "Answer:  31 .",
    "Answer: ３１.",
    "Answer: 3_1.",
    "Answer: 31.5.",  # ends at the first "."
    "Answer: 31\nBecause the bears, the wolves and so on.",
    "Solution: 31.",
    "\\boxed{4} no, $\\boxed{31}$",
    "**Answer:** 31.",
    "**Answer: 31**",
    "Final answer: Answer: 31.",
    "Well then\nAnswer: 31.",
    "\\text{Answer: } 31 animals",
    "x is 30. y is 31",
    "this 31.",
    "answex\x08er: 31." + " answer: 31.",
]
WRONG = [
    "",
    "31",
    "Answer:31.",
    "Answer: 31 animals.",
    "Answer: 30. Answer: 31.",  # the first counts
    "it is 31. No, it is 30.",  # the last counts
    "\\boxed{31} no, \\boxed{30}",
    "Answer: 31,000.",
    "Answer: thirty-one.",
    "\\text{Answer: }31",
    "\\text{Answer: } 31",  # officially the grader raises
    "\\text{Answer: } ",
]


@pytest.mark.parametrize(("replies", "wanted"), [(RIGHT, 1), (WRONG, 0)])
def test_replies_by_the_ten_rules(replies, wanted):
    row = Row("gsm_infinite", "0", "c", "q", [31], 8, "gsm_infinite")
    assert [reply for reply in replies if score_row(row, reply) != wanted] == []


@pytest.mark.parametrize(
    ("reply", "stated"),
    [("Answer: many. Solution: 7.", 7), ("Answer: 8 owls. The total is 7", 7), ("Answer: -4.", -4), ("", None)],
)
def test_a_rule_without_an_integer_passes_on_to_the_next(reply, stated):
    assert gsm.stated_integer(reply) == stated


def test_the_gold_answer_is_given_or_ends_the_solution():
    assert gsm.gold_answer(None, "so w = 31. Answer: 31.") == gsm.gold_answer("31", "so w = 31.") == 31
    for given in ((None, "so w = 31."), (None, None), (30, "Answer: 31."), (None, "Answer: x.")):
        with pytest.raises(ValueError, match=r"(?i)answer"):
            gsm.gold_answer(*given)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("V12 and V7.", True),
        ("V7, V12, V7", True),
        ("V12", False),
        ("V12, V7, V8", False),
        ("V12_1, V7", False),
        ("v12, V7", False),
        ("<think>V99</think> V12, V7", True),
        ("None", False),
    ],
)
def test_symbolic_answers_are_compared_as_sets(reply, right):
    assert score_row(Row("s", "0", "c", "q", ["V7", "V12"], 8, "gsm_symbolic"), reply) == right


def test_auc_of_leank_table_14_gives_its_table_4():
    accuracy = {2: 0.1429, 4: 0.1389, 6: 0.1508, 8: 0.1349, 10: 0.0516, 12: 0.0278}
    assert gsm.auc(accuracy) == pytest.approx(0.5615, abs=1e-4)
    assert gsm.auc(dict(reversed(accuracy.items()))) == gsm.auc(accuracy)
    assert gsm.auc(dict.fromkeys(accuracy, 1.0)) == 5.0
    assert gsm.auc({2: 0.3}) == gsm.auc({}) == 0.0
