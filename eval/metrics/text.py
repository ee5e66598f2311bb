"""Overlap of two texts: F1 over bags of tokens, as in SQuAD, and ROUGE as two public packages compute it.

- `rouge_l`: the package ``rouge`` 1.0.1, which LongBench uses: ROUGE-L over *sets* of words.
- `rouge_lsum`: the package ``rouge-score`` 0.1.2 without stemming, which InfiniteBench uses.

The packages' cost is the product of both lengths, in Python. Here a row of that table is one addition of long integers,
and at most `MAX_REPLY` characters of a reply and `MAX_REFERENCE` of a reference are read; longer texts differ.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

# The longest reply that is scored so, 1,200 tokens of InfiniteBench's summaries, has some 6,000 characters.
MAX_REPLY = 20_000
MAX_REFERENCE = 100_000
# The package reads the subsequence back by recursion. From LongBench's eval.py (Python 3.11, recursion limit 1000) a
# path of 990 steps is the longest that does not overflow; beyond it LongBench scores the whole pair 0.
MAX_PATH = 990

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    + "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces.

    The order matters: punctuation is deleted, not replaced, so ``U.S.A.`` is ``usa`` and ``10-km`` is ``10km``.
    """
    bare = text.lower().translate(_ASCII_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def normalize_chinese(text: str) -> str:
    """Lower case, neither ASCII nor Chinese punctuation, no white space at all."""
    return "".join(text.lower().translate(_CHINESE_PUNCTUATION).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of tokens, 0-1. Two empty bags score 0, as officially."""
    shared = (Counter(prediction) & Counter(reference)).total()
    return _f(shared / len(prediction), shared / len(reference)) if shared else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the normalised words of two English answers, 0-1."""
    return token_f1(normalize(prediction).split(), normalize(reference).split())


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F of the package ``rouge`` 1.0.1, in [0, 0.999999995].

    Sentences end at every ".", words at white space; case and punctuation count. All counts are of distinct words:
    |union of the LCS of every sentence pair| over the distinct words of each side. F carries 1e-8 in its denominator,
    so an exact match is 0.999999995. Text without a sentence scores 0, and so does a pair of sentences whose longest
    common subsequence takes more than `MAX_PATH` steps to read back.
    """
    predicted = _distinct(_dot_sentences(prediction[:MAX_REPLY]))
    referred = _distinct(_dot_sentences(reference[:MAX_REFERENCE]))
    if not predicted or not referred:
        return 0.0
    union: set[str] = set()
    for x in referred:
        for y in predicted:
            found, steps = lcs(x, y)
            if steps > MAX_PATH:
                return 0.0
            union |= {y[j] for j in found}
    recall = len(union) / len({word for sentence in referred for word in sentence})
    precision = len(union) / len({word for sentence in predicted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_lsum(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F of ``rouge-score``, 0-1: sentences are lines, tokens are runs of [a-z0-9].

    Each reference line takes the union of its LCS with all predicted lines; a token is counted no more often than it
    occurs on either side.
    """
    predicted, referred = (
        [re.sub("[^a-z0-9]+", " ", line.lower()).split() for line in text.split("\n") if line]
        for text in (prediction[:MAX_REPLY], reference[:MAX_REFERENCE])
    )
    left_predicted = Counter(token for line in predicted for token in line)
    left_referred = Counter(token for line in referred for token in line)
    n_predicted, n_referred = left_predicted.total(), left_referred.total()
    if not n_predicted or not n_referred:
        return 0.0
    hits = 0
    others = _distinct(predicted)
    for line in referred:
        for i in sorted(set().union(*(lcs(other, line)[0] for other in others))):
            if left_predicted[line[i]] > 0 and left_referred[line[i]] > 0:
                hits += 1
                left_predicted[line[i]] -= 1
                left_referred[line[i]] -= 1
    return _f(hits / n_predicted, hits / n_referred)


def lcs(x: Sequence[str], y: Sequence[str]) -> tuple[set[int], int]:
    """Positions in y of one longest common subsequence of x and y, and the steps that reading it back takes.

    It is read back from both ends; where a step could leave out a word of either, it leaves out one of y.
    """
    if not x or set(x).isdisjoint(y):
        return set(), len(y) if x else 0
    rows = lcs_rows(x, y)
    i, j, steps = len(x), len(y), 0
    found: set[int] = set()
    while i and j:
        steps += 1
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.add(j)
        elif rows[i] >> (j - 1) & 1:  # the same length without y[j - 1]
            j -= 1
        else:
            i -= 1
    return found, steps


def lcs_rows(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """Where LCS lengths L rise: bit j of row i is 0 if L(x[:i], y[:j + 1]) is above L(x[:i], y[:j]).

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


def _f(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _dot_sentences(text: str) -> list[list[str]]:
    # A blank sentence is the one empty word [""], and two of those match: the package does the same.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _distinct(sentences: list[list[str]]) -> list[list[str]]:
    """Each sentence once, in order; repeats change no union of LCSs."""
    return [list(words) for words in dict.fromkeys(map(tuple, sentences))]
