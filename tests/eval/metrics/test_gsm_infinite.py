"""Our own replies to the ten rules (the benchmark's own examples may not be redistributed)."""

import pytest

from leank.eval.benchmarks import gsm_infinite as gsm
from leank.eval.benchmarks.base import Row, score_row

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
