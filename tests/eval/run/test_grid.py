"""`each`: one configuration that stands for several methods."""

import pytest

from leank.eval.methods import method
from leank.eval.run.build import expanded

THINK = {"tokens": {"name": "snapkv"}, "channels": {"name": "think"}, "sink": 0, "window": 32}


def test_every_combination_is_a_method_of_its_own():
    given = {"a": {**THINK, "each": {"tokens": {"budget": [64, 128]}, "channels": {"ratio": [0.4, 0.5]}}}, "dense": {}}
    found = expanded(given)
    assert list(found) == ["a_64_0.4", "a_64_0.5", "a_128_0.4", "a_128_0.5", "dense"]
    made = method("a_128_0.4", found["a_128_0.4"])
    assert (made.tokens.budget, made.channels.ratio, made.window) == (128, 0.4, 32)
    assert "budget" not in THINK["tokens"]


def test_a_setting_of_the_cache_and_a_file():
    found = expanded({"m": {"channels": {"name": "leank"}, "each": {"window": [8], "channels": {"mask": ["x/y.pth"]}}}})
    assert found == {"m_8_y": {"channels": {"name": "leank", "mask": "x/y.pth"}, "window": 8}}


@pytest.mark.parametrize("each", [3, {}, [1], {"tokens": {"budget": 5}}, {"tokens": {"budget": []}}])
def test_what_is_no_list_of_values_is_refused(each):
    with pytest.raises(ValueError, match=r"method\.m\.each.*must be a list of values"):
        expanded({"m": {**THINK, "each": each}})


def test_two_methods_of_one_label_are_refused():
    with pytest.raises(ValueError, match=r"method\.m_8 is there twice"):
        expanded({"m": {**THINK, "each": {"window": [8]}}, "m_8": THINK})
