"""The tables of a report, laid out as LeanK's: by length (table 3), by task (2, 13, 18), GSM-Infinite (4, 14).

A `Table` is a DataFrame of texts, which pandas writes in Markdown and LaTeX and `eval.report.page` in HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from leank.eval import published
from leank.eval.benchmarks.gsm_infinite import auc
from leank.eval.report.groups import flat
from leank.eval.report.sampled import sizes
from leank.eval.report.summary import COLUMNS, Record, Run, learned

# the mark behind a score, and the sentence below the table
MARKS = {
    "not_compressed": ("†", "Nothing was compressed, as sink and window or the budget hold the whole prompt: such a "
                       "score says nothing about the method"),
    "dense_only": ("‡", "The first token alone decided the reply, and the dense pass chose it: such a score says "
                   "nothing about the method"),
    "non_finite": ("§", "Logits were NaN or infinite; such a sample scores 0"),
    "not_selected": ("¶", "No layer was selected, as the ranks of the tokens never settled or the budget holds the "
                     "whole prompt"),
}  # fmt: skip
BROKEN = MARKS["non_finite"][0]
TURNS = {"conversation": "all turns on one cache", "reuse": "each question on a copy of the context's cache"}
PAPER_LENGTHS = {4096: "4K", 8192: "8K", 16384: "16K", 32768: "32K", 65536: "64K", 131072: "128K"}
SETTINGS = ("ratio", "pruning_ratio", "budget", "bits")  # of a method's axes: how much it keeps
LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", **{c: f"\\{c}" for c in "&%$#_{}"},
})  # fmt: skip
BUDGETS = (10, 15, 20, 25, 31, 40, 50)  # % of dense's middle
Shades = dict[tuple[int, int], float | None]  # points from dense by (line, column)
WIDE = 8  # columns; a LaTeX table of more is scaled to the width of the text


@dataclass
class Table:
    """A table with its heading; `note` stands below it."""

    title: str
    cells: pd.DataFrame  # texts; the first column names the lines
    note: str = ""
    # points from dense by (line, column), which colour a cell of the page
    shades: Mapping[tuple[int, int], float] | None = None
    published: int = 0  # how many of the last lines are figures that a paper printed

    @classmethod
    def of(
        cls, title: str, head: Sequence[str], lines: Sequence[Sequence[str]], note: str = "",
        shades: Mapping[tuple[int, int], float | None] | None = None, published: Sequence[Sequence[str]] = (),
    ) -> Table:  # fmt: skip
        """Make a table of lines of texts; lines that a paper printed stand below the others."""
        cells = pd.DataFrame([*lines, *published], columns=list(head), dtype=object)
        there = {place: shade for place, shade in (shades or {}).items() if shade}
        return cls(title, cells, note, there, len(published))

    def markdown(self) -> str:
        """Write the table with its heading and note."""
        texts = [[_one_line(text) for text in line] for line in [self.cells.columns, *self.cells.to_numpy()]]
        numbers = ["right"] * (len(texts[0]) - 1)
        body = pd.DataFrame(texts[1:], columns=texts[0]).to_markdown(
            index=False, disable_numparse=True, colalign=["left", *numbers] if len(texts) > 1 else None
        )
        return f"## {_one_line(self.title)}\n\n{body}" + (f"\n\n{_one_line(self.note)}" if self.note else "")

    def latex(self, about: str = "") -> str:
        """Write a table environment for booktabs, the papers' figures in italics. about: what the caption adds."""
        cells, own = self.cells.map(lambda text: text.translate(LATEX)), len(self.cells) - self.published
        cells.columns = [str(name).translate(LATEX) for name in cells.columns]
        cells[own:] = cells[own:].map(lambda text: rf"\textit{{{text}}}")
        columns = "l" + "r" * (cells.shape[1] - 1)
        body = cells.to_latex(index=False, column_format=columns)
        if cells.shape[1] > WIDE:
            body = f"\\resizebox{{\\textwidth}}{{!}}{{%\n{body}}}\n"
        caption = ". ".join(part.rstrip(".") for part in (self.title, about, self.note) if part) + "."
        return f"\\begin{{table}}\n\\centering\n\\caption{{{caption.translate(LATEX)}}}\n{body}\\end{{table}}\n"


