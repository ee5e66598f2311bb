"""Whether two MATH-500 answers are equal for math_verify. Runs in a process of its own.

Both texts are hostile. math_verify also has an extractor of plain expressions, which ends in Python's eval(); only its
LaTeX parser is used here, which is a grammar and evaluates no code. It still hangs on costly arithmetic, and its own
time limits are signals, which do not end a long step in C. So what a comparison costs is held by the limits of the
process (`main`), which eval.metrics.math_worker starts and replaces.
"""

import json
import os
import sys
from collections.abc import Sequence

MAX_EXPRESSION = 1000  # characters that are parsed of either side; MATH-500's longest answer has 53
CPU_SECONDS = 2  # for one comparison
MEMORY = 256 * 2**20  # bytes that a comparison may add to the process


def equal(given: str, truth: str) -> bool:
    """Whether math_verify finds the given answer equal to the truth.

    Raises MemoryError where it needs more memory than the process may have.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    if max(len(given), len(truth)) > MAX_EXPRESSION:
        return False
    rules = [LatexExtractionConfig(boxed_match_priority=0)]
    try:
        want, got = (
            parse(f"\\boxed{{{text}}}", rules, fallback_mode="no_fallback", parsing_timeout=None)
            for text in (truth, given)
        )
        return bool(want and got and verify(want, got, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:  # what cannot be parsed is unequal
        return False


def main() -> None:
    """Answer lines of JSON [given, truth] with true or false, under limits of memory and of CPU time per line.

    The first line out is true if all is there, else what is missing. A line that takes too long ends the process with
    SIGXCPU, one that needs too much memory is false and the last.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply

    def reply(value: bool | str) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        import math_verify  # noqa: F401
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
