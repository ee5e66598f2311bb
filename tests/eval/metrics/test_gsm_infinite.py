"""Our own replies to the ten rules (the benchmark's own examples may not be redistributed)."""

import pytest

from leank.eval.metrics import gsm_infinite as gsm

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
]


@pytest.mark.parametrize("reply", RIGHT)
def test_replies_that_are_right(reply):
    assert gsm.grade(reply, 31)


@pytest.mark.parametrize("reply", WRONG)
def test_replies_that_are_wrong(reply):
    assert not gsm.grade(reply, 31)


def test_a_rule_without_an_integer_passes_on_to_the_next():
    assert gsm.grade("Answer: many. Solution: 7.", 7)
    assert gsm.grade("Answer: 8 owls. The total is 7", 7)


def test_negative_answers():
    assert gsm.grade("Answer: -4.", -4)


@pytest.mark.parametrize("reply", ["\\text{Answer: } 31", "\\text{Answer: } "])
def test_where_officially_the_grader_raises(reply):
    assert not gsm.grade(reply, 31)
    assert gsm.grade(reply, 31, at_end="number") == reply.endswith("31")


def test_several_replies_share_the_digit_rule_of_the_first():
    first, second = "\\text{Answer: } 7 owls", "\\text{Answer: } 31 owls"
    assert gsm.grade_all([first, second], 31) == [False, False]  # "3": one digit, as in the first
    assert gsm.grade_all([second, first], 7) == [False, True]  # "7 ": two characters, which is an integer too
    assert [gsm.grade(reply, 31) for reply in (first, second)] == [False, True]


def test_the_gold_answer_ends_a_solution():
    assert gsm.gold_answer("so w = 31. Answer: 31.") == 31
    with pytest.raises(ValueError, match="no 'Answer"):
        gsm.gold_answer("so w = 31.")


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
    assert gsm.grade_symbolic(reply, ["V7", "V12"]) == right


def test_symbolic_without_any():
    assert gsm.grade_symbolic("None", [])


def test_auc_of_leank_table_14_gives_its_table_4():
    accuracy = {2: 0.1429, 4: 0.1389, 6: 0.1508, 8: 0.1349, 10: 0.0516, 12: 0.0278}
    assert gsm.auc(accuracy) == pytest.approx(0.5615, abs=1e-4)
    assert gsm.auc(dict(reversed(accuracy.items()))) == gsm.auc(accuracy) == gsm.auc(list(accuracy.values()))
    assert gsm.auc([1.0] * 6) == 5.0
    assert gsm.auc([0.3]) == gsm.auc({}) == 0.0


def test_auc_of_the_results_viewer_uses_the_op_values():
    assert gsm.auc_app({4: 0.5, 2: 1.0}) == 150.0
    assert gsm.auc_app({2: 1.0}) == 0.0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="at_end='raise'"):
        gsm.grade("x", 1, at_end="raise")
