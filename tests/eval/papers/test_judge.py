"""What a comparison says: the paired mean, its interval, and the paper's claim against it."""

import pytest

from leank.eval.papers.item import Contrast, Expect
from leank.eval.papers.judge import contrast, expect


def rows(method, scores, task="t", bytes_=100.0, first=None):
    return [
        {"method": method, "task": task, "length": 1, "sample": str(i), "seed": 1, "score": score,
         "cache_bytes": {"total": bytes_}, "seconds": {"first_token": first and first + i / 100, "per_token": None}}
        for i, score in enumerate(scores)
    ]  # fmt: skip


BETTER = [*rows("a", [1.0] * 20), *rows("b", [0.0] * 10 + [1.0] * 10)]


def test_a_claim_that_shows_and_its_opposite():
    found = contrast(Contrast("a", "b"), BETTER)
    assert found.verdict == "shows"
    assert found.sentence.startswith("a minus b, above 0: +50.0 points [+")
    assert "n = 20. The claim shows here." in found.sentence
    against = contrast(Contrast("b", "a"), BETTER)
    assert (against.verdict, against.sentence.endswith("This contradicts the paper.")) == ("contradicts", True)


def test_a_margin_decides_where_methods_are_equal():
    equal = [*rows("a", [1.0] * 150), *rows("b", [1.0] * 150)]
    nothing = contrast(Contrast("a", "b"), equal)
    assert nothing.figures == "+0.0 points [+0.0, +0.0], 100.0 against 100.0, n = 150"
    assert nothing.said == "Not decided: the interval holds 0. Both score alike on 100% of the samples."
    assert nothing.remarks == "the interval holds 0; both score alike on 100% of the samples"
    assert contrast(Contrast("a", "b", bound=-2), equal).verdict == "shows"
    few = contrast(Contrast("a", "b", bound=-1), equal)  # a loss in one sample of 150 may not be among them
    assert few.why == "it takes 300 samples"
    worse = [*rows("a", [0.0] * 12), *rows("b", [1.0] * 12)]
    assert contrast(Contrast("a", "b", bound=-1), worse).verdict == "contradicts"


def test_few_samples_decide_nothing():
    assert contrast(Contrast("a", "b"), [*rows("a", [1.0] * 9), *rows("b", [0.0] * 9)]).verdict == "undecided"


def test_tasks_count_alike_and_only_common_samples_count():
    two = [*rows("a", [1.0] * 30, "t"), *rows("b", [1.0] * 30, "t"), *rows("a", [1.0] * 10, "u"),
           *rows("b", [0.0] * 8, "u")]  # fmt: skip
    assert contrast(Contrast("a", "b"), two).sentence.startswith(
        "a minus b, above 0: +50.0 points [+50.0, +50.0], 100.0 against 50.0, n = 38"
    )


@pytest.mark.parametrize(("measure", "verdict"), [("bytes", "shows"), ("first_token", "contradicts")])
def test_ratios_of_bytes_and_of_seconds_are_judged(measure, verdict):
    cheap = [*rows("a", [1.0] * 12, bytes_=50.0, first=3.0), *rows("b", [1.0] * 12, first=2.0)]
    found = contrast(Contrast("a", "b", measure, 1), cheap)
    assert found.verdict == verdict
    assert found.sentence.startswith(f"a / b, below 1: {'0.5' if measure == 'bytes' else '1.49'} times")


def test_the_seconds_of_a_batch_are_one_measurement():
    batch = [{**row, "seconds": {"first_token": 3.0 if row["method"] == "a" else 2.0}}
             for row in (*rows("a", [1.0] * 50), *rows("b", [1.0] * 50))]  # fmt: skip
    found = contrast(Contrast("a", "b", "first_token", 1), batch)
    assert found.figures.endswith("n = 1")
    assert found.verdict == "undecided"


def test_nothing_to_compare():
    assert contrast(Contrast("a", "c"), BETTER).verdict == "not compared"
    assert contrast(Contrast("a", "b", "per_token", 1), BETTER).verdict == "not compared"
    assert expect(Expect("x", lambda row: False), [{"value": 1.0}]).verdict == "not compared"


def test_means_of_an_analysis():
    found = [{"kind": kind, "value": value} for kind in "ab" for value in ((1.0, 1.2) if kind == "a" else (0.1, 0.2))]
    found.append({"kind": "a", "value": None})
    found = found * 10
    high = expect(Expect("kind a", lambda row: row["kind"] == "a", bound=0.9, units="heads"), found)
    assert high.verdict == "shows"
    assert high.figures.startswith("1.1 [1.0")
    assert high.figures.endswith("n = 20 heads")
    apart = Expect("a over b", lambda row: row["kind"] == "a", lambda row: row["kind"] == "b")
    assert expect(apart, found).sentence.startswith("a over b, difference, above 0: 0.95 [")
    assert expect(apart, found).verdict == "shows"


def test_rows_of_the_same_prompt_are_compared_in_pairs():
    found = [
        {"kind": kind, "layer": n, "value": n + more} for kind, more in (("a", 0.5), ("b", 0.0)) for n in range(10)
    ]
    found.append({"kind": "a", "layer": 10, "value": 100.0})  # without a partner
    both = (lambda row: row["kind"] == "a"), (lambda row: row["kind"] == "b")
    assert expect(Expect("a over b", *both), found[:-1]).verdict == "undecided"  # layers differ more than the kinds
    paired = expect(Expect("a over b", *both, by=("layer",)), found)
    assert paired.verdict == "shows"
    assert "0.5 [0.5, 0.5], n = 10" in paired.sentence
    assert expect(Expect("a over b", *both, by=("layer",)), found[:10]).verdict == "not compared"


