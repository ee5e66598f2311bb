"""The two normal forms in which MATH-500 answers are compared (see eval.metrics.math500)."""

import logging
import re
from contextlib import suppress

_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour"),
    *("day", "week", "month", "year", "foot", "feet", "inch", "yard"),
)
_UNIT_PATTERNS = [re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS]


class _Malformed(Exception):
    """LaTeX that the first form leaves as it came."""


def mathd_normalize(answer: str | None) -> str | None:
    r"""LaTeX spelled one way: Hendrycks' normal form, after removing an enclosing ``\\text{}``.

    One spelling of ``\\frac`` and ``\\sqrt``; no spaces, degrees, percent or dollar signs; no trailing
    ``\\text{ unit}``, no short "x=" prefix. LaTeX that cannot be rewritten comes back stripped but otherwise as it was.
    """
    if answer is None:
        return None
    answer = answer.strip()
    enclosed = _TEXT.search(answer)
    if enclosed:
        answer = enclosed["text"].strip()
    try:
        return _hendrycks(answer)
    except _Malformed:
        return answer


def _hendrycks(text: str) -> str:
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")):
        text = text.replace(old, new)
    for gone in ("\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(gone, "")
    text = _without_unit(text)
    for old, new in (("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(old, new)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        text = "\\frac{1}{2}"
    return _slash_to_fraction(text)


def _without_unit(text: str) -> str:
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise _Malformed
    return parts[0]


def _braced_roots(text: str) -> str:
    head, *tails = text.split("\\sqrt")
    if "" in tails:
        raise _Malformed
    return head + "".join("\\sqrt" + (tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}") for tail in tails)


def _braced_fractions(text: str) -> str:
    r"""``\\frac12`` and ``\\frac1{72}`` with all braces; a lone digit after ``\\frac`` leaves the whole text alone."""
    head, *tails = text.split("\\frac")
    built = head
    for tail in tails:
        if not tail:
            raise _Malformed
        if tail[0] == "{":
            built += "\\frac" + tail
        elif len(tail) < 2:
            return text
        elif tail[1] == "{":
            built += f"\\frac{{{tail[0]}}}{tail[1:]}"
        else:
            built += f"\\frac{{{tail[0]}}}{{{tail[1]}}}{tail[2:]}"
    return built


def _slash_to_fraction(text: str) -> str:
    parts = text.split("/")
    with suppress(ValueError):  # not two integers
        if len(parts) == 2 and text == f"{int(parts[0])}/{int(parts[1])}":
            return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    return text


def grader_normalize(text: str) -> str:
    """Plain lower-case text that sympy can read: prm800k's normal form.

    No units, dollar or percent signs; "or" and "and" are commas; million, billion, trillion are powers of ten; LaTeX is
    converted by pylatexenc; mixed numbers become sums; integers lose commas and ".0".
    """
    enclosed = _TEXT.search(text)
    if enclosed:
        text = enclosed["text"]
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        text = text.replace(old, new)
    for name, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(name, f"*10^{power}")
    for pattern in _UNIT_PATTERNS:
        text = pattern.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _as_integer(text, text)
    if "\\" in text:
        text = _latex_to_text(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)
    for gone in " {}":
        text = text.replace(gone, "")
    text = text.lower()
    return _as_integer(text, strip_thousands(text), truncate=True)


def strip_thousands(text: str) -> str:
    """Remove commas that group thousands ("12,345"), not those of tuples ("1,2")."""
    while True:
        shorter = _THOUSANDS.sub(r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def _as_integer(text: str, number: str, truncate: bool = False) -> str:
    """`number` as an integer's digits if it is one within 1e-7, else `text`."""
    try:
        value = float(number)
        if abs(value - round(value)) > 1e-7:
            return text
        return str(int(float(text.replace(",", "")))) if truncate else str(round(value))
    except (ValueError, OverflowError):
        return text


def _latex_to_text(text: str) -> str:
    try:
        from pylatexenc.latex2text import LatexNodes2Text
    except ImportError as error:
        raise ImportError("MATH-500 reads LaTeX answers with pylatexenc: pip install 'pylatexenc>=2.10,<3'") from error
    logging.getLogger("pylatexenc.latex2text").setLevel(logging.ERROR)  # replies are often malformed; that is no news
    spaced = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        plain = LatexNodes2Text().latex_to_text(spaced)
    except Exception:  # officially LaTeX that does not parse stays as it is
        return text
    for symbol, name in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):
        plain = plain.replace(symbol, name)
    return plain.strip()
