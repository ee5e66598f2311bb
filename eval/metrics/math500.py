"""MATH-500 grader: equal after normalisation, else equal for sympy.

Source: openai/prm800k 7ecc794, prm800k/grading (MIT), whose first normalisation is that of Hendrycks' MATH. Needs
sympy and pylatexenc 2. sympy evaluates parts of the reply, so expressions that could run long are refused, as there,
and evaluation is cut off after `SYMPY_SECONDS`.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from eval.metrics.math_normalize import grader_normalize, mathd_normalize, strip_thousands

SYMPY_SECONDS = 10.0

# The "^" forms are refused officially; the same with "**", long and nested factorials would hang in one C call.
_REFUSED = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]|\*\*\(|\*\*[0-9]+\*\*|\*\*[0-9][0-9]|[0-9]{4,}!|!\)+!")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"


def grade(given: str | None, truth: str | None) -> bool:
    """Whether the given answer is right.

    given: the extracted answer (`last_boxed` extracts one), None is wrong; truth: the row's answer. Right if both
    agree after either normalisation; else tuples and intervals are compared piece by piece (brackets must match) with
    sympy. An integer needs the same integer, a numeric fraction the same fraction: 4/2 is not 2, 2/4 is not 1/2.
    Raises ImportError if pylatexenc or sympy is missing and needed.
    """
    if given is None:
        return False
    if mathd_normalize(truth) == mathd_normalize(given):
        return True
    if truth is None:
        return False
    want, got = grader_normalize(truth), grader_normalize(given)
    if want == got:
        return True
    if not got:
        return False
    wants, gots = _pieces(want), _pieces(got)
    if len(wants) != len(gots) or (len(wants) > 1 and (want[0] != got[0] or want[-1] != got[-1])):
        return False
    return bool(wants) and all(map(_piece_equal, wants, gots))


def last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` of a reply, braces balanced; None without one. Ours, for chat models."""
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


def _piece_equal(want: str, got: str) -> bool:
    if _FRACTION.search(want) and _FRACTION.search(got):
        return want == got
    if _is_integer(want) != _is_integer(got):
        return False
    return _sympy_equal(want, got)


def _pieces(expression: str) -> list[str]:
    """Parts of a tuple or interval, or the expression itself; none for an empty one."""
    expression = strip_thousands(expression)
    if not expression:
        return []
    inner = expression[1:-1]
    if (
        len(expression) > 2
        and expression[0] in _BRACKETS
        and expression[-1] in _BRACKETS
        and not any(bracket in inner for bracket in _BRACKETS)
    ):
        return [piece.strip() for piece in inner.split(",")]
    return [expression]


def _is_integer(text: str) -> bool:
    try:
        value = float(strip_thousands(text))
        return abs(value - round(value)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _sympy_equal(want: str, got: str) -> bool:
    difference = f"({want})-({got})"
    letters = {c for c in difference.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > 2 or _REFUSED.search(difference):
        return False
    try:
        import sympy
        from sympy.parsing import sympy_parser
    except ImportError as error:
        raise ImportError("MATH-500 compares expressions with sympy: pip install sympy") from error
    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        with _time_limit(SYMPY_SECONDS):
            parsed = sympy_parser.parse_expr(difference.replace("^", "**"), transformations=rules)
            return bool(sympy.simplify(parsed) == 0)
    except Exception:  # officially anything that sympy cannot take is unequal
        return False


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`; no limit where alarms are not to be had (threads, Windows)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"sympy took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