def _one_line(text: object) -> str:
    """Write a text so that it stays in its cell of a Markdown table, without markup."""
    words = " ".join(str(text).split())
    return words.replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("`", "\\`")


def size(count: float | None) -> str:
    """Write bytes with a unit."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 999.5:  # 1,000 and more would be written 1e+03
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, digits: int = 1) -> str:
    """Write a figure, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(record: Record, name: str, form: str = ".1f", unit: str = "") -> str:
    """Write a figure with its interval; nothing where the record has none."""
    if record.get(name) is None:
        return ""
    ends = ", ".join(f"{record[f'{name}_{end}']:{form}}" for end in ("low", "high"))
    return f"{record[name]:{form}}{unit} [{ends}]"


def scored(cell: Record) -> str:
    """Write a mean score with the marks of its samples."""
    return number(cell["score"]) + "".join(mark for name, (mark, _) in MARKS.items() if cell[name])


def mean(cell: Record) -> str:
    """Write a mean score with its marks and interval."""
    return f"{scored(cell)} [{cell['score_low']:.1f}, {cell['score_high']:.1f}]"


def difference(record: Record | None) -> str:
    """Write a paired difference in points with its interval; nothing without one."""
    return "" if record is None else with_interval(record, "difference", "+.1f")


def remarks(cells: Iterable[Record]) -> list[str]:
    """Return a sentence for every mark that these cells have, with the count of such samples by method."""
    out, cells = [], list(cells)
    for name, (mark, sentence) in MARKS.items():
        counts: dict[str, tuple[int, int]] = {}
        for cell in cells:
            if cell[name]:
                found, of = counts.get(cell["method"], (0, 0))
                counts[cell["method"]] = found + cell[name], of + cell["n"]
        if counts:
            whose = ", ".join(f"{method} {found} of {of}" for method, (found, of) in counts.items())
            out.append(f"{mark} {sentence} ({whose} samples of the marked cells).")
    return out


def _lacking(run: Run) -> list[str]:
    """Return a sentence where methods lack samples that others have, as in a run that was stopped or of few shards."""
    cells = pd.DataFrame(run["cells"])
    every = int(cells.groupby(["length", "task"], dropna=False)["n"].max().sum())
    few = ", ".join(f"{cell['method']} {cell['n']} of {every}" for cell in run["overall"] if cell["n"] < every)
    if not few:
        return []
    return [f"Some methods lack samples that others have ({few}): compare differences, not means over other samples."]


def settings(config: Mapping[str, object]) -> str:
    """Write the settings of a method that say how much it keeps."""
    found = ((name.split("."), value) for name, value in flat(config).items() if isinstance(value, int | float))
    return ", ".join(
        f"{'prefill ' if axis == 'prefill' else ''}{name[0]}={value:.3g}"
        for (axis, *name), value in found if len(name) == 1 and name[0] in SETTINGS
    )  # fmt: skip


def read_by_all(run: Mapping[str, Any]) -> str:
    """Return what every method reads in place of writing a reply, in words; empty where each writes its own.

    run: of a summary, or one of its rows
    """
    if run["benchmark"] == "text":
        return "the rest of each text"
    return "dense's reply" if "by_position" in run["settings"] else ""


