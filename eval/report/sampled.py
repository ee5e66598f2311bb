"""Several replies to one sample: they are not independent, so intervals are over samples.

k replies of one sample have n scores. With avg@k their mean,

    pass@k = E[the largest of k scores drawn from the n without replacement]
           = sum over i = k..n of s_(i) C(i - 1, k - 1) / C(n, k),    s_(1) <= ... <= s_(n)

which for scores of 0 and 1, c of them 1, is the unbiased 1 - C(n - c, k) / C(n, k) of Chen et al. 2021; and maj@n is
the score of the answer that most of the n replies state.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import comb

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from leank.eval.report.groups import META, SAMPLE


def by_sample(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of replies with one line per sample (and method): means of figures, whether any reply has a mark.

    table: of `groups.frame` or `groups.paired`; what is neither is the first reply's. Without sampling it is as it was.
    """
    if not table["reply"].any():
        return table
    keys = [name for name in ("method", *SAMPLE) if name in table]
    first = {f"meta_{name}" for name in META}
    how = {
        name: "first" if name in first else "max" if is_bool_dtype(values) else "mean" if is_numeric_dtype(values)
        else "first"
        for name, values in table.items() if name not in keys
    }  # fmt: skip
    return table.groupby(keys, observed=True, dropna=False, sort=False).agg(how).reset_index()


def pass_at(scores: Sequence[float], k: int) -> float:
    """Return pass@k of a sample's scores, see the module. Raises ValueError for fewer scores than k, or k < 1."""
    if not 1 <= k <= len(scores):
        raise ValueError(f"pass@{k} of {len(scores)} replies: k must be 1 or more, and no more than the replies")
    ordered = sorted(scores)
    return sum(s * comb(i, k - 1) for i, s in enumerate(ordered) if i >= k - 1) / comb(len(scores), k)


def majority(stated: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the score of the answer that most replies state; 0 if none states any.

    Answers are compared as texts. Of answers that are stated equally often the mean score counts.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(stated, scores, strict=True):
        if answer is not None:
            votes[answer].append(score)
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(found) for found in votes.values() if len(found) == most])) if votes else 0.0


def sizes(replies: int) -> list[int]:
    """Return the k of which pass@k is shown: powers of two below the number of replies, and that number."""
    return [k for k in (2**n for n in range(1, 64)) if k < replies] + [replies]


def votes(table: pd.DataFrame) -> pd.DataFrame:
    """Return one line per method and sample with all replies: pass_K for each of `sizes`, and majority where it is.

    table: of `groups.frame`. A sample that lacks replies, as in a run that was stopped, is left out.
    """
    replies = 1 + int(table["reply"].max())
    lines = []
    for key, part in table.groupby(["method", *SAMPLE], observed=True, dropna=False, sort=False):
        if len(part) == replies:
            scores = part["score"].tolist()
            line = dict(zip(["method", *SAMPLE], key, strict=True))
            line |= {f"pass_{k}": pass_at(scores, k) for k in sizes(replies)}
            stated = [None if pd.isna(answer) else answer for answer in part["stated"]]  # a column has NaN for None
            line["majority"] = majority(stated, scores) if part["votes"].all() else np.nan
            lines.append(line)
    return pd.DataFrame(lines)
