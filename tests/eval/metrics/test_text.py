"""ROUGE against brute force and against the packages it reproduces."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge import Rouge
from rouge_score import rouge_scorer

from leank.eval.metrics import text

texts = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "cat", "The", "x-y", "é", "7"]),
        st.sampled_from([" ", ". ", ".", "\n", "..", ", ", "  "]),
    ),
    max_size=20,
).map(lambda pairs: "".join(itertools.chain.from_iterable(pairs)))


def table(x, y):
    """Lengths of longest common subsequences of x[:i] and y[:j], by the recursive definition."""
    found = np.zeros((len(x) + 1, len(y) + 1), int)
    for i, j in itertools.product(range(len(x)), range(len(y))):
        found[i + 1, j + 1] = found[i, j] + 1 if x[i] == y[j] else max(found[i, j + 1], found[i + 1, j])
    return found


words = st.lists(st.sampled_from("abcd"), max_size=9)


@given(words, words)
def test_the_bits_are_the_increments_of_the_table(x, y):
    for row, bits in zip(table(x, y), text.lcs_rows(x, y), strict=True):
        assert [int(right - left) for left, right in itertools.pairwise(row)] == [
            1 - (bits >> j & 1) for j in range(len(y))
        ]


@given(words, words)
def test_reading_back_equals_the_slow_way(x, y):
    lengths, steps, found = table(x, y), 0, set()
    i, j = len(x), len(y)
    while i and j:
        steps += 1
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.add(j)
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    assert text.lcs(x, y) == (found, steps)


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_rouge_l_equals_the_rouge_package(prediction, reference):
    try:
        want = Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # nothing to score, which LongBench turns into 0
        want = 0.0
    assert text.rouge_l(prediction, reference) == want


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_rouge_lsum_equals_the_rouge_score_package(prediction, reference):
    want = rouge_scorer.RougeScorer(["rougeLsum"]).score(reference, prediction)
    assert text.rouge_lsum(prediction, reference) == want["rougeLsum"].fmeasure


def test_exact_match_is_not_quite_one():
    assert text.rouge_l("the cat sat", "the cat sat") == 0.999999995
    assert text.rouge_lsum("the cat sat", "the cat sat") == 1.0


def test_long_sentences_overflow_the_official_recursion(monkeypatch):
    fits, overflows = (" ".join(f"w{i}" for i in range(n)) for n in (text.MAX_PATH, text.MAX_PATH + 1))
    assert text.rouge_l(fits, fits) == 0.999999995
    assert text.rouge_l(overflows, overflows) == 0.0
    # two sentences of 600 unlike words need 600 + 600 steps once their only common word stands first
    x, y = ("same " + " ".join(f"{side}{i}" for i in range(600)) for side in "xy")
    assert text.rouge_l(x, y) == 0.0
    monkeypatch.setattr(text, "MAX_PATH", 10_000)
    assert text.rouge_l(x, y) > 0


def test_blank_sentences_match_each_other():
    assert text.rouge_l("   ", " ") == 0.999999995
    assert text.rouge_l("...", "word") == 0.0
