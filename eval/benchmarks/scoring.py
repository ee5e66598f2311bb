"""From a row and a reply to a score: the one place that knows which metric name means which scorer."""

from collections.abc import Sequence

from leank.eval.benchmarks import niah
from leank.eval.benchmarks.row import Row
from leank.eval.metrics import gsm_infinite, infinitebench, longbench, math500, mmlu, ruler


def cut_at_stop(reply: str, stop: Sequence[str]) -> str:
    """The reply up to the first stop string."""
    ends = [at for at in (reply.find(text) for text in stop if text) if at != -1]
    return reply[: min(ends)] if ends else reply


def score_row(row: Row, reply: str) -> float:
    """Score one reply by the row's metric, 0-1. Raises ValueError for a metric that no scorer has."""
    reply = cut_at_stop(reply, row.stop)
    match row.metric:
        case "ruler_all" | "ruler_part":
            match_rule = ruler.string_match_all if row.metric == "ruler_all" else ruler.string_match_part
            return match_rule([ruler.postprocess(reply)], [row.answers]) / 100
        case "longbench":
            return longbench.score(row.task, reply, row.answers, row.all_classes)
        case "infinitebench":
            return infinitebench.score(row.task, reply, row.answers)
        case "gsm_infinite":
            return float(gsm_infinite.grade(reply, row.answers[0]))
        case "gsm_symbolic":
            return float(gsm_infinite.grade_symbolic(reply, row.answers))
        case "math500":
            return float(math500.grade(math500.last_boxed(reply), row.answers[0]))
        case "mmlu":
            return float(mmlu.extract_letter(reply) == row.answers[0])
        case "niah_recall":
            return niah.recall(reply, row.answers[0])
    raise ValueError(f"metric={row.metric!r} of task {row.task!r} has no scorer; add it to eval/benchmarks/scoring.py")
