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
import subprocess
import sys
import threading

MAX_EXPRESSION = 1000  # characters that are parsed of either side; MATH-500's longest answer has 53
CPU_SECONDS = 2  # for one comparison
MEMORY = 256 * 2**20  # bytes that a comparison may add to the process
WALL_SECONDS = 60.0  # for a process that hangs; one that computes is ended by its CPU limit long before
START_SECONDS = 300.0


def equal(given: str, truth: str) -> bool:
    """Whether the given answer equals the truth, asked of the worker of this process, started at the first call.

    False where the comparison needs more than the worker's limits of CPU time and memory. Raises ImportError if
    math_verify is missing, RuntimeError if the worker does not start.
    """
    return _worker(os.getpid()).equal(given, truth)


@functools.cache
def _worker(pid: int) -> "Worker":
    """The worker of a process; a fork gets its own."""
    return Worker()


class Worker:
    """One worker process at a time, replaced after its death. Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.stop)

    def equal(self, given: str, truth: str) -> bool:
        """See `equal` of this module."""
        with self._turn:
            for _ in range(2):  # a worker may die of what is not its text's doing (a signal, no memory left): ask again
                process = self._process or self._start()
                answer, in_time = _ask(process, json.dumps([given, truth]), WALL_SECONDS)
                if answer is not None and in_time:
                    return answer is True
                self.stop()
                if not in_time or _over_cpu_limit(process):
                    return False
            return False

    def stop(self) -> None:
        """End the worker process, if there is one."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # a line that the dead worker never read
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        # the same modules as here; equal hashes, so that sympy takes the same way every time
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "leank.eval.metrics.math_equal"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, **paths},
            start_new_session=True,  # signals to the terminal's or the job's processes are not for it
        )
        answer, _ = _ask(self._process, None, START_SECONDS)
        if answer is True:
            return self._process
        self.stop()
        if isinstance(answer, str):
            raise ImportError(f"MATH-500 is graded with math_verify: pip install math-verify ({answer})")
        raise RuntimeError(
            f"the process that grades MATH-500 did not start; try: {sys.executable} -m leank.eval.metrics.math_equal"
        )


def _ask(process: subprocess.Popen[str], line: str | None, seconds: float) -> tuple[object, bool]:
    """Send a line (None sends nothing) and read one: what it says, None if the worker is dead; whether in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    finally:
        timer.cancel()
        timer.join()
    return (json.loads(answer) if answer.endswith("\n") else None), not late.is_set()


def _over_cpu_limit(process: subprocess.Popen[str]) -> bool:
    if sys.platform == "win32":
        return False
    import signal

    return process.wait() == -signal.SIGXCPU


def compare(given: str, truth: str) -> bool:
    """Whether math_verify finds the given answer equal to the truth, in this process.

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
    limit_process()
    reply(True)
    for line in sys.stdin:
        limit_cpu()
        given, truth = json.loads(line)
        try:
            reply(compare(given, truth))
        except MemoryError:
            reply(False)
            return
        clear_cache()  # one comparison leaves nothing behind that another would pay for


def limit_process() -> None:
    """No process started, no file written, `MEMORY` bytes more than now."""
    if sys.platform == "win32":
        return
    import resource

    limits = [(resource.RLIMIT_NPROC, 0), (resource.RLIMIT_FSIZE, 0)]
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits.append((resource.RLIMIT_AS, held + MEMORY))
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def limit_cpu() -> None:
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
