"""Compare what two methods answered, sample by sample: python -m leank.eval diff DIR dense leank."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from leank.data_gen.amount import amount
from leank.errors import naming
from leank.eval.report.groups import changed, frame, group, paired
from leank.eval.report.page import Reply, Section, page, replies, title
from leank.eval.report.sampled import by_sample
from leank.eval.report.summary import Means, Record, strata
from leank.eval.report.tables import Table, difference, with_interval
from leank.eval.rows import read
from leank.files import name_of, write_text
from leank.stats import mean


def table(pairs: pd.DataFrame, first: str, second: str) -> Table:
    """Tabulate both scores of `groups.paired` by task and length, what got worse or better, and the difference."""
    pairs = pairs.assign(
        difference=pairs["score_second"] - pairs["score_first"], kl_difference=pairs["kl_second"] - pairs["kl_first"]
    )
    parts = [
        (f"{task}, {length:.0f} tokens" if length == length else str(task), part)  # NaN: the benchmark has no lengths
        for (length, task), part in pairs.groupby(["length", "task"], observed=True, dropna=False)
    ]
    if len(parts) > 1:
        parts.append(("all samples", pairs))
    near = bool(pairs["kl_difference"].notna().any())
    means, records = Means(), []
    for _, part in parts:
        record: Record = {}
        samples = by_sample(part)
        for name in ("difference", "kl_difference"):
            means.add(record, name, strata(samples, name))
        records.append(record)
    means.draw()

    def average(part: pd.DataFrame, name: str, form: str) -> list[str]:
        both = (strata(part, f"{name}_{which}") for which in ("first", "second"))
        return [format(mean(found), form) if found else "-" for found in both]

    lines = []
    for (name, part), record in zip(parts, records, strict=True):
        gain, same = part["difference"], part["prediction_first"] == part["prediction_second"]
        line = [name, str(len(part)), *average(part, "score", ".1f"), difference(record)]
        line += [str(int(count)) for count in ((gain < 0).sum(), (gain > 0).sum(), same.sum())]
        if near:
            line += [*average(part, "kl", ".3g"), with_interval(record, "kl_difference", "+.3g") or "-"]
            line += [text if text == "-" else f"{text}%" for text in average(part, "top1", ".2f")]
        lines.append(line)
    head = ["", "n", first, second, "difference", "worse", "better", "same reply"]
    head += [f"KL {first}", f"KL {second}", "KL difference", f"top-1 {first}", f"top-1 {second}"] if near else []
    note = (
        f"Difference: {second} minus {first}, paired by sample, 95% bootstrap interval. Tasks and lengths count alike."
        + (" KL from dense: nats a token, paired likewise. Top-1: agreement with dense." if near else "")
    )
    shades = {(at, 4): record["difference"] for at, record in enumerate(records)}
    return Table.of(f"{first} and {second}", head, lines, note, shades)


def to_markdown(found: Sequence[Reply]) -> str:
    """Write every sample with both replies, in order."""
    parts = []
    for reply in found:
        parts.append(f"### {reply.name}: {reply.scores}\n")
        for name, text in reply.texts.items():
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            parts.append(f"**{name}**\n\n{fence}text\n{text}\n{fence}\n")
    return "\n".join(parts)


def write_diff(directory: Path, first: str, second: str) -> tuple[Path, str]:
    """Write diff_FIRST_SECOND.md and .html of two methods beside the rows of a run.

    Returns the page's path and the table in Markdown. Raises ValueError, naming the methods, if no sample has both.
    """
    if first == second:
        raise ValueError(f"{first} and {second} are the same method; give two of a run")
    texts, sections, shown = [], [], []
    known: dict[str, None] = {}
    rows = list(read(directory))
    with naming(directory):
        groups = group(rows)
    for some in groups:
        rows = frame(some)
        known |= dict.fromkeys(rows["method"].cat.categories)
        pairs = paired(rows, first, second)
        if pairs.empty:
            continue
        about, counts, found = title(some[0]), table(pairs, first, second), changed(rows, first, second)
        listed = replies(found, first, second)
        heading = f"{amount(len(found), 'sample')} with other replies, largest loss first"
        shown.append(f"{about}\n\n{counts.markdown()}")
        texts.append(f"# {shown[-1]}\n\n## {heading}\n\n{to_markdown(listed)}")
        sections.append(Section(about, tables=[counts], replies={"": listed}, heading=heading))
    if not sections:
        raise ValueError(
            f"no sample in {directory} has both {first!r} and {second!r}; its methods are {', '.join(known) or 'none'}"
        )
    stem = f"diff_{name_of(first)}_{name_of(second)}"
    write_text(directory / f"{stem}.md", "\n".join(texts))
    write_text(directory / f"{stem}.html", page(f"{first} and {second}", sections))
    return directory / f"{stem}.html", "\n\n".join(shown)
