"""What a comparison says: the paired mean, its interval, and the paper's claim against it."""

import pandas as pd
import pytest
from pydantic import TypeAdapter

from leank.eval.papers import judge
from leank.eval.papers.item import Expect, Item
from leank.eval.report.groups import frame
from tests.helpers.report_rows import row


def rows(method, scores, task="vt", bytes_=100.0, first=None, **more):
    seconds = [{"first_token": first and first + i / 100, "per_token": None} for i in range(len(scores))]
    return [row(method, i, score, task, cache_bytes={"total": bytes_}, seconds=seconds[i], **more)
            for i, score in enumerate(scores)]  # fmt: skip


def contrast(check, made, alone=True):
    (claim,) = Item(id="think:fig1", shows="x", checks=[check]).checks
    return judge.contrast(claim, [frame(made)] if made else [], alone)


def expect(found, of="kind == 'a'", **more):
    claim = TypeAdapter(Expect).validate_python({"mean": "x", "of": of, **({} if "below" in more else {"above": 0.0}),
                                                 **more})  # fmt: skip
    return judge.expect(claim, pd.DataFrame(found))


BETTER = [*rows("a", [1.0] * 20), *rows("b", [0.0] * 10 + [1.0] * 10)]


def test_a_claim_that_shows_and_its_opposite():
    found = contrast("a - b > 0", BETTER)
    assert found.verdict == "shows"
    assert found.sentence.startswith("a minus b, above 0: +50.0 points [+")
    assert found.sentence.endswith(", 100.0 against 50.0, n = 20. The claim shows here.")
    against = contrast("b - a > 0", BETTER)
    assert (against.verdict, against.sentence.endswith("This contradicts the paper.")) == ("contradicts", True)


def test_a_margin_decides_where_methods_are_equal():
    equal = [*rows("a", [1.0] * 150), *rows("b", [1.0] * 150)]
    nothing = contrast("a - b > 0", equal)
    assert nothing.figures == "+0.0 points [+0.0, +0.0], 100.0 against 100.0, n = 150"
    assert nothing.sentence.endswith("Not decided: the interval holds 0. Both score alike on 100% of the samples.")
    assert contrast("a - b > -2", equal).verdict == "shows"
    few = contrast("a - b > -1", equal)  # a loss in one sample of 150 may not be among them
    assert few.why == "it takes 300 samples"
    worse = [*rows("a", [0.0] * 12), *rows("b", [1.0] * 12)]
    assert contrast("a - b > -1", worse).verdict == "contradicts"


def test_few_samples_decide_nothing():
    assert contrast("a - b > 0", [*rows("a", [1.0] * 9), *rows("b", [0.0] * 9)]).verdict == "undecided"


def test_tasks_count_alike_and_only_common_samples_count():
    two = [*rows("a", [1.0] * 30), *rows("b", [1.0] * 30), *rows("a", [1.0] * 10, "u"), *rows("b", [0.0] * 8, "u")]
    assert contrast("a - b > 0", two).figures == "+50.0 points [+50.0, +50.0], 100.0 against 50.0, n = 38"


def test_models_are_compared_each_with_itself():
    """Rows of two models have the same tasks and samples."""
    good, bad = (frame([*rows("a", [high] * 20), *rows("b", [low] * 20)]) for high, low in ((1.0, 0.5), (0.4, 0.1)))
    (claim,) = Item(id="think:fig1", shows="x", checks=["a - b > 0"]).checks
    assert judge.contrast(claim, [good, bad]).figures == "+40.0 points [+40.0, +40.0], 70.0 against 30.0, n = 40"


@pytest.mark.parametrize(("measure", "verdict"), [("bytes", "shows"), ("first_token", "contradicts")])
def test_ratios_of_bytes_and_of_seconds_are_judged(measure, verdict):
    cheap = [*rows("a", [1.0] * 12, bytes_=50.0, first=3.0), *rows("b", [1.0] * 12, first=2.0)]
    found = contrast(f"{measure} of a / b < 1", cheap)
    assert found.verdict == verdict
    assert found.sentence.startswith(f"a / b, below 1: {'0.5' if measure == 'bytes' else '1.49'} times")
    shared = contrast(f"{measure} of a / b < 2", cheap, alone=False)
    assert shared.verdict == ("shows" if measure == "bytes" else "undecided")  # processes that shared the machine
    assert ("several processes shared" in shared.why) == (measure != "bytes")


def test_the_seconds_of_a_batch_are_one_measurement():
    batch = [{**one, "seconds": {"first_token": 3.0 if one["method"] == "a" else 2.0}}
             for one in (*rows("a", [1.0] * 50), *rows("b", [1.0] * 50))]  # fmt: skip
    found = contrast("first_token of a / b < 1", batch)
    assert found.figures.endswith("n = 1")
    assert found.verdict == "undecided"


def test_nothing_to_compare():
    assert contrast("a - b > 0", []) is None
    assert contrast("a - c > 0", BETTER) is None
    assert contrast("per_token of a / b < 1", BETTER) is None
    assert expect([{"kind": "b", "value": 1.0}]) is None
    assert expect([{"value": 1.0}]) is None  # the analysis with that column has failed


