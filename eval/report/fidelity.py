"""Distance from dense in a report: KL, top-1 agreement and loss of the rows that have them, as figures and tables."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from leank.bootstrap import Ends, Strata, interval, mean
from leank.eval.report.records import FidelityFigures, Figures, Interval, NatsDifference, RunSummary
from leank.eval.report.table import ReportTable, TableLine
from leank.eval.rows.result_row import Fidelity, ResultRow

BROKEN = "§"
NEAR = ("kl", "kl_low", "kl_high", "top1", "top1_low", "top1_high", "loss", "loss_minus_dense")


def is_text(run: RunSummary | ResultRow) -> bool:
    """Return whether texts were read in a run, in place of replies."""
    return run["benchmark"] == "text"


def measured(row: ResultRow) -> Fidelity | None:
    """Return what a row says of its distance from dense; None if that was not measured, as in rows of old versions."""
    return row.get("fidelity")


def nats(row: ResultRow) -> float | None:
    """Return a row's KL from dense; None if it was not measured or logits were not finite."""
    found = measured(row)
    return None if found is None else found["kl"]


def figures(strata: Sequence[Sequence[ResultRow]]) -> Generator[Strata, Ends, FidelityFigures | None]:
    """Compute the figures of one method; None if no row has any.

    strata: its rows by task and length, which count alike. Samples with logits that are not finite are counted, and
    left out of the means.
    Yields the values whose intervals it is then sent (`leank.bootstrap.together`).
    """
    there = [[found for row in rows if (found := measured(row)) is not None] for rows in strata]
    every = [found for some in there for found in some]
    if not every:
        return None
    whole = [[found for found in some if found["non_finite"] is None] for some in there]
    whole = [some for some in whole if some]
    out: FidelityFigures = {
        "n": len(every),
        "tokens": sum(found["tokens"] for found in every),
        "kl": None,
        "top1": None,
        "non_finite": len(every) - sum(map(len, whole)),
    }
    if whole:
        kl, top1 = ([[found[name] or 0.0 for found in some] for some in whole] for name in ("kl", "top1"))
        top1 = [[100 * share for share in some] for some in top1]
        out |= {"kl": mean(kl), "kl_interval": (yield kl), "top1": mean(top1), "top1_interval": (yield top1)}
    losses = [[(f["loss"], f["dense_loss"]) for f in some] for some in whole]
    texts = [[(a, b) for a, b in some if a is not None and b is not None] for some in losses]
    texts = [some for some in texts if some]
    if texts:
        gaps = [[a - b for a, b in some] for some in texts]
        out["loss"] = mean([[a for a, _ in some] for some in texts])
        out["loss_difference"] = {"n": sum(map(len, gaps)), "difference": mean(gaps), "interval": (yield gaps)}
    return out


def difference(strata: Sequence[Sequence[tuple[ResultRow, ResultRow]]]) -> NatsDifference | None:
    """Return the paired difference in KL from dense, second minus first; None if no sample has both.

    strata: pairs of rows of two methods on one sample, by task and length.
    """
    gaps = [[b - a for a, b in ((nats(x), nats(y)) for x, y in pairs) if a is not None and b is not None]
            for pairs in strata]  # fmt: skip
    gaps = [some for some in gaps if some]
    if not gaps:
        return None
    return {"n": sum(map(len, gaps)), "difference": mean(gaps), "interval": interval(gaps)}


def near(cell: Figures) -> dict[str, float | None]:
    """Return the fields `NEAR` of a cell, for tables of numbers; None where it has none."""
    found = cell.get("fidelity")
    if found is None:
        return dict.fromkeys(NEAR)
    kl_ends, top1_ends = found.get("kl_interval", (None, None)), found.get("top1_interval", (None, None))
    minus = found.get("loss_difference")
    values = (found["kl"], *kl_ends, found["top1"], *top1_ends, found.get("loss"), minus and minus["difference"])
    return dict(zip(NEAR, values, strict=True))


