"""Overlap of two texts: F1 over bags of tokens, as in SQuAD, and ROUGE by the packages that the benchmarks use."""

import re
import string
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from leank.extras import require

# `rouge` reads a common subsequence back by recursion. From LongBench's eval.py (Python 3.11, recursion limit 1000) 990
# steps are the most that do not overflow, and beyond them LongBench scores 0. A thread needs this limit for as many.
RECURSION_LIMIT = 1003

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
    precision, recall = shared / max(1, len(prediction)), shared / max(1, len(reference))
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the normalised words of two English answers, 0-1."""
    return token_f1(normalize(prediction).split(), normalize(reference).split())


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F of the package ``rouge`` 1.0.1, which LongBench uses, in [0, 0.999999995].

    Sentences end at every ".", and all counts are of distinct words. Text without a sentence scores 0, and so does a
    pair of sentences that overflows the package's recursion; a thread of its own makes that the same from any caller.
    """
    require("ROUGE", "eval", "rouge")
    from rouge import Rouge

    def scored() -> float:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(RECURSION_LIMIT)
        try:
            return float(Rouge(["rouge-l"]).get_scores(prediction, reference, avg=True)["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0
        finally:
            sys.setrecursionlimit(before)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(scored).result()


def rouge_lsum(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F of ``rouge-score`` 0.1.2 without stemming, which InfiniteBench uses, 0-1."""
    require("ROUGE", "eval", "rouge_score")
    from rouge_score import rouge_scorer

    return float(rouge_scorer.RougeScorer(["rougeLsum"]).score(reference, prediction)["rougeLsum"].fmeasure)
