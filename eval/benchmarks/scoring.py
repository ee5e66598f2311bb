"""From a row and a reply to a score. A benchmark's file registers the scorers that its rows name.

@metric("exact")
def exact(row, reply):
return float(reply == row.answers[0])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leank.eval.benchmarks.row import Row
from leank.registry import import_all

Scorer = Callable[[Row, str], float]
METRICS: dict[str, Scorer] = {}
_BY_OP: set[str] = set()


def metric(name: str, by_op: bool = False) -> Callable[[Scorer], Scorer]:
    """Register a scorer: of a row and a reply up to the first stop string, 0-1; name: for a row's `metric`.

    by_op: whether the report also groups its rows by `meta["op"]`, with the area under that curve.
    """

    def register(scorer: Scorer) -> Scorer:
        METRICS[name] = scorer
        if by_op:
            _BY_OP.add(name)
        return scorer

    return register


def metrics_by_op() -> list[str]:
    """Return the names of the metrics whose rows the report groups by op."""
    import_all("leank.eval.benchmarks")
    return sorted(_BY_OP)


def cut_at_stop(reply: str, stop: Sequence[str]) -> str:
    """The reply up to the first stop string."""
    ends = [at for at in (reply.find(text) for text in stop if text) if at != -1]
    return reply[: min(ends)] if ends else reply


def score_row(row: Row, reply: str) -> float:
    """Score one reply by the row's metric, 0-1. Raises ValueError for a metric that no scorer has."""
    if row.metric not in METRICS:
        import_all("leank.eval.benchmarks")
    if row.metric not in METRICS:
        raise ValueError(f"metric={row.metric!r} of task {row.task!r} has no scorer; register one with @metric")
    return METRICS[row.metric](row, cut_at_stop(reply, row.stop))