def test_a_claim_can_lie_below_its_bound():
    found = [{"value": value} for value in (0.1, 0.2)] * 5
    assert expect(Expect("x", lambda row: True, bound=0.5, above=False), found).verdict == "shows"
    assert expect(Expect("x", lambda row: True, bound=0.05, above=False), found).verdict == "contradicts"


def test_rows_of_a_sample_are_one_unit():
    """Twenty layers of one sample are no twenty samples: their mean counts once, and ten samples decide."""
    found = [{"sample": sample, "layer": layer, "kind": kind, "value": sample + layer + more}
             for sample in range(10) for layer in range(20) for kind, more in (("a", 0.5), ("b", 0.0))]  # fmt: skip
    claim = Expect("a over b", lambda row: row["kind"] == "a", lambda row: row["kind"] == "b",
                   by=("sample", "layer"), over=("sample",))  # fmt: skip
    assert expect(claim, found).figures == "0.5 [0.5, 0.5], n = 10"
    assert expect(claim, found).verdict == "shows"
    few = [row for row in found if row["sample"] < 9]
    assert expect(claim, few).said == "Not decided: it takes 10 samples."
    means = expect(Expect("a", lambda row: row["kind"] == "a", over=("sample",)), found)
    assert means.figures.startswith("14.5 [")  # 4.5 of the samples, 9.5 of the layers, 0.5
    apart = Expect("a over b", lambda row: row["kind"] == "a", lambda row: row["kind"] == "b", over=("sample",))
    assert expect(apart, found).figures.endswith("n = 20")
    assert expect(apart, found).verdict == "undecided"


def test_a_method_that_nearly_always_fails_has_nothing_to_lose():
    floor = [*rows("a", [0.0] * 190 + [1.0] * 10), *rows("b", [0.0] * 190 + [1.0] * 10)]
    found = contrast(Contrast("a", "b", bound=-2), floor)
    assert found.said == (
        "Not decided: both nearly always fail, below 10 of 100 points. Both score alike on 100% of the samples."
    )
    won = [*rows("a", [1.0] * 12 + [0.0] * 188), *rows("b", [0.0] * 200)]
    assert contrast(Contrast("a", "b"), won).why == "both nearly always fail, below 10 of 100 points"
    lost = [*rows("a", [0.0] * 200), *rows("b", [1.0] * 18 + [0.0] * 182)]
    assert contrast(Contrast("a", "b", bound=-2), lost).verdict == "contradicts"  # nine points were there to lose


@pytest.mark.parametrize(
    ("right", "verdict"), [(200, "shows"), (198, "undecided"), (180, "contradicts")], ids=["equal", "near", "far"]
)
def test_a_claim_of_equality_has_two_sides(right, verdict):
    some, all_ = [1.0] * right + [0.0] * (200 - right), [1.0] * 200
    for first, second in ((some, all_), (all_, some)):
        found = contrast(Contrast("a", "b", bound=-2, equal=True), [*rows("a", first), *rows("b", second)])
        assert found.verdict == verdict
        assert found.compared == "a minus b, within 2"


def test_seconds_of_processes_that_shared_a_machine_decide_nothing():
    batches = [*rows("a", [1.0] * 20, first=1.0), *rows("b", [1.0] * 20, first=2.0)]
    claim = Contrast("a", "b", "first_token", 1)
    assert contrast(claim, batches).verdict == "shows"
    shared = contrast(claim, batches, alone=False)
    assert (shared.verdict, shared.why.startswith("several processes shared")) == ("undecided", True)
    assert contrast(Contrast("a", "b", "bytes", 2), batches, alone=False).verdict == "shows"


def test_few_layers_decide_nothing_and_a_count_needs_no_interval():
    found = [{"layer": layer, "value": 1.0} for layer in range(7)]
    of_layers = expect(Expect("x", lambda row: True, bound=0.5, units="layers"), found)
    assert (of_layers.verdict, of_layers.why) == ("undecided", "it takes 10 layers")
    assert of_layers.figures.endswith("n = 7 layers")
    counted = expect(Expect("x", lambda row: True, bound=0.5, counted=True), found[:1])
    assert (counted.verdict, counted.figures) == ("shows", "1, counted")
    chosen = expect(Expect("x", lambda row: True, bound=0.5, chosen=True), found * 2)
    assert chosen.said == "The claim shows here. The bound is a choice made here, the paper gives none."


def test_samples_in_which_a_pass_selected_no_layer_are_told():
    some = [{**row, "selected_layer": -1 if int(row["sample"]) < 5 else 5} for row in rows("a", [1.0] * 20)]
    found = contrast(Contrast("a", "b"), [*some, *rows("b", [0.0] * 20)])
    assert found.said == "The claim shows here. In 25% of its samples a selected no layer."


def test_a_loss_is_judged_where_the_other_method_has_something_to_lose():
    """The first method is below the floor because it has lost points, and the second is not."""
    weak = [*rows("a", [1.0] * 16 + [0.0] * 184), *rows("b", [1.0] * 22 + [0.0] * 178)]
    assert contrast(Contrast("a", "b", bound=-8), weak).verdict == "shows"