def digits(value: float | None, sign: str = "") -> str:
    """Write nats with three significant digits, or a dash for None; KL of methods differs by powers of ten."""
    return "-" if value is None else f"{value:{sign}.3g}"


def _with(value: str, ends: Interval | None, form: str) -> str:
    return value if ends is None else f"{value} [{ends[0]:{form}}, {ends[1]:{form}}]"


def _mark(found: FidelityFigures) -> str:
    return BROKEN if found["non_finite"] else ""


def kl(found: FidelityFigures) -> str:
    """Write a KL with its interval."""
    return _with(digits(found["kl"]), found.get("kl_interval"), ".3g") + _mark(found)


def share(value: float | None) -> str:
    """Write per cent with two decimals, or a dash for None."""
    return "-" if value is None else f"{value:.2f}%"


def top1(found: FidelityFigures) -> str:
    """Write an agreement in per cent with its interval."""
    return _with(share(found["top1"]), found.get("top1_interval"), ".2f")


def nats_difference(found: NatsDifference | None) -> str:
    """Write a paired difference in nats with its interval; a dash for None."""
    return "-" if found is None else _with(digits(found["difference"], "+"), found["interval"], "+.3g")


def overall(run: RunSummary) -> ReportTable | None:
    """Make a table with one line per method: KL and top-1 agreement, and for texts the loss; None without any."""
    cells = [(cell["method"], cell["fidelity"]) for cell in run["overall"] if "fidelity" in cell]
    if not cells:
        return None
    texts = any("loss" in found for _, found in cells)
    lines = []
    for method, found in cells:
        line = [method, str(found["n"]), f"{found['tokens']:,}", kl(found), top1(found)]
        if texts:
            loss = found.get("loss")
            perplexity = "-" if loss is None else f"{math.exp(min(loss, 700)):.4g}"
            line += ["-" if loss is None else f"{loss:.4f}", nats_difference(found.get("loss_difference")), perplexity]
        lines.append(TableLine(line))
    head = ["method", "n", "tokens", "KL, nats a token", "top-1 agreement"]
    head += ["loss, nats a token", "loss minus dense", "perplexity"] if texts else []
    what = "the rest of each text is" if texts else "dense's reply is"
    note = (
        f"KL(dense || method) of next-token distributions, and how often both have one likeliest token, where {what}"
        " read through each method's cache. 95% bootstrap intervals; loss differences are paired by sample."
    )
    return ReportTable("Distance from dense", head, lines, " ".join([note, *_remarks(cells)]))


def _remarks(cells: Sequence[tuple[str, FidelityFigures]]) -> list[str]:
    counts = [f"{method} {found['non_finite']} of {found['n']}" for method, found in cells if found["non_finite"]]
    left = "Logits of the method or of dense were NaN or infinite; such samples are left out of these means"
    return [f"{BROKEN} {left} ({', '.join(counts)})."] if counts else []


def by_length(run: RunSummary) -> ReportTable | None:
    """Make a table of KL and top-1 agreement by length; None without several lengths."""
    cells = {(c["method"], c["length"]): c for c in run["by_length"] if "fidelity" in c}
    lengths = [n for n in run["lengths"] if n is not None and any(length == n for _, length in cells)]
    if len(lengths) < 2:
        return None
    methods = dict.fromkeys(method for method, _ in cells)
    lines = [TableLine([m, *(_short(cells.get((m, n))) for n in lengths)]) for m in methods]
    return ReportTable(
        "Distance from dense by length",
        ["method", *map(str, lengths)],
        lines,
        "KL in nats a token, and top-1 agreement.",
    )


def _short(cell: Figures | None) -> str:
    if cell is None:
        return ""
    found = cell["fidelity"]
    return digits(found["kl"]) + _mark(found) + ("" if found["top1"] is None else f" ({found['top1']:.1f}%)")
