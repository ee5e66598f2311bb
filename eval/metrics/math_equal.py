"""Whether two MATH answers are equal for math_verify.

Both texts are hostile. math_verify also has an extractor of plain expressions, which ends in Python's eval(); only its
LaTeX parser is used here, which is a grammar and evaluates no code. It still hangs on costly arithmetic, and its own
time limits are signals, which do not end a long step in C. So `equal` asks a process of its own, whose limits hold what
a comparison costs and which is replaced when they end it.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading

from leank.extras import require

MAX_EXPRESSION = 1000  # characters that are parsed of either side; MATH-500's longest answer has 53
CPU_SECONDS = 2  # for one comparison
MEMORY = 256 * 2**20  # bytes that a comparison may add to the process
WALL_SECONDS = 60.0  # for a process that hangs; one that computes is ended by its CPU limit long before
START_SECONDS = 300.0


def equal(given: str, truth: str) -> bool:
    """Whether the given answer equals the truth, asked of this process's worker, started at the first call.

    False beyond the worker's limits of CPU time and memory. Raises RuntimeError if the worker does not start.
    """
    return _worker().equal(given, truth)


@functools.cache
def _worker() -> "Worker":
    return Worker()


class Worker:
    """One worker process at a time, replaced after its death."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.stop)

    def equal(self, given: str, truth: str) -> bool:
        """See `equal` of this module."""
        for _ in range(2):  # a worker may die of what is not its text's doing (a signal, no memory left): ask again
            process = self._process or self._start()
            if answer := _ask(process, json.dumps([given, truth]), WALL_SECONDS):
                return answer == "true"
            self.stop()
            if process.wait() == -getattr(signal, "SIGXCPU", 0):
                break
        return False

    def stop(self) -> None:
        """End the worker process, if there is one."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # a line that the dead worker never read
                process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        require("MATH-500's grader", "eval", "math_verify")
        # the same modules as here; equal hashes, so that sympy takes the same way every time
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, **paths},
            start_new_session=True,  # signals to the terminal's or the job's processes are not for it
        )
        if _ask(self._process, '["x", "x"]', START_SECONDS) != "true":
            self.stop()
            raise RuntimeError(f"the grader of MATH-500 did not start; try: {sys.executable} -m {__spec__.name}")
        return self._process


def _ask(process: subprocess.Popen[str], line: str, seconds: float) -> str:
    """Send a line and return the answer; it is empty if the worker is dead, or hangs and is therefore killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        print(line, file=process.stdin, flush=True)
        return process.stdout.readline().strip()
    except BrokenPipeError:
        return ""
    finally:
        timer.cancel()


def compare(given: str, truth: str) -> bool:
    """Whether math_verify finds both equal, in this process. Raises MemoryError beyond the process's limit."""
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

    A line that takes too long ends the process with SIGXCPU, one that needs too much memory is false and the last.
    """
    import math_verify  # noqa: F401  # before memory is limited
    from sympy.core.cache import clear_cache

    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    limit_process()
    for line in sys.stdin:
        limit_cpu()
        try:
            print(json.dumps(compare(*json.loads(line))), file=replies, flush=True)
        except MemoryError:
            print(json.dumps(False), file=replies, flush=True)
            return
        clear_cache()  # one comparison leaves nothing behind that another would pay for


def limit_process() -> None:
    """No process started, no file written, `MEMORY` bytes more than now."""
    if sys.platform == "win32":
        return
    import resource

    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            _limit(resource.RLIMIT_AS, int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY)


def limit_cpu() -> None:
    """`CPU_SECONDS` from now on, rounded up to the second that the system counts in."""
    if sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS)


def _limit(kind: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
