"""The tables of a report, laid out as LeanK's: by length (table 3), by task (2, 13, 18), GSM-Infinite (4, 14)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leank.escape import markdown as escaped
from leank.escape import markdown_table
from leank.eval import published
from leank.eval.metrics.gsm_infinite import auc
from leank.eval.report import fidelity, pairs
from leank.eval.report.records import Difference, Figures, Mark, MethodFigures, RunSummary
from leank.eval.report.table import ReportTable, TableLine

# the mark behind a score, and the sentence below the table
MARKS: dict[Mark, tuple[str, str]] = {
    "not_compressed": ("†", "Nothing was compressed, as sink and window or the budget hold the whole prompt: such a "
                       "score says nothing about the method"),
    "dense_only": ("‡", "The first token alone decided the reply, and the dense pass chose it: such a score says "
                   "nothing about the method"),
    "non_finite": ("§", "Logits were NaN or infinite; such a sample scores 0"),
    "not_selected": ("¶", "No layer was selected, as the ranks of the tokens never settled or the budget holds the "
                     "whole prompt"),
}  # fmt: skip
# the modes of conversations in words
TURNS = {"conversation": "all turns on one cache", "reuse": "each question on a copy of the context's cache"}
PAPER_LENGTHS = {4096: "4K", 8192: "8K", 16384: "16K", 32768: "32K", 65536: "64K", 131072: "128K"}


def size(count: float | None) -> str:
    """Write bytes with a unit."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, digits: int = 1) -> str:
    """Write a figure, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def ms(seconds: float | None) -> str:
    """Write seconds as milliseconds."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def marks(cell: Figures) -> str:
    """Return the marks that stand behind a cell's score."""
    return "".join(mark for name, (mark, _) in MARKS.items() if cell.get(name))


def remarks(cells: Iterable[MethodFigures]) -> list[str]:
    """Return a sentence for every mark that these cells have, with the count of such samples by method."""
    out, cells = [], list(cells)
    for name, (mark, sentence) in MARKS.items():
        counts: dict[str, tuple[int, int]] = {}
        for cell in cells:
            if cell.get(name):
                found, of = counts.get(cell["method"], (0, 0))
                counts[cell["method"]] = found + cell[name], of + cell["n"]
        if counts:
            whose = ", ".join(f"{method} {found} of {of}" for method, (found, of) in counts.items())
            out.append(f"{mark} {sentence} ({whose} samples of the marked cells).")
    return out


def scored(cell: Figures) -> str:
    """Write a mean with its marks."""
    return number(cell["score"]) + marks(cell)


def bounds(interval: tuple[float, float]) -> str:
    """Write an interval."""
    return f"[{interval[0]:.1f}, {interval[1]:.1f}]"


def mean(cell: Figures) -> str:
    """Write a mean with its marks and interval."""
    return f"{scored(cell)} {bounds(cell['interval'])}"


def difference(found: Difference | None) -> str:
    """Write a paired difference with its interval; nothing for None."""
    if found is None:
        return ""
    return f"{found['difference']:+.1f} [{found['interval'][0]:+.1f}, {found['interval'][1]:+.1f}]"


def _shade(cell: Figures | None) -> float | None:
    return cell["against_dense"]["difference"] if cell and "against_dense" in cell else None


def lacking(run: RunSummary) -> list[str]:
    """Return a sentence where methods lack samples that others have, as in a run that was stopped or of few shards."""
    most: dict[tuple[int | None, str], int] = {}
    for cell in run["cells"]:
        most[cell["length"], cell["task"]] = max(cell["n"], most.get((cell["length"], cell["task"]), 0))
    every = sum(most.values())
    few = ", ".join(f"{cell['method']} {cell['n']} of {every}" for cell in run["overall"] if cell["n"] < every)
    if not few:
        return []
    return [f"Some methods lack samples that others have ({few}): compare differences, not means over other samples."]


