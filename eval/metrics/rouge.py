"""ROUGE, exactly as two public packages compute it, without depending on them.

- `rouge_l`: the package ``rouge`` 1.0.1 (used by LongBench): ROUGE-L over *sets* of words.
- `rouge_lsum`, `rouge_1`: the package ``rouge-score`` 0.1.2 without stemming (used by InfiniteBench, NIAH).
Both read a longest common subsequence (LCS) back from the same table, but break its ties differently.

The table's cost is the product of both lengths, so both functions read at most `MAX_REPLY` characters of a prediction
and `MAX_REFERENCE` of a reference; longer texts differ from the packages.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from leank.eval.metrics.text import MAX_REFERENCE, MAX_REPLY

# The package reads the subsequence back by recursion. From LongBench's eval.py (Python 3.11, recursion limit 1000) a
# path of 990 steps is the longest that does not overflow; beyond it LongBench scores the whole pair 0.
MAX_PATH = 990

_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")


def lcs_table(x: Sequence[str], y: Sequence[str]) -> np.ndarray:
    """Lengths of longest common subsequences: int32 [len(x) + 1, len(y) + 1], entry [i, j] for x[:i] and y[:j]."""
    ids: dict[str, int] = {}
    y_ids = np.array([ids.setdefault(word, len(ids)) for word in y], dtype=np.int32)
    table = np.zeros((len(x) + 1, len(y) + 1), dtype=np.int32)
    for i, word in enumerate(x, start=1):
        above = table[i - 1]
        matched = above[:-1] + (y_ids == ids.get(word, -1))
        table[i, 1:] = np.maximum.accumulate(np.maximum(above[1:], matched))
    return table


def lcs_increments(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """Rows of `lcs_table` as bits: bit j of row i is 0 where the row rises, table[i, j + 1] == table[i, j] + 1.

    Hyyrö's bit-parallel LCS: a row is one addition of integers of len(y) bits. len(x) + 1 rows.
    """
    ones = (1 << len(y)) - 1
    positions: dict[str, int] = {}
    for j, word in enumerate(y):
        positions[word] = positions.get(word, 0) | 1 << j
    rows = [ones]
    for word in x:
        row = rows[-1]
        if matched := row & positions.get(word, 0):
            row = ((row + matched) | (row - matched)) & ones
        rows.append(row)
    return rows


def rouge_l(prediction: str, reference: str, max_path: int | None = MAX_PATH) -> float:
    """ROUGE-L F of the package ``rouge`` 1.0.1, in [0, 0.999999995].

    Sentences end at every ".", words at white space; case and punctuation count. All counts are of distinct words:
    |union of the LCS of every sentence pair| over the distinct words of each side. F carries 1e-8 in its denominator,
    so an exact match is 0.999999995. Text without a sentence scores 0.
    max_path: steps after which the package's recursion overflows and the score is 0; None never overflows.
    """
    predicted = _distinct(_dot_sentences(prediction[:MAX_REPLY]))
    referred = _distinct(_dot_sentences(reference[:MAX_REFERENCE]))
    if not predicted or not referred:
        return 0.0
    union: set[str] = set()
    for x in referred:
        for y in predicted:
            words = _read_back(x, y, max_path)
            if words is None:
                return 0.0
            union |= words
    recall = len(union) / len({word for sentence in referred for word in sentence})
    precision = len(union) / len({word for sentence in predicted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_lsum(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F of ``rouge-score``, 0-1: sentences are lines, tokens are runs of [a-z0-9].

    Each reference line takes the union of its LCS with all predicted lines; a token is counted no more often than it
    occurs on either side.
    """
    predicted = [_tokens(line) for line in prediction[:MAX_REPLY].split("\n") if line]
    referred = [_tokens(line) for line in reference[:MAX_REFERENCE].split("\n") if line]
    left_predicted = Counter(token for line in predicted for token in line)
    left_referred = Counter(token for line in referred for token in line)
    n_predicted, n_referred = left_predicted.total(), left_referred.total()
    if not n_predicted or not n_referred:
        return 0.0
    hits = 0
    others = _distinct(predicted)
    for line in referred:
        matched: set[int] = set()
        for other in others:
            matched |= _matched_positions(line, other)
        for token in (line[i] for i in sorted(matched)):
            if left_predicted[token] > 0 and left_referred[token] > 0:
                hits += 1
                left_predicted[token] -= 1
                left_referred[token] -= 1
    return _f(hits / n_predicted, hits / n_referred)


def rouge_1(prediction: str, reference: str) -> float:
    """Unigram F of ``rouge-score``, 0-1."""
    predicted, referred = Counter(_tokens(prediction)), Counter(_tokens(reference))
    hits = (predicted & referred).total()
    return _f(hits / max(predicted.total(), 1), hits / max(referred.total(), 1))


def _f(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _dot_sentences(text: str) -> list[list[str]]:
    # A blank sentence is the one empty word [""], and two of those match: the package does the same.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _tokens(text: str) -> list[str]:
    return _NOT_ALPHANUMERIC.sub(" ", text.lower()).split()


def _distinct(sentences: list[list[str]]) -> list[list[str]]:
    """Each sentence once, in order; repeats change no union of LCSs."""
    return [list(words) for words in dict.fromkeys(map(tuple, sentences))]


def _read_back(x: list[str], y: list[str], max_path: int | None) -> set[str] | None:
    """The words of one LCS of x and y (ties go left); None if reading it back takes more than `max_path` steps."""
    if set(x).isdisjoint(y):
        steps = len(y) if x else 0  # left all the way
        return None if max_path is not None and steps > max_path else set()
    rows = lcs_increments(x, y)
    i, j, steps = len(x), len(y), 0
    words: set[str] = set()
    while i and j:
        steps += 1
        if max_path is not None and steps > max_path:
            return None
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif rows[i] >> (j - 1) & 1:  # table[i, j - 1] is table[i, j]
            j -= 1
        else:
            i -= 1
    return words


def _matched_positions(x: list[str], y: list[str]) -> set[int]:
    """Positions in x of one LCS of x and y (ties go up)."""
    if set(x).isdisjoint(y):
        return set()
    rows = lcs_increments(y, x)
    i, j = len(x), len(y)
    positions: set[int] = set()
    while i and j:
        if x[i - 1] == y[j - 1]:
            positions.add(i - 1)
            i, j = i - 1, j - 1
        elif rows[j] >> (i - 1) & 1:  # table[i - 1, j] is table[i, j]
            i -= 1
        else:
            j -= 1
    return positions
