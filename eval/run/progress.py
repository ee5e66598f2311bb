"""How far an evaluation is and how long it will take: whole lines, so that a log file reads as well as a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from leank.data_gen.amount import amount

EVERY = 10.0  # seconds between two lines, unless a task and length is finished
log = logging.getLogger("eval")


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Logs the batches of a run as they are done.

    costs: expected cost of each batch in any one unit; the time left is estimated from the cost that is left.
    clock: seconds, time.perf_counter by default.
    """

    def __init__(self, costs: Sequence[float], clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs, self.clock, self.done = costs, clock, 0
        self.began = clock()
        self.said = self.began

    def advance(self, where: str, methods: Sequence[str], rows: int, finished: bool) -> None:
        """Count one batch as done.

        where: its task and length.
        methods: labels of the methods that it was replayed for.
        rows: new rows of the run so far.
        finished: whether the next batch is of another task or length, or there is none; such a line always appears.
        """
        self.done += 1
        now = self.clock()
        if not finished and now - self.said < EVERY:
            return
        self.said, gone = now, now - self.began
        left = gone / sum(self.costs[: self.done]) * sum(self.costs[self.done :])
        so_far = f"{duration(gone)} gone, about {duration(left)} left" if left else f"took {duration(gone)}"
        log.info(
            "replayed batch %d of %d (%s: %s), %s; %s",
            self.done, len(self.costs), where, ", ".join(methods), amount(rows, "new row"), so_far,
        )  # fmt: skip