def overall(run: Run) -> Table:
    """Make a table with one line per method: settings, score, difference, bytes, times."""
    text = read_by_all(run)
    lines = []
    for cell in run["overall"]:
        there = cell["difference"] is not None
        lines.append([
            cell["method"], settings(run["methods"][cell["method"]]), str(cell["n"]),
            f"{cell['prompt_tokens']:,.0f}", mean(cell), difference(cell),
            f"{cell['same_reply']:.0f}%" if there and not text else "",
            size(cell["cache_bytes"]), f"{cell['share_of_dense']:.0f}%" if there else "",
            *(number(None if (s := cell[name]) is None else 1000 * s) for name in ("first_token", "per_token")),
        ])  # fmt: skip
    head = ["method", "settings", "n", "prompt tokens", "score", "difference", "same reply", "cache", "of dense",
            "first token, ms", "a token, ms"]  # fmt: skip
    note = "Prompt tokens: mean. Cache: mean bytes after the prompt. Score and difference from dense (paired): 95% "
    note += "bootstrap intervals." + _score_read(run)
    if run["sampled"]:
        note += f" The score of a sample is the mean of its {run['sampled'][0]['replies']} replies (avg@k)."
    masks = len(learned(run["methods"]))
    if masks > COLUMNS and not run["differences"]:
        note += (
            f" The {masks} learned masks are compared with dense alone: python -m leank.eval report DIR"
            " METHOD ... does so for the methods that it names."
        )
    shades = {(line, 4): cell["difference"] for line, cell in enumerate(run["overall"])}
    return Table.of("Overall", head, lines, " ".join([note, *_lacking(run), *remarks(run["overall"])]), shades)


def _score_read(run: Run) -> str:
    if run["benchmark"] == "text":
        return " Score: share of the text's tokens that the method ranks first."
    return " Score: top-1 agreement with dense along dense's reply." if read_by_all(run) else ""


def along(run: Run) -> Table | None:
    """Make a table of the distance from dense by quarter of what methods read; None where that was not measured."""
    cells = {(record["method"], record["quarter"]): record for record in run["by_quarter"]}
    if not cells:
        return None
    lines = []
    for method in dict.fromkeys(method for method, _ in cells):
        quarters = [cells[method, number] for number in range(4)]
        last = max((r for r in run["by_position"] if r["method"] == method), key=lambda record: record["position"])
        whole = last["dense_bytes"]
        lines.append([
            method, str(quarters[0]["n"]), *(f"{q['kl']:.3g}" for q in quarters),
            with_interval(quarters[3], "kl_more", "+.2g"), f"{quarters[0]['top1']:.2f}%", f"{quarters[3]['top1']:.2f}%",
            size(last["bytes"]), f"{100 * last['bytes'] / whole:.0f}%" if whole and last["bytes"] is not None else "",
            *(number(None if q["seconds"] is None else 1000 * q["seconds"]) for q in (quarters[0], quarters[3])),
        ])  # fmt: skip
    head = ["method", "n", "KL, 1st quarter", "2nd", "3rd", "4th", "4th minus 1st", "top-1, 1st", "4th",
            "cache at the end", "of dense", "a step, ms, 1st", "4th "]  # fmt: skip
    note = (
        f"KL and top-1 agreement by quarter of each reply's or text's own length, where {read_by_all(run)} is read as"
        " it would be decoded; dense's KL is rounding. Cache: one sample's share at the last position that any reaches."
        " 95% bootstrap intervals, paired by sample. Steps have a time where they are captured; the first ones compile."
    )
    again = [cells[lines[0][0], number]["repeated"] for number in range(4)]
    if None not in again:
        note += (
            f" Of the replies' own tokens {', '.join(f'{share:.0f}%' for share in again)} of each quarter end a 4-gram"
            " that stands before: where a reply repeats itself, a small KL says little."
        )
    return Table.of("Along the reply", head, lines, note)


def replies(run: Run) -> Table | None:
    """Make a table of the length of replies, of those cut off, and of repetition; None where all are of one length."""
    found = run["replies"]
    if len({record["new_tokens"] for record in found} | {r["new_tokens_high"] for r in found}) < 2:
        return None
    names = {"new_tokens": "tokens", "new_tokens_difference": "minus dense", "cut": "cut, %",
             "in_thought": "in a thought, %", "repeated": "repeated 4-grams, %"}  # fmt: skip
    there = [name for name in names if any(record[name] for record in found)]
    lines = [[record["method"], str(record["n"]), *(with_interval(record, name) for name in there)] for record in found]
    note = (
        "Cut: the limit of tokens ended the reply, or it ends inside a thought. Repeated: share of the 4-grams of a"
        " reply that it has had before (seq-rep-4). 95% bootstrap intervals over samples; differences are paired."
    )
    return Table.of("Replies", ["method", "n", *(names[name] for name in there)], lines, note)