def overall(run: RunSummary) -> ReportTable:
    """Make a table with one line per method: score, difference, bytes, times."""
    lines, text = [], fidelity.is_text(run)
    for cell in run["overall"]:
        against, seconds = cell.get("against_dense"), cell["seconds"]
        lines.append(
            TableLine(
                [
                    *(cell["method"], str(cell["n"]), mean(cell), difference(against)),
                    f"{100 * against['same_reply']:.0f}%" if against and not text else "",
                    size(cell["cache_bytes"]),
                    f"{100 * against['bytes']:.0f}%" if against else "",
                    *(ms(seconds["first_token"]), ms(seconds["per_token"])),
                ],
                [None, None, _shade(cell)],
            )
        )
    head = ["method", "n", "score", "difference", "same reply", "cache", "of dense", "first token, ms", "a token, ms"]
    note = "Cache: mean bytes after the prompt. Score and difference from dense (paired): 95% bootstrap intervals."
    note += " Score: share of the text's tokens that the method ranks first." if text else ""
    masks = len(pairs.learned(run["methods"]))
    if masks > pairs.COLUMNS and not run["differences"]:
        note += (
            f" The {masks} learned masks are not compared with other methods than dense: python -m eval report DIR"
            " METHOD ... does so for the methods that it names."
        )
    return ReportTable("Overall", head, lines, " ".join([note, *lacking(run), *remarks(run["overall"])]))


def differences(run: RunSummary) -> ReportTable | None:
    """Compare learned masks, or methods named (columns), with every other (lines); None if dense is the only other."""
    found = {(d["method"], d["minus"]): d for d in run["differences"]}
    columns, others = (list(dict.fromkeys(pair[i] for pair in found)) for i in (0, 1))
    others = [name for name in run["methods"] if name in others]
    if set(others) <= {run["dense"]}:
        return None
    cells = {other: [found.get((name, other)) for name in columns] for other in others}
    lines = [
        TableLine([other, *map(difference, row)], [None, *(None if d is None else d["difference"] for d in row)])
        for other, row in cells.items()
    ]
    note = (
        "Points by which a column's method is better than a line's method on the samples of both: 95% paired bootstrap."
    )
    masks = set(columns) <= set(pairs.learned(run["methods"]))
    return ReportTable(
        f"{'Learned masks' if masks else 'Methods'} minus other methods", ["minus", *columns], lines, note
    )


def _published(
    run: RunSummary, by: str, columns: Sequence[str], digits: int = 1, last: bool = True, **where: str | int | None
) -> tuple[list[TableLine], list[str]]:
    """Return lines with the papers' figures for these columns and, if `last`, their average; and the errata."""
    lines, errata = [], []
    for found in published.find(run["benchmark"], by, run["model"], **where):
        if any(found.scores.get(c) is not None for c in columns) or by == "average":
            texts = [number(found.scores.get(c), digits) for c in columns]
            average = [number(found.average, digits)] if last else []
            lines.append(TableLine([found.label, *texts, *average], published=True))
            errata += [e for e in found.errata if e not in errata]
    return lines, errata


def by_length(run: RunSummary) -> ReportTable | None:
    """Make a table of methods by lengths, as in LeanK's table 3."""
    lengths = [n for n in run["lengths"] if n is not None]
    if not lengths:
        return None
    cells = {(c["method"], c["length"]): c for c in run["by_length"]}
    lines = [
        TableLine(
            [
                c["method"],
                *(mean(cells[c["method"], n]) if (c["method"], n) in cells else "" for n in lengths),
                mean(c),
            ],
            [None, *(_shade(cells.get((c["method"], n))) for n in lengths), _shade(c)],
        )
        for c in run["overall"]
    ]
    names = [PAPER_LENGTHS.get(n, "") for n in lengths]
    notes: list[str] = []
    for by in ("length", "average"):
        printed, errata = _published(run, by, names)
        lines, notes = lines + printed, notes + errata
    notes += remarks(c for c in run["by_length"] if c["length"] is not None)
    return ReportTable("By length", ["method", *map(str, lengths), "average"], lines, " ".join(notes))


