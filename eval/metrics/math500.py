"""MATH-500 grader: equal after normalisation, else equal for sympy.

Source: openai/prm800k 7ecc794, prm800k/grading (MIT), whose first normalisation is that of Hendrycks' MATH. Needs
sympy and pylatexenc 2. Replies and answers are hostile input: what is not equal at once is compared in a process with
limits (eval.metrics.math_worker), which sees at most `MAX_ANSWER` characters of either.
"""

from leank.eval.metrics import math_worker
from leank.eval.metrics.math_normalize import mathd_normalize

MAX_ANSWER = 10_000  # characters; the longest answer of MATH-500 has 53


def grade(given: str | None, truth: str | None) -> bool:
    """Whether the given answer is right.

    given: the extracted answer (`last_boxed` extracts one), None is wrong; truth: the row's answer. Right if both
    agree after either normalisation; else tuples and intervals are compared piece by piece (brackets must match) with
    sympy. An integer needs the same integer, a numeric fraction the same fraction: 4/2 is not 2, 2/4 is not 1/2.
    Differs from the official grader for hostile texts alone, which are wrong here: of more than `MAX_ANSWER`
    characters and not equal in Hendrycks' normal form, outside the characters and names of eval.metrics.math_equal,
    or too costly to evaluate. Raises ImportError if pylatexenc or sympy is missing and needed.
    """
    if given is None:
        return False
    if mathd_normalize(truth) == mathd_normalize(given):
        return True
    if truth is None or max(len(given), len(truth)) > MAX_ANSWER:
        return False
    return math_worker.equal(given, truth)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\\boxed{...}`` of a reply, braces balanced; None without one. Ours, for chat models."""
    start = text.rfind("\\boxed{")
    if start == -1:
        return None
    depth = 0
    start += len("\\boxed{")
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            if depth == 0:
                return text[start:i]
            depth -= 1
    return None