def sampled(run: Run) -> Table | None:
    """Make a table of pass@k and majority vote by method; None where replies are greedy or one a sample."""
    if not run["sampled"]:
        return None
    replies = run["sampled"][0]["replies"]
    names = {f"pass_{k}": f"pass@{k}" for k in sizes(replies)} | {"majority": f"maj@{replies}"}
    there = [name for name in names if any(record[name] is not None for record in run["sampled"])]
    lines = [
        [record["method"], str(record["n"])]
        + [text for name in there for text in (with_interval(record, name) or "-",
                                               with_interval(record, f"{name}_difference", "+.1f"))]
        for record in run["sampled"]
    ]  # fmt: skip
    head = ["method", "n", *(text for name in there for text in (names[name], f"{names[name]} minus dense"))]
    note = (
        f"Of the samples with all {replies} replies. pass@k: the best score of k replies, expected over draws from all"
        " (unbiased); maj: the score of the answer that most replies state. Intervals and differences are over samples."
    )
    return Table.of(f"{replies} replies a sample", head, lines, note)


def from_dense(run: Run) -> Table | None:
    """Make a table of KL and top-1 agreement by method, and of the loss of texts; None where no row has any."""
    cells = [cell for cell in run["overall"] if cell["compared"]]
    if not cells:
        return None
    texts = any(cell["loss"] is not None for cell in cells)
    lines = []
    for cell in cells:
        kl, top1 = with_interval(cell, "kl", ".3g") or "-", with_interval(cell, "top1", ".2f", "%") or "-"
        broken, loss = BROKEN if cell["compared_non_finite"] else "", cell["loss"]
        line = [cell["method"], str(cell["compared"]), f"{cell['tokens_compared']:,}", kl + broken, top1]
        if texts:
            line += [number(loss, 4), with_interval(cell, "loss_minus_dense", "+.3g") or "-",
                     "-" if loss is None else f"{math.exp(min(loss, 700)):.4g}"]  # fmt: skip
        lines.append(line)
    head = ["method", "n", "tokens", "KL, nats a token", "top-1 agreement"]
    head += ["loss, nats a token", "loss minus dense", "perplexity"] if texts else []
    what = (read_by_all(run) or "dense's reply") + " is"
    note = (
        f"KL(dense || method) of next-token distributions, and how often both have one likeliest token, where {what}"
        " read through each method's cache. 95% bootstrap intervals; loss differences are paired by sample."
    )
    counts = [f"{c['method']} {c['compared_non_finite']} of {c['compared']}" for c in cells if c["compared_non_finite"]]
    if counts:
        note += (f" {BROKEN} Logits of the method or of dense were NaN or infinite; such samples are left out of these"
                 f" means ({', '.join(counts)}).")  # fmt: skip
    return Table.of("Distance from dense", head, lines, note)


def best_of_sizes(run: Run) -> Table | None:
    """Make a table of the best methods whose middle fits each of `BUDGETS`; None without two sizes among methods."""
    cells = pd.DataFrame(run["overall"])
    cells = cells[cells["share_of_middle"].notna()]
    if cells["share_of_middle"].round().nunique() < 2:
        return None
    lines = []
    for budget in BUDGETS:
        fit, line = cells[cells["share_of_middle"] <= budget + 0.5], [f"{budget}%"]
        for name, form, best in (("kl", ".3g", "idxmin"), ("score", ".1f", "idxmax")):
            found = fit[name].astype(float).dropna()
            cell = fit.loc[getattr(found, best)()] if len(found) else None
            what = ["", ""] if cell is None else [f"{cell[name]:{form}}", f"{cell['share_of_middle']:.0f}%"]
            line += ["-" if cell is None else cell["method"], *what]
        lines.append(line)
    head = ["bytes of the middle", "lowest KL", "KL, nats a token", "its bytes", "highest score", "score", "its bytes "]
    note = (
        "Of the methods that hold so much of dense's middle or less: scales and bounds count, tables and slack do not."
    )
    return Table.of("Best at every size", head, lines, note)