def by_task(run: RunSummary, length: int | None) -> ReportTable:
    """Make a table of methods by tasks at one length, as in LeanK's tables 2, 13 and 18."""
    cells = {(c["method"], c["task"]): c for c in run["cells"] if c["length"] == length}
    means = {c["method"]: c for c in run["by_length"] if c["length"] == length}
    tasks = [t for t in run["tasks"] if any((m, t) in cells for m in means)]
    lines = [
        TableLine(
            [m, *(scored(cells[m, t]) if (m, t) in cells else "" for t in tasks), mean(c)],
            [None, *(_shade(cells.get((m, t))) for t in tasks), _shade(c)],
        )
        for m, c in means.items()
    ]
    printed, notes = _published(run, "task", tasks, length=length)
    if run["benchmark"] == "ruler" and length is not None and length < 4096:
        notes.append(
            "Below 4096 tokens RULER changes its tasks; this is no official setting: they are its 4096-token forms."
        )
    notes += remarks(cells.values())
    title = "All tasks" if length is None else f"{length} tokens"
    return ReportTable(title, ["method", *tasks, "average"], lines + printed, " ".join(notes))


def gsm(run: RunSummary) -> list[ReportTable]:
    """Make tables of GSM-Infinite: fractions by op with the area under them (table 14), and all areas (table 4)."""
    out: list[ReportTable] = []
    areas: dict[str, dict[str, float | None]] = {m: {} for m in run["methods"]}
    for group in run["by_op"]:
        ops = sorted({int(op) for scores in group["methods"].values() for op in scores})
        lines = []
        for method, scores in group["methods"].items():
            area = auc({int(op): s for op, s in scores.items()}) if len(scores) > 1 else None
            areas[method][group["name"]] = area
            lines.append(TableLine([method, *(number(scores.get(str(op)), 4) for op in ops), number(area, 4)]))
        subset, _, length = group["name"].partition(" ")
        lines += _published(run, "op", [str(op) for op in ops], 4, subset=subset, length=length)[0]
        out.append(ReportTable(f"GSM-Infinite {group['name']}", ["method", *(f"op={op}" for op in ops), "AUC"], lines))
    if out:
        names = [group["name"] for group in run["by_op"]]
        lines = [TableLine([m, *(number(a.get(n), 2) for n in names)]) for m, a in areas.items()]
        printed, errata = _published(run, "subset", names, 2, last=False)
        out.insert(0, ReportTable("GSM-Infinite, AUC", ["method", *names], lines + printed, " ".join(errata)))
    return out


def turns(run: RunSummary) -> list[ReportTable]:
    """Make a table of methods by turn for conversations of each mode and length."""
    out = []
    for group in run["by_turn"]:
        numbers = sorted({one["turn"] for scores in group["methods"].values() for one in scores})
        lines = []
        for method, scores in group["methods"].items():
            texts = {one["turn"]: f"{number(one['score'])} {bounds(one['interval'])}" for one in scores}
            lines.append(TableLine([method, *(texts.get(turn, "") for turn in numbers)]))
        length = "" if group["length"] is None else f", {group['length']} tokens"
        how = TURNS.get(group["mode"], group["mode"])
        out.append(ReportTable(f"By turn{length}: {how}", ["method", *(f"turn {n}" for n in numbers)], lines))
    return out


def tables(run: RunSummary) -> list[ReportTable]:
    """Make all tables of one run of a summary."""
    lengths = by_length(run)
    alike = lengths is not None and len(run["tasks"]) == 1  # a table of tasks at each length would repeat it
    tasks = [] if alike else [by_task(run, n) for n in run["lengths"]]
    minus = differences(run)
    near = [table for table in (fidelity.overall(run), fidelity.by_length(run)) if table is not None]
    return [
        overall(run),
        *near,
        *([minus] if minus else []),
        *([lengths] if lengths else []),
        *turns(run),
        *gsm(run),
        *tasks,
    ]


def markdown(table: ReportTable) -> str:
    """Write a table in Markdown, with its heading and note."""
    body = markdown_table(table.head, [line.cells for line in table.lines])
    return f"## {escaped(table.title)}\n\n{body}" + (f"\n\n{escaped(table.note)}" if table.note else "")
