"""GSM-Infinite graders and areas under the accuracy curve.

Behaviour of Infini-AI-Lab/gsm_infinite caa5388 (pred/eval_realistic.py, pred/eval_symbolic.py, app.py), written anew.
The realistic grader tries ten (keyword, terminator) rules in order and takes the first whose text is an integer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np


class AnswerRule(NamedTuple):
    """Text between `keyword` and `end` (or the end of the reply) is read as the answer."""

    keyword: str
    end: str | None  # None: the answer is the run of digits after the keyword
    last: bool = False  # take the last occurrence of the keyword, not the first


RULES = (
    AnswerRule("answer: ", "."),
    AnswerRule("solution: ", "."),
    AnswerRule("oxed{", "}", last=True),
    AnswerRule("**answer:** ", "."),
    AnswerRule("**answer: ", "**"),
    AnswerRule("final answer: answer: ", "."),
    AnswerRule("\nanswer: ", "."),
    AnswerRule("\\text{answer: } ", None),
    AnswerRule("is ", ".", last=True),
    AnswerRule("answer: ", "\n"),
)


def grade(reply: str, answer: int, at_end: Literal["wrong", "number"] = "wrong") -> bool:
    r"""Whether the reply states `answer`.

    The reply is lower-cased; the first rule that yields an integer decides, so of two "answer: " the first counts, of
    two "is " the last, and "Answer: 12 animals." is wrong. Integers are what int() takes: "+12", " 12 ", "１２", "1_2".
    at_end: the official digit rule (``\\text{Answer: } 12``) raises IndexError, which ends its whole run, when nothing
    follows the number; "wrong" gives such a reply no credit, "number" reads the number up to the end of the reply.
    """
    return grade_all([reply], answer, at_end)[0]


def grade_all(replies: Sequence[str], answer: int, at_end: Literal["wrong", "number"] = "wrong") -> list[bool]:
    """`grade` for several replies to one problem.

    Officially the digit rule measures the length of the number in the *first* reply, whichever reply it grades. That
    is kept here; grade each reply with `grade` to avoid it.

    Raises ValueError for another `at_end`.
    """
    if at_end not in ("wrong", "number"):
        raise ValueError(f"at_end={at_end!r}: choose 'wrong' (no credit, default) or 'number' (read to the end)")
    texts = [re.sub(".\x08", "b", reply).lower() for reply in replies]
    return [_stated(text, texts[0], at_end) == answer for text in texts]


def gold_answer(solution: str) -> int:
    """The integer between "Answer: " and the next "." of a problem's solution. Raises ValueError if there is none."""
    number, dot, _ = solution.partition("Answer: ")[2].partition(".")
    if not dot:
        raise ValueError(f"no 'Answer: <integer>.' in the solution {solution[-80:]!r}")
    return int(number)


def grade_symbolic(reply: str, answers: Sequence[str]) -> bool:
    """Whether the variables named in the reply (``V`` and digits as a whole word) are exactly `answers`, as sets.

    Text up to the last "</think>" is ignored. Officially a 7B model first extracts the names from the reply; give its
    output here to repeat that. On a raw reply every name that is mentioned counts.
    """
    return set(named_variables(reply)) == set(answers)


def named_variables(reply: str) -> list[str]:
    """Variable names in a symbolic reply, in order, repeats kept; "V12_1" names none."""
    return re.findall(r"\bV\d+\b", reply.rsplit("</think>", 1)[-1])


def auc(accuracy_by_op: Mapping[int, float] | Sequence[float]) -> float:
    """LeanK's area: trapezoid over neighbouring op values at unit spacing.

    accuracy_by_op: {op: accuracy 0-1}, or accuracies in order of op. Six op values (2, 4, .. 12) give a scale of 0-5.
    Fewer than two values give 0. Source: LeanK tables 14 -> 4.
    """
    return float(np.trapezoid(_by_op(accuracy_by_op)))


def auc_app(accuracy_by_op: Mapping[int, float]) -> float:
    """Area of the benchmark's own results viewer: trapezoid over the op values themselves, times 100."""
    return float(np.trapezoid(_by_op(accuracy_by_op), sorted(accuracy_by_op))) * 100


def _by_op(accuracy_by_op: Mapping[int, float] | Sequence[float]) -> list[float]:
    if isinstance(accuracy_by_op, Mapping):
        return [accuracy_by_op[op] for op in sorted(accuracy_by_op)]
    return list(accuracy_by_op)


def _stated(text: str, first: str, at_end: str) -> int | None:
    """The integer that `text` states, or None. `first`: the first reply, where the digit rule measures."""
    for rule in RULES:
        start = text.rfind(rule.keyword) if rule.last else text.find(rule.keyword)
        if start == -1:
            continue
        start += len(rule.keyword)
        if rule.end is None:
            stop = start
            while stop < len(first) and first[stop].isdigit():
                stop += 1
            if stop >= len(first) and at_end == "wrong":
                return None
        else:
            stop = text.find(rule.end, start)
            if stop == -1:
                stop = len(text)
        try:
            return int(text[start:stop])
        except ValueError:
            continue
    return None