def _grid(
    methods: Iterable[str], columns: Sequence[object], cells: Mapping[tuple[str, object], Record],
    write: Callable[[Record], str],
) -> tuple[list[list[str]], Shades]:  # fmt: skip
    """Return a line per method with the text of its cell in each column, and the shades of the cells."""
    lines: list[list[str]] = []
    shades: Shades = {}
    for number, method in enumerate(methods):
        mine = [cells.get((method, column)) for column in columns]
        lines.append([method, *("" if cell is None else write(cell) for cell in mine)])
        shades |= {(number, at): cell.get("difference") for at, cell in enumerate(mine, 1) if cell is not None}
    return lines, shades


def from_dense_by_length(run: Run) -> Table | None:
    """Make a table of KL and top-1 agreement by length; None without several lengths."""
    cells = {(c["method"], c["length"]): c for c in run["by_length"] if c["compared"] and c["length"] is not None}
    lengths = [n for n in run["lengths"] if any(length == n for _, length in cells)]
    if len(lengths) < 2:
        return None

    def short(cell: Record) -> str:
        share = "" if cell["top1"] is None else f" ({cell['top1']:.1f}%)"
        kl = "-" if cell["kl"] is None else f"{cell['kl']:.3g}"
        return kl + (BROKEN if cell["compared_non_finite"] else "") + share

    lines, _ = _grid(dict.fromkeys(method for method, _ in cells), lengths, cells, short)
    note = "KL in nats a token, and top-1 agreement."
    return Table.of("Distance from dense by length", ["method", *map(str, lengths)], lines, note)


def differences(run: Run) -> Table | None:
    """Compare learned masks, or methods named (columns), with every other (lines); None if dense is the only other."""
    found = {(d["minus"], d["method"]): d for d in run["differences"]}
    columns = list(dict.fromkeys(method for _, method in found))
    others = [name for name in run["methods"] if any(minus == name for minus, _ in found)]
    if set(others) <= {run["dense"]}:
        return None
    lines, shades = _grid(others, columns, found, difference)
    note = (
        "Points by which a column's method is better than a line's method on the samples of both: 95% paired bootstrap."
    )
    title = "Learned masks" if set(columns) <= set(learned(run["methods"])) else "Methods"
    return Table.of(f"{title} minus other methods", ["minus", *columns], lines, note, shades)


def _published(
    run: Run, by: str, columns: Sequence[str], digits: int = 1, last: bool = True, **where: str | int | None
) -> tuple[list[list[str]], list[str]]:
    """Return lines with the papers' figures for these columns and, if `last`, their average; and the errata."""
    lines, errata = [], []
    for found in published.find(run["benchmark"], by, run["model"], **where):
        if any(found.scores.get(c) is not None for c in columns) or by == "average":
            texts = [number(found.scores.get(c), digits) for c in columns]
            lines.append([found.label, *texts, *([number(found.average, digits)] if last else [])])
            errata += [e for e in found.errata if e not in errata]
    return lines, errata


def by_length(run: Run) -> Table | None:
    """Make a table of methods by lengths, as in LeanK's table 3."""
    lengths = [n for n in run["lengths"] if n is not None]
    if not lengths:
        return None
    cells = {(c["method"], c.get("length", "average")): c for c in (*run["by_length"], *run["overall"])}
    head = [*lengths, "average"]
    lines, shades = _grid([c["method"] for c in run["overall"]], head, cells, mean)
    names = [PAPER_LENGTHS.get(n, "") for n in lengths]
    printed, notes = _published(run, "length", names)
    more, errata = _published(run, "average", names)
    notes += [*errata, *remarks(c for c in run["by_length"] if c["length"] is not None)]
    return Table.of("By length", ["method", *map(str, head)], lines, " ".join(notes), shades, [*printed, *more])


