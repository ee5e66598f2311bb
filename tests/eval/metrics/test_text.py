"""ROUGE where the packages' habits matter."""

import sys

import pytest

from leank.eval.metrics import text


def test_exact_match_is_not_quite_one():
    assert text.rouge_l("the cat sat", "the cat sat") == 0.999999995
    assert text.rouge_lsum("the cat sat", "the cat sat") == 1.0


def test_blank_and_empty_texts():
    assert text.rouge_l("   ", " ") == 0.999999995
    assert text.rouge_l("...", "word") == text.rouge_l("", "word") == text.rouge_lsum("", "word") == 0.0


def deeper(frames, call):
    return deeper(frames - 1, call) if frames else call()


@pytest.mark.parametrize("depth", [0, 200])
def test_long_sentences_overflow_the_official_recursion_wherever_they_are_scored(depth):
    before = sys.getrecursionlimit()
    fits, overflows = (" ".join(f"w{i}" for i in range(n)) for n in (990, 991))
    assert deeper(depth, lambda: text.rouge_l(fits, fits)) == 0.999999995
    assert deeper(depth, lambda: text.rouge_l(overflows, overflows)) == 0.0
    # two sentences of 600 unlike words need 600 + 600 steps once their only common word stands first
    x, y = ("same " + " ".join(f"{side}{i}" for i in range(600)) for side in "xy")
    assert deeper(depth, lambda: text.rouge_l(x, y)) == 0.0
    assert sys.getrecursionlimit() == before
