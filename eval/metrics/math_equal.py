"""Whether two MATH-500 answers are equal in prm800k's normal form or for sympy. Runs in a process of its own.

Both texts are hostile: sympy's parser ends in Python's eval(). So an expression is parsed only if its characters, its
tokens and its names are on three short lists; it then holds numbers, variables, + - * / ** ! and calls of the functions
in NAMES. It has no string, attribute, subscript, keyword or other name. What it costs to evaluate is held by the limits
of the process (`main`), which eval.metrics.math_worker starts and replaces.
"""

import builtins
import json
import keyword
import os
import re
import sys
import token
from collections.abc import Sequence

from leank.eval.metrics.math_normalize import grader_normalize, strip_thousands

MAX_EXPRESSION = 1000  # characters that sympy reads of either side; MATH-500's longest answer has 53
CPU_SECONDS = 2  # for one comparison; comparing MATH-500's answers with each other takes at most 0.3
MEMORY = 192 * 2**20  # bytes that a comparison may add to the process

NAMES = (
    *("Integer", "Float", "Symbol", "Function", "factorial", "factorial2", "I"),  # sympy's parser writes these itself
    *("sqrt", "frac", "ln", "csc", "re", "im", "li", "ff", "rf", "jn", "yn", "hn1", "hn2", "pi", "oo", "zoo", "nan"),
)

# The "^" forms are refused officially; the same with "**", long and nested factorials would only run into the limits.
_REFUSED = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]|\*\*\(|\*\*[0-9]+\*\*|\*\*[0-9][0-9]|[0-9]{4,}!|!\)+!")
_CHARACTERS = re.compile(r"[a-z0-9α-ωϑϕϖϰϱϵ+\-*/^()!.,\t\n]*")
_OPERATORS = frozenset(("+", "-", "*", "/", "//", "**", "(", ")", ",", "!"))
_BLANKS = (token.NEWLINE, token.NL, token.ENDMARKER)
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"


def equal(given: str, truth: str) -> bool:
    """Whether both have one normal form, or are tuples (brackets must match) whose pieces are equal for sympy.

    An integer needs the same integer, a numeric fraction the same fraction: 4/2 is not 2, 2/4 is not 1/2.
    Raises MemoryError where sympy needs more memory than the process may have.
    """
    want, got = grader_normalize(truth), grader_normalize(given)
    if want == got:
        return True
    if not got:
        return False
    wants, gots = _pieces(want), _pieces(got)
    if len(wants) != len(gots) or (len(wants) > 1 and (want[0] != got[0] or want[-1] != got[-1])):
        return False
    return bool(wants) and all(map(_piece_equal, wants, gots))


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


def _piece_equal(want: str, got: str) -> bool:
    if _FRACTION.search(want) and _FRACTION.search(got):
        return want == got
    if _is_integer(want) != _is_integer(got):
        return False
    return _sympy_equal(want, got)


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
    if not (readable(want) and readable(got)):
        return False
    import sympy
    from sympy.parsing import sympy_parser

    rules = (_arithmetic, *sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    table: dict[str, object] = {"__builtins__": {}, **{name: getattr(sympy, name) for name in NAMES}}
    try:
        parsed = sympy_parser.parse_expr(difference.replace("^", "**"), {}, rules, table)
        return bool(sympy.simplify(parsed) == 0)
    except MemoryError:
        raise
    except Exception:  # officially anything that sympy cannot take is unequal
        return False


def readable(expression: str) -> bool:
    """Whether an expression is short enough and made of the characters that sympy's parser may see.

    Text that pylatexenc could not convert still has its backslashes and is not readable.
    """
    return len(expression) <= MAX_EXPRESSION and _CHARACTERS.fullmatch(expression) is not None


def _arithmetic(tokens: list[tuple[int, str]], local_dict: object, global_dict: object) -> list[tuple[int, str]]:
    """A transformation of sympy's parser that changes nothing: ValueError for a token that is not on the lists.

    A name outside NAMES is a variable, unless Python or sympy know it: officially it would be what they know.
    """
    import sympy

    for kind, text in tokens:
        if kind == token.NAME:
            known = keyword.iskeyword(text) or hasattr(builtins, text) or hasattr(sympy, text)
            allowed = text in NAMES or not known
        else:
            allowed = kind in (token.NUMBER, *_BLANKS) or text in _OPERATORS
        if not allowed:
            raise ValueError(f"{text!r} is no arithmetic")
    return tokens


def main() -> None:
    """Answer lines of JSON [given, truth] with true or false, under limits of memory and of CPU time per line.

    The first line out is true if all is there, else what is missing. A line that takes too long ends the process with
    SIGXCPU, one that needs too much memory is false and the last.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply

    def reply(value: bool | str) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        import pylatexenc.latex2text  # noqa: F401
        from sympy.core.cache import clear_cache
    except ImportError as error:
        reply(str(error))
        return
    _limit_process()
    reply(True)
    for line in sys.stdin:
        _limit_cpu()
        given, truth = json.loads(line)
        try:
            reply(equal(given, truth))
        except MemoryError:
            reply(False)
            return
        clear_cache()  # one comparison leaves nothing behind that another would pay for


def _limit_process() -> None:
    """No process started, no file written, `MEMORY` bytes more than now."""
    if sys.platform == "win32":
        return
    import resource

    limits: Sequence[tuple[int, int]] = [(resource.RLIMIT_NPROC, 0), (resource.RLIMIT_FSIZE, 0)]
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits = [*limits, (resource.RLIMIT_AS, held + MEMORY)]
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _limit_cpu() -> None:
    """`CPU_SECONDS` from now on, rounded up to the second that the system counts in."""
    if sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
