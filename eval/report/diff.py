"""Compare what two methods answered, sample by sample: python -m eval diff DIR dense leank."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from leank.bootstrap import interval, mean, together
from leank.data_gen.amount import amount
from leank.escape import markdown as escaped
from leank.eval.report import fidelity
from leank.eval.report.groups import Pair, by_label, changed, group, paired
from leank.eval.report.html import listing, page, title, to_table
from leank.eval.report.table import ReportTable, TableLine
from leank.eval.report.tables import markdown, number
from leank.eval.rows.results import read
from leank.files import name_of, write_text

NEAR = 5  # last columns of the table, which rows without distance from dense do not have


def table(pairs: Sequence[Pair], first: str, second: str) -> ReportTable:
    """Make a table of both scores by task and length, of what got worse or better, and of the paired difference."""
    groups: dict[tuple[str, int | None], list[Pair]] = {}
    for a, b in pairs:
        groups.setdefault((a["task"], a["length"]), []).append((a, b))
    lines = [_line(t if n is None else f"{t}, {n} tokens", [some]) for (t, n), some in groups.items()]
    if len(lines) > 1:
        lines.append(_line("all samples", list(groups.values())))
    near = fidelity.difference(list(groups.values())) is not None
    if not near:
        lines = [TableLine(line.cells[:-NEAR], line.shade) for line in lines]
    head = ["", "n", first, second, "difference", "worse", "better", "same reply"]
    head += [f"KL {first}", f"KL {second}", "KL difference", f"top-1 {first}", f"top-1 {second}"] if near else []
    note = (
        f"Difference: {second} minus {first}, paired by sample, 95% bootstrap interval. Tasks and lengths count alike."
        + (" KL from dense: nats a token, paired likewise. Top-1: agreement with dense." if near else "")
    )
    return ReportTable(f"{first} and {second}", head, lines, note)


def _line(name: str, strata: Sequence[Sequence[Pair]]) -> TableLine:
    """Make one line. strata: the pairs of each task and length."""
    scores = [np.array([[100 * a["score"], 100 * b["score"]] for a, b in pairs]) for pairs in strata]
    gains = [of[:, 1] - of[:, 0] for of in scores]
    gain, (low, high), every = mean(gains), interval(gains), np.concatenate(gains)
    near = together(fidelity.figures([[pair[i] for pair in pairs] for pairs in strata]) for i in (0, 1))
    same = sum(a["prediction"] == b["prediction"] for pairs in strata for a, b in pairs)
    return TableLine(
        [
            *(name, str(len(every)), *(number(mean([of[:, i] for of in scores])) for i in (0, 1))),
            f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]",
            *(str(int((every < 0).sum())), str(int((every > 0).sum())), str(same)),
            *(fidelity.digits(None if of is None else of["kl"]) for of in near),
            fidelity.nats_difference(fidelity.difference(strata)),
            *(fidelity.share(None if of is None else of["top1"]) for of in near),
        ],
        [None, None, None, None, gain],
    )


def to_markdown(pairs: Sequence[Pair], names: tuple[str, str]) -> str:
    """Write every sample of `pairs` with both replies, in order."""
    parts = []
    for first, second in pairs:
        length = "" if first["length"] is None else f", {first['length']} tokens"
        name = escaped(f"{first['task']}{length}, sample {first['sample']}")
        parts.append(f"### {name}: {100 * first['score']:.0f} → {100 * second['score']:.0f}\n")
        replies = {"answers": ", ".join(map(str, first["answers"])), names[0]: first["prediction"],
                   names[1]: second["prediction"]}  # fmt: skip
        for name, text in replies.items():
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            parts.append(f"**{escaped(name)}**\n\n{fence}text\n{text}\n{fence}\n")
    return "\n".join(parts)


def write_diff(directory: Path, first: str, second: str) -> tuple[Path, str]:
    """Write diff_FIRST_SECOND.md and .html beside the rows.

    directory: of a run.
    first, second: labels of two of its methods.
    Returns the page's path and the table in Markdown. Raises ValueError, naming the methods, if no sample has both.
    """
    texts, pages, shown = [], [], []
    known: dict[str, None] = {}
    rows = list(read(directory))
    for some in group(rows):
        methods = by_label(some)
        known |= dict.fromkeys(methods)
        pairs = paired(methods, first, second)
        if not pairs:
            continue
        of, about = changed(methods, first, second), title(some[0])
        counts = table(pairs, first, second)
        heading = f"{amount(len(of), 'sample')} with other replies, largest loss first"
        shown.append(f"{escaped(about)}\n\n{markdown(counts)}")
        texts.append(f"# {shown[-1]}\n\n## {heading}\n\n{to_markdown(of, (first, second))}")
        pages.append(f"<h1>{html.escape(about)}</h1>{to_table(counts)}<h2>{heading}</h2>{listing(of, (first, second))}")
    if not pages:
        raise ValueError(
            f"no sample in {directory} has both {first!r} and {second!r}; its methods are {', '.join(known) or 'none'}"
        )
    stem = f"diff_{name_of(first)}_{name_of(second)}"
    write_text(directory / f"{stem}.md", "\n".join(texts))
    write_text(directory / f"{stem}.html", page(f"{first} and {second}", "".join(pages)))
    return directory / f"{stem}.html", "\n\n".join(shown)
