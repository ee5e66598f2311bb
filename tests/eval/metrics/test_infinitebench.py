import pytest

from leank.eval.benchmarks.base import Row, score_row
from tests.helpers import parity


def scored(task, reply, answers):
    answers = answers if isinstance(answers, list) else [answers]
    return score_row(Row(task, "0", "c", "q", answers, 8, "infinitebench"), reply)


@pytest.mark.parametrize("row", parity.rows("infinitebench_scores"), ids=parity.label)
def test_scores_are_those_of_the_official_code(row):
    assert scored(row["task"], row["prediction"], row["label"]) == row["score"]


@pytest.mark.parametrize(
    ("task", "reply", "answers", "want"),
    [
        ("passkey", "12 then 34", "12", 1),
        ("passkey", "no number", "12", 0),
        ("number_string", "x0012y", ["0012"], 1),
        ("kv_retrieval", '"abc-1".', "abc-1", 1),
        ("kv_retrieval", "xabc-1", "abc-1", 0),
        ("longdialogue_qa_eng", "It is paul.", ["PAUL", "PAUL D."], 1),
        ("longdialogue_qa_eng", "Walter", ["WALT", "WALTER"], 0),  # only the first label counts
        ("longdialogue_qa_eng", "Paul Garner", ["PAUL GARNER"], 0),  # a name of two words is no word
        ("code_run", "it returns `-8`.", -8, 1),
        ("code_run", "it returns 2.5", 5, 1),  # "." is a blank
        ("code_run", "it returns five", 5, 0),
        ("code_run", "", 5, 0),
        ("code_run", "9" * 5000, 5, 0),  # more digits than int() takes
        ("math_find", "9" * 5000, 9, 0),
        ("math_find", "9" * 5000, 9.5, 0),
        ("math_calc", "7 " + "9" * 5000, [7, 9], 0.5),
        ("code_debug", " B. f", ["f", "B"], 1),
        ("code_debug", "The answer is: **Option B**", ["f", "B"], 1),
        ("code_debug", "The answer is:B", ["f", "B"], 0),  # one character after the phrase is skipped
        ("code_debug", "The error is: `g.f`", ["g.f", "B"], 1),
        ("code_debug", "answer:", ["f", "B"], 0),
        ("longbook_choice_eng", "", ["x", "B"], 0),
        ("longbook_choice_eng", "Because", ["x", "B"], 1),
        ("longbook_choice_eng", "\nBecause", ["x", "B"], 1),
        ("longbook_choice_eng", "x", ["x", "B"], 1),
        ("longbook_choice_eng", "the answer is not B", ["x", "B"], 0),  # what follows the phrase decides
        ("longbook_choice_eng", "the answer is B", ["x", "B"], 1),
        ("longbook_choice_eng", "the answer is:\nB", ["x", "B"], 1),
        ("longbook_choice_eng", "I say AB or B", ["x", "B"], 0),
        ("longbook_choice_eng", "I say B", ["x", "B"], 1),
        ("longbook_choice_eng", "none of them", ["x", "B"], 0),
        ("longbook_qa_eng", "The cat", ["dog", "a cat"], 1),
        ("longbook_qa_chn", "猫。", ["猫"], 1),
        ("longbook_qa_chn", "KV猫", ["kv猫"], 1),
        ("longbook_sum_eng", "One.\nTwo", ["one\ntwo", "x"], 1),
        ("math_find", "It is 4.0", [4.0], 1),
        ("math_find", "It is -4", 4, 1),  # the sign is not read
        ("math_find", "It is 4.5", 4, 0),  # officially an uncaught ValueError
        ("math_find", "none", 4, 0),
        ("math_calc", "[1, 2, 9]", [1, 2, 3, 4], 0.5),
        ("math_calc", "1 2", [[1, 2]], 1),
        ("math_calc", "", [1], 0),
    ],
)
def test_scores_by_the_rule_of_each_task(task, reply, answers, want):
    assert scored(task, reply, answers) == want
