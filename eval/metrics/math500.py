"""MATH-500 grader: equal as text, else equal for math_verify (docs/benchmarks.md has its differences from prm800k).

Replies and answers are hostile input: what is not equal as text is compared in a process with limits
(eval.metrics.math_worker).
"""

from leank.eval.metrics import math_worker
from leank.eval.metrics.math_equal import MAX_EXPRESSION


def grade(given: str | None, truth: str) -> bool:
    """Whether the given answer is right.

    given: the extracted answer (`last_boxed` extracts one), None is wrong; truth: the row's answer. A text of more than
    `MAX_EXPRESSION` characters that is not equal, and one too costly to evaluate, is wrong.
    Raises ImportError if math_verify is missing and needed.
    """
    if given is None:
        return False
    if given.strip() == truth.strip():
        return True
    if not given.strip() or max(len(given), len(truth)) > MAX_EXPRESSION:
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
