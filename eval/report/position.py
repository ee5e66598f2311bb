"""Distance from dense, bytes and time by position in the replies, or texts, that methods read (`eval.rows.Along`).

Replies differ in length, so that a mean over those that reach a position is of fewer and other replies the further it
lies. All methods read the same ones: lines of one position compare them. Whether a method drifts, `quarters` shows,
which compares the parts of each reply with each other.
"""

import pandas as pd

from leank.eval.report.groups import SAMPLE

QUARTERS = 4
FIGURES = ("kl", "top1", "bytes", "tables", "planned", "seconds", "repeated")


def by_block(table: pd.DataFrame, dense: str | None) -> pd.DataFrame:
    """Return one line per method, sample and block with FIGURES, `dense_bytes`, `position` and `quarter`.

    table: of `groups.frame`. `position` is the number of tokens at the block's end, if it is whole, and `quarter` the
    part of the sample's own blocks, 0 to 3, that the block's middle lies in. top1 and repeated are 0 to 100; what is
    missing is NaN.
    """
    lines = []
    for row in table[table["along"].notna()].to_dict("records"):
        along = row["along"]
        blocks = len(along["kl"])
        figures = {name: along.get(name) or [None] * blocks for name in FIGURES}
        if not along["stepped"]:  # in pieces, which takes another time
            figures["seconds"] = [None] * blocks
        for number in range(blocks):
            where = {"position": (number + 1) * along["block"], "quarter": int(QUARTERS * (number + 0.5) / blocks)}
            line = {name: values[number] for name, values in figures.items()}
            lines.append({name: row[name] for name in ("method", *SAMPLE)} | where | line)
    if not lines:
        return pd.DataFrame()
    found = pd.DataFrame(lines)
    found["method"] = pd.Categorical(found["method"], table["method"].cat.categories)
    found[[*FIGURES]] = found[[*FIGURES]].astype(float)
    found[["top1", "repeated"]] *= 100
    keys = [*SAMPLE, "position"]
    of_dense = found.loc[found["method"] == dense, [*keys, "bytes"]].rename(columns={"bytes": "dense_bytes"})
    return found.merge(of_dense, on=keys, how="left")


def by_quarter(blocks: pd.DataFrame) -> pd.DataFrame:
    """Return one line per method, sample and quarter of its blocks: means of `by_block`. Empty without four blocks."""
    if blocks.empty:
        return blocks
    many = blocks.groupby(["method", *SAMPLE], observed=True, dropna=False)["position"].transform("size") >= QUARTERS
    keys = ["method", *SAMPLE, "quarter"]
    return (
        blocks[many]
        .groupby(keys, observed=True, dropna=False)[["kl", "top1", "seconds", "repeated"]]
        .mean()
        .reset_index()
    )
