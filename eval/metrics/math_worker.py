"""The process that compares MATH-500 answers (eval.metrics.math_equal), seen from outside."""

import atexit
import functools
import json
import os
import subprocess
import sys
import threading

from leank.eval.metrics import math_equal

WALL_SECONDS = 60.0  # for a process that hangs; one that computes is ended by its CPU limit long before
START_SECONDS = 300.0


def equal(given: str, truth: str) -> bool:
    """`math_equal.equal` in the worker of this process, which is started at the first call and kept.

    False where the comparison needs more than the worker's limits of CPU time and memory. Raises ImportError if
    math_verify is missing, RuntimeError if the worker does not start.
    """
    return _worker(os.getpid()).equal(given, truth)


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
                answer = self._ask(json.dumps([given, truth]), WALL_SECONDS)
                if answer is not None:
                    return answer is True
            return False

    def stop(self) -> None:
        """End the worker process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    _close(pipe)
            self._process = None

    def _ask(self, line: str, seconds: float) -> bool | None:
        """The worker's answer, False if a limit ended it, None if it died of something else."""
        if self._process is None:
            self._start()
        answer, in_time = self._line(line, seconds)
        if answer is not None and in_time:
            return answer is True
        assert self._process is not None
        over_limit = not in_time or self._over_cpu_limit()
        self.stop()
        return False if over_limit else None

    def _start(self) -> None:
        # the same modules as here; equal hashes, so that sympy takes the same way every time
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", math_equal.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, **paths},
            start_new_session=True,  # signals to the terminal's or the job's processes are not for it
        )
        answer, _ = self._line(None, START_SECONDS)
        if answer is True:
            return
        self.stop()
        if isinstance(answer, str):
            raise ImportError(f"MATH-500 is graded with math_verify: pip install math-verify ({answer})")
        raise RuntimeError(
            f"the process that grades MATH-500 did not start; try: {sys.executable} -m {math_equal.__name__}"
        )

    def _line(self, line: str | None, seconds: float) -> tuple[object, bool]:
        """Send a line (None sends nothing) and read one: what it says, None if the worker is dead; whether in time."""
        process = self._process
        assert process is not None
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

    def _over_cpu_limit(self) -> bool:
        assert self._process is not None
        if sys.platform == "win32":
            return False
        import signal

        return self._process.wait() == -signal.SIGXCPU


def _close(pipe: object) -> None:
    try:
        pipe.close()  # type: ignore[attr-defined]
    except BrokenPipeError:  # a line that the dead worker never read
        return


@functools.cache
def _worker(pid: int) -> Worker:
    """The worker of a process; a fork gets its own."""
    return Worker()