def test_what_is_no_check_is_refused():
    with pytest.raises(ValueError, match=r"'a > b' is no check; write one as A - B > 0"):
        Item(id="think:fig1", shows="x", checks=["a > b"])


def test_means_of_an_analysis():
    found = [{"kind": kind, "value": value} for kind in "ab" for value in ((1.0, 1.2) if kind == "a" else (0.1, 0.2))]
    found = [*found, {"kind": "a", "value": None}] * 10
    high = expect(found, above=0.9, units="heads")
    assert high.verdict == "shows"
    assert high.figures.startswith("1.1 [1.0")
    assert high.figures.endswith("n = 20 heads")
    apart = expect(found, minus="kind == 'b'")
    assert apart.sentence.startswith("x, difference, above 0: 0.95 [")
    assert apart.verdict == "shows"
    assert expect(found, below=1.5).verdict == "shows"
    assert expect(found, below=0.5).verdict == "contradicts"


def test_rows_of_the_same_prompt_are_compared_in_pairs():
    found = [
        {"kind": kind, "layer": n, "value": n + more} for kind, more in (("a", 0.5), ("b", 0.0)) for n in range(10)
    ]
    found.append({"kind": "a", "layer": 10, "value": 100.0})  # without a partner
    assert expect(found[:-1], minus="kind == 'b'").verdict == "undecided"  # layers differ more than the kinds
    paired = expect(found, minus="kind == 'b'", by=["layer"])
    assert (paired.verdict, paired.figures) == ("shows", "0.5 [0.5, 0.5], n = 10")
    assert expect(found[:10], minus="kind == 'b'", by=["layer"]) is None


def test_rows_of_a_sample_are_one_unit():
    """Twenty layers of one sample are no twenty samples: their mean counts once, and ten samples decide."""
    found = [{"sample": sample, "layer": layer, "kind": kind, "value": sample + layer + more}
             for sample in range(10) for layer in range(20) for kind, more in (("a", 0.5), ("b", 0.0))]  # fmt: skip
    claim = {"minus": "kind == 'b'", "by": ["sample", "layer"], "over": ["sample"]}
    assert expect(found, **claim).figures == "0.5 [0.5, 0.5], n = 10"
    assert expect(found, **claim).verdict == "shows"
    assert expect([one for one in found if one["sample"] < 9], **claim).why == "it takes 10 samples"
    means = expect(found, over=["sample"])
    assert means.figures.startswith("14.5 [")  # 4.5 of the samples, 9.5 of the layers, 0.5
    apart = expect(found, minus="kind == 'b'", over=["sample"])
    assert (apart.verdict, apart.figures.endswith("n = 20")) == ("undecided", True)


FAIL = "both nearly always fail, below 10 of 100 points"


@pytest.mark.parametrize(
    ("check", "first", "second", "verdict", "why"),
    [
        ("a - b > -2", 10, 10, "undecided", FAIL),
        ("a - b > 0", 12, 0, "undecided", FAIL),
        ("a - b > -2", 0, 18, "contradicts", ""),  # nine points were there to lose
        ("a - b > -8", 16, 22, "shows", ""),  # the first is below the floor because it has lost, the second is not
        ("|a - b| < 2", 200, 200, "shows", ""),
        ("|a - b| < 2", 198, 200, "undecided", "the interval holds -2"),
        ("|a - b| < 2", 200, 198, "undecided", "the interval holds 2"),
        ("|a - b| < 2", 180, 200, "contradicts", ""),
        ("|a - b| < 2", 200, 180, "contradicts", ""),
    ],
)
def test_what_there_is_to_lose_and_both_sides_of_equality(check, first, second, verdict, why):
    """Right answers of 200 samples."""
    made = [one for name, right in (("a", first), ("b", second))
            for one in rows(name, [1.0] * right + [0.0] * (200 - right))]  # fmt: skip
    found = contrast(check, made)
    assert (found.verdict, found.why) == (verdict, why)
    assert found.compared == ("a minus b, within 2" if "|" in check else f"a minus b, above {check[8:]}")


def test_few_layers_decide_nothing_and_a_count_needs_no_interval():
    found = [{"kind": "a", "layer": layer, "value": 1.0} for layer in range(7)]
    of_layers = expect(found, above=0.5, units="layers")
    assert (of_layers.verdict, of_layers.why) == ("undecided", "it takes 10 layers")
    assert of_layers.figures.endswith("n = 7 layers")
    counted = expect(found[:1], above=0.5, counted=True)
    assert (counted.verdict, counted.figures) == ("shows", "1, counted")
    chosen = expect(found * 2, above=0.5, chosen=True)
    assert chosen.sentence.endswith("The claim shows here. The bound is a choice made here, the paper gives none.")


def test_samples_in_which_a_pass_selected_no_layer_are_told():
    some = [{**one, "selected_layer": -1 if int(one["sample"]) < 5 else 5} for one in rows("a", [1.0] * 20)]
    found = contrast("a - b > 0", [*some, *rows("b", [0.0] * 20)])
    assert found.sentence.endswith("The claim shows here. In 25% of its samples a selected no layer.")