def by_task(run: Run, length: int | None) -> Table:
    """Make a table of methods by tasks at one length, as in LeanK's tables 2, 13 and 18."""
    of_tasks, whole = ([c for c in run[name] if c["length"] == length] for name in ("cells", "by_length"))
    tasks = [task for task in run["tasks"] if any(task == c["task"] for c in of_tasks)]
    cells = {(c["method"], c.get("task", "average")): c for c in (*of_tasks, *whole)}
    head = [*tasks, "average"]
    lines, shades = _grid([c["method"] for c in whole], head, cells, lambda c: scored(c) if "task" in c else mean(c))
    printed, notes = _published(run, "task", tasks, length=length)
    if run["benchmark"] == "ruler" and length is not None and length < 4096:
        notes.append(
            "Below 4096 tokens RULER changes its tasks; this is no official setting: they are its 4096-token forms."
        )
    notes += remarks(of_tasks)
    title = "All tasks" if length is None else f"{length} tokens"
    return Table.of(title, ["method", *head], lines, " ".join(notes), shades, printed)


def gsm(run: Run) -> list[Table]:
    """Make tables of GSM-Infinite: fractions by op with the area under them (table 14), and all areas (table 4)."""
    out: list[Table] = []
    names = list(dict.fromkeys(record["subset"] for record in run["by_op"]))
    areas: dict[str, dict[str, float | None]] = {method: {} for method in run["methods"]}
    for name in names:
        cells = {(c["method"], c["op"]): c for c in run["by_op"] if c["subset"] == name}
        ops = sorted({op for _, op in cells})
        methods = [method for method in areas if any(method == one for one, _ in cells)]
        lines, _ = _grid(methods, ops, cells, lambda c: number(c["score"], 4))
        for line in lines:
            scores = {op: cells[line[0], op]["score"] for op in ops if (line[0], op) in cells}
            area = areas[line[0]][name] = auc(scores) if len(scores) > 1 else None
            line[1:] = [text or "-" for text in line[1:]] + [number(area, 4)]
        subset, _, length = name.partition(" ")
        printed, _ = _published(run, "op", list(map(str, ops)), 4, subset=subset, length=length)
        head = ["method", *(f"op={op}" for op in ops), "AUC"]
        out.append(Table.of(f"GSM-Infinite {name}", head, lines, published=printed))
    if out:
        lines = [[m, *(number(a.get(n), 2) for n in names)] for m, a in areas.items()]
        printed, errata = _published(run, "subset", names, 2, last=False)
        out.insert(0, Table.of("GSM-Infinite, AUC", ["method", *names], lines, " ".join(errata), published=printed))
    return out


def turns(run: Run) -> list[Table]:
    """Make a table of methods by turn for conversations of each mode and length."""
    out = []
    for mode, length in dict.fromkeys((record["mode"], record["length"]) for record in run["by_turn"]):
        cells = {(c["method"], c["turn"]): c for c in run["by_turn"] if (c["mode"], c["length"]) == (mode, length)}
        numbers = sorted({turn for _, turn in cells})
        lines, _ = _grid(dict.fromkeys(m for m, _ in cells), numbers, cells, lambda c: with_interval(c, "score"))
        size = "" if length is None else f", {length} tokens"
        head = ["method", *(f"turn {n:.0f}" for n in numbers)]
        out.append(Table.of(f"By turn{size}: {TURNS.get(mode, mode)}", head, lines))
    return out


def distances_lead(run: Run) -> bool:
    """Whether a report begins with the distance from dense: where all methods read the same, and KL was measured."""
    return bool(read_by_all(run)) and any(cell["compared"] for cell in run["overall"])


def tables(run: Run) -> list[Table]:
    """Make all tables of one run of a summary."""
    lengths = by_length(run)
    alike = lengths is not None and len(run["tasks"]) == 1  # a table of tasks at each length would repeat it
    found = [overall(run), best_of_sizes(run), from_dense(run), from_dense_by_length(run), differences(run), lengths]
    if distances_lead(run):
        found = [along(run), found[2], found[3], found[1], found[0], *found[4:]]
    found[1:1] = [sampled(run), replies(run)]
    found += [*turns(run), *gsm(run), *([] if alike else [by_task(run, n) for n in run["lengths"]])]
    return [table for table in found if table is not None]
