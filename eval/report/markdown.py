"""summary.md: a table a length, methods by tasks, as in the papers (LeanK, table 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def size(count: float | None) -> str:
    """Bytes for people."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def ms(value: float | None) -> str:
    """Seconds as milliseconds."""
    return "-" if value is None else f"{1000 * value:.1f}"


def plus_minus(cell: dict[str, Any]) -> str:
    """A mean with its interval."""
    return f"{cell['score']:.1f} [{cell['interval'][0]:.1f}, {cell['interval'][1]:.1f}]"


def difference(against: dict[str, Any]) -> str:
    """A paired difference with its interval."""
    return f"{against['difference']:+.1f} [{against['interval'][0]:+.1f}, {against['interval'][1]:+.1f}]"


def overall(run: dict[str, Any]) -> str:
    """One line a method: score, difference from dense, bytes, times."""
    lines = []
    for cell in run["overall"]:
        against = cell.get("against_dense")
        lines.append([
            cell["method"], str(cell["n"]), plus_minus(cell),
            difference(against) if against else "",
            f"{100 * against['same_reply']:.0f}%" if against else "",
            size(cell["cache_bytes"]), f"{100 * against['bytes']:.0f}%" if against else "",
            ms(cell["seconds"]["first_token"]), ms(cell["seconds"]["per_token"]),
        ])  # fmt: skip
    head = [
        "method",
        "n",
        "score",
        "against dense",
        "same reply",
        "cache",
        "of dense",
        "first token, ms",
        "per token, ms",
    ]
    return table(head, lines)


def by_task(run: dict[str, Any], length: int | None) -> str:
    """Methods by tasks at one length."""
    cells = {(c["method"], c["task"]): c for c in run["cells"] if c["length"] == length}
    means = {c["method"]: c for c in run["by_length"] if c["length"] == length}
    tasks = [t for t in run["tasks"] if any((m, t) in cells for m in means)]
    lines = [
        [m, *(number(cells[m, t]["score"]) if (m, t) in cells else "" for t in tasks), plus_minus(mean)]
        for m, mean in means.items()
    ]
    return table(["method", *tasks, "average"], lines)


def to_markdown(summary: dict[str, Any]) -> str:
    """The whole file."""
    parts = []
    for run in summary["runs"]:
        parts.append(f"# {run['benchmark']} on {run['model']}, compressed {run['compress'].replace('_', ' the ')}")
        parts.append(f"{run['rows']} rows. In brackets: 95% bootstrap intervals; tasks count alike.")
        parts.append(overall(run))
        for length in run["lengths"]:
            parts.append(f"## {length} tokens" if length is not None else "## All lengths")
            parts.append(by_task(run, length))
    return "\n\n".join(parts) + "\n"
