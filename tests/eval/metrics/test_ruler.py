import pytest

from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.ruler import postprocess
from tests.helpers import parity

METRICS = {"string_match_all": "ruler_all", "string_match_part": "ruler_part"}


def score(metric, reply, answers):
    return score_row(Row("t", "0", "c", "q", answers, 8, METRICS[metric]), reply)


@pytest.mark.parametrize("row", parity.rows("ruler_metrics"), ids=parity.label)
def test_scores_are_those_of_the_official_code(row):
    """Officially 0-100 with two decimals, over one reply or several."""
    if row["type"] == "batch":
        pairs = list(zip(row["predictions_postprocessed"], row["references"], strict=True))
        scores = [score(row["metric"], *pair) for pair in pairs]
        assert round(100 * sum(scores) / len(scores), 2) == pytest.approx(row["score"], abs=0.011)
    else:
        assert postprocess(row["prediction_raw"]) == row["prediction_postprocessed"]
        assert 100 * score(row["metric"], row["prediction_raw"], row["references"]) == pytest.approx(row["score"])


def test_postprocess_turns_tabs_and_breaks_into_newlines():
    assert postprocess("\t a\tb\r\nc\x7f\x1f ") == "a\nb\n\nc\x7f"


@pytest.mark.parametrize(
    ("metric", "reply", "answers", "want"),
    [
        ("string_match_part", "I don't know", ["no"], 1),  # matches inside words
        ("string_match_part", "yes", ["no", "maybe"], 0),
        ("string_match_part", "maybe", ["no", "maybe"], 1),
        ("string_match_all", "maybe", ["no", "maybe"], 0.5),
        ("string_match_all", "a b", ["a", "b", "c"], 0.6667),  # per cent with two decimals
    ],
)
def test_scores_by_rule(metric, reply, answers, want):
    assert score(metric, reply, answers) == pytest.approx(want, abs=1e-9)
