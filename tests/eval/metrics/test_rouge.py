"""Our ROUGE against brute force and against the packages it reproduces."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from rouge import Rouge
from rouge_score import rouge_scorer

from leank.eval.metrics import rouge

texts = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "cat", "The", "x-y", "é", "7"]),
        st.sampled_from([" ", ". ", ".", "\n", "..", ", ", "  "]),
    ),
    max_size=20,
).map(lambda pairs: "".join(itertools.chain.from_iterable(pairs)))


def slow_lcs(x: str, y: str) -> int:
    if not x or not y:
        return 0
    if x[-1] == y[-1]:
        return 1 + slow_lcs(x[:-1], y[:-1])
    return max(slow_lcs(x[:-1], y), slow_lcs(x, y[:-1]))


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_table_equals_the_recursive_definition(x, y):
    table = rouge.lcs_table(x, y)
    assert table.shape == (len(x) + 1, len(y) + 1)
    assert all(table[i, j] == slow_lcs(x[:i], y[:j]) for i in range(len(x) + 1) for j in range(len(y) + 1))


@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9))
def test_the_bits_are_the_increments_of_the_table(x, y):
    table = rouge.lcs_table(x, y)
    for row, bits in zip(table, rouge.lcs_increments(x, y), strict=True):
        assert [int(right - left) for left, right in itertools.pairwise(row)] == [
            1 - (bits >> j & 1) for j in range(len(y))
        ]


def slow_read_back(x, y, ties):
    """Positions (i, j) of the matches of one LCS, read back from the table, and the steps it takes."""
    table = rouge.lcs_table(x, y)
    i, j, steps, matches = len(x), len(y), 0, set()
    while i and j:
        steps += 1
        up, left = table[i - 1, j], table[i, j - 1]
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            matches.add((i, j))
        elif up > left or (up == left and ties == "up"):
            i -= 1
        else:
            j -= 1
    return matches, steps


@given(st.lists(st.sampled_from("abcd"), max_size=9), st.lists(st.sampled_from("abce"), max_size=9))
def test_reading_back_equals_the_slow_way(x, y):
    matches, steps = slow_read_back(x, y, "left")
    words = {x[i] for i, _ in matches}
    assert rouge._read_back(x, y, None) == rouge._read_back(x, y, steps) == words
    assert rouge._read_back(x, y, steps - 1) is None
    assert rouge._matched_positions(x, y) == {i for i, _ in slow_read_back(x, y, "up")[0]}


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_rouge_l_equals_the_rouge_package(prediction, reference):
    try:
        want = Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # nothing to score, which LongBench turns into 0
        want = 0.0
    assert rouge.rouge_l(prediction, reference) == want


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_rouge_lsum_equals_the_rouge_score_package(prediction, reference):
    scorer = rouge_scorer.RougeScorer(["rougeLsum", "rouge1"])
    want = scorer.score(reference, prediction)
    assert rouge.rouge_lsum(prediction, reference) == want["rougeLsum"].fmeasure
    assert rouge.rouge_1(prediction, reference) == want["rouge1"].fmeasure


def test_exact_match_is_not_quite_one():
    assert rouge.rouge_l("the cat sat", "the cat sat") == 0.999999995
    assert rouge.rouge_lsum("the cat sat", "the cat sat") == 1.0


def test_long_sentences_overflow_the_official_recursion():
    fits, overflows = (" ".join(f"w{i}" for i in range(n)) for n in (rouge.MAX_PATH, rouge.MAX_PATH + 1))
    assert rouge.rouge_l(fits, fits) == 0.999999995
    assert rouge.rouge_l(overflows, overflows) == 0.0
    assert rouge.rouge_l(overflows, overflows, max_path=None) == 0.999999995
    # two sentences of 600 unlike words need 600 + 600 steps once their only common word stands first
    x, y = ("same " + " ".join(f"{side}{i}" for i in range(600)) for side in "xy")
    assert rouge.rouge_l(x, y) == 0.0 < rouge.rouge_l(x, y, max_path=None)


def test_blank_sentences_match_each_other():
    assert rouge.rouge_l("   ", " ") == 0.999999995
    assert rouge.rouge_l("...", "word") == 0.0
