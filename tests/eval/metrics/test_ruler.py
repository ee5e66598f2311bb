import pytest

from leank.eval.metrics import ruler
from tests.helpers import parity


@pytest.mark.parametrize("row", parity.rows("ruler_metrics"), ids=parity.label)
def test_scores_are_those_of_the_official_code(row):
    metric = getattr(ruler, row["metric"])
    if row["type"] == "batch":
        assert metric(row["predictions_postprocessed"], row["references"]) == row["score"]
    else:
        reply = ruler.postprocess(row["prediction_raw"])
        assert reply == row["prediction_postprocessed"]
        assert metric([reply], [row["references"]]) == row["score"]


def test_postprocess_turns_tabs_and_breaks_into_newlines():
    assert ruler.postprocess("\t a\tb\r\nc\x7f\x1f ") == "a\nb\n\nc\x7f"


def test_part_counts_any_reference_and_matches_inside_words():
    assert ruler.string_match_part(["I don't know", "yes"], [["no"], ["no", "maybe"]]) == 50.0
    assert ruler.string_match_part(["maybe", "yes"], [["no", "maybe"], ["no", "maybe"]]) == 50.0
    assert ruler.string_match_all(["maybe", "yes"], [["no", "maybe"], ["no", "maybe"]]) == 25.0


def test_scores_have_two_decimals():
    assert ruler.string_match_all(["a", "a", "-"], [["a"], ["a"], ["a"]]) == 66.67


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([], [], "no predictions"),
        (["a"], [], "1 prediction for 0 lists"),
        (["a"], [[]], "sample 0 has no references"),
        (["a"], ["a"], "references as"),
        ("a", [["a"]], "predictions as"),
    ],
)
def test_bad_input_is_named(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        ruler.string_match_all(predictions, references)
