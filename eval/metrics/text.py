"""Answer normalisation and bag-of-tokens F1, shared by LongBench and InfiniteBench (both take them from SQuAD)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

# Characters that a scorer reads where its cost grows faster than the text. The longest reply that such a benchmark
# allows, 1,200 tokens of InfiniteBench's summaries, has some 6,000 characters; 512 tokens of LongBench have 2,500.
MAX_REPLY = 20_000
MAX_REFERENCE = 100_000

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
    if shared == 0:
        return 0.0
    precision = 1.0 * shared / len(prediction)
    recall = 1.0 * shared / len(reference)
    return (2 * precision * recall) / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the normalised words of two English answers, 0-1."""
    return token_f1(normalize(prediction).split(), normalize(reference).split())
