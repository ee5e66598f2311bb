"""What is shown of items: Markdown for the terminal and for files, and one HTML page beside the printed figures."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import replace

from leank.data_gen.amount import amount
from leank.eval import published
from leank.eval.papers.item import Command, EvalRun, Item
from leank.eval.papers.judge import Judgement
from leank.eval.papers.make import Made
from leank.eval.papers.registry import runs, status
from leank.eval.papers.verdicts import headlines
from leank.eval.report import plots, style
from leank.eval.report.page import Section, page, to_figure, to_table
from leank.eval.report.tables import Table, by_length, number, overall

SHARED = "Processes that shared the machine took the milliseconds (--jobs): they compare nothing."
LONG = 14  # lines above which a table is folded
DRAWN = ("accuracy_by_length", "accuracy_against_bytes")  # of eval.report.plots.FIGURES
LAYOUT = """
nav { columns: 22rem; font-size: .86rem; } nav a { display: block; color: inherit; text-decoration: none;
  padding: .1rem 0; } nav a:hover { text-decoration: underline; }
article { border-top: 1px solid var(--line); margin-top: 2.5rem; } article h2 { font-size: 1.2rem; }
article h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; } .sides { display: grid; gap: 0 2rem; }
.sides > * { min-width: 0; } @media (min-width: 90rem) { body { max-width: 110rem; } .both { grid-template-columns:
  1fr 1fr; } }
.verdict { padding: .4rem .7rem; background: var(--band); color: var(--text); border-left: 4px solid var(--line); }
.shows { border-color: rgb(var(--better)); } .contradicts { border-color: rgb(var(--worse)); }
code { font-size: .86rem; overflow-wrap: anywhere; }
.claims th, .claims td { text-align: left; white-space: normal; min-width: 5rem; overflow-wrap: anywhere; }
.claims td:first-child { white-space: nowrap; }
@media (max-width: 40rem) { .claims thead { display: none; } .claims tr { display: block; padding: .4rem 0;
  border-bottom: 1px solid var(--line); } .claims td { display: block; padding: 0; border: 0; background: none; } }
"""


def published_tables(item: Item) -> list[Table]:
    """Return the paper's own figures for an item, where eval/published has them."""
    found = []
    for name in item.tables:
        table = published.tables(item.paper)[name]
        extra = [key for key in ("length", "subset") if any(key in row for row in table["rows"])]
        columns = table["columns"] if table["by"] != "average" else []
        lines = [
            [row["model"], row["method"], *(str(row.get(key, "")) for key in extra),
             *(number(score, 2) for score in row["scores"][: len(columns)]), number(row["average"], 2)]
            for row in table["rows"]
        ]  # fmt: skip
        head = ["model", "method", *extra, *columns, "average"]
        title = f"{published.PAPERS[item.paper]}, table {name}: {table['title']} (published)"
        found.append(Table.of(title, head, [], " ".join(table["errata"]), published=lines))
    return found


def our_tables(made: Made) -> list[Table]:
    """Return the tables of an item's replays."""
    found = []
    for run in made.runs:
        table = overall(run)
        found.append(table if made.alone else replace(table, note=f"{table.note} {SHARED}".strip()))
        lengths = by_length(run)
        if lengths is not None and len(run["lengths"]) > 1:
            found.append(lengths)
    return found


def commands(item: Item) -> list[tuple[str, str]]:
    """Return (what it makes, the command line) for everything that makes an item."""
    lines = [("with the reference model", f"python -m eval.papers {item.id}")] if runs(item) else []
    lines += [(f"needs {s.needs}" if s.needs else "training", s.line) for s in item.here if isinstance(s, Command)]
    if any(not isinstance(step, Command) for step in item.real):
        lines.append((f"with {item.needs}", f"python -m eval.papers {item.id} --real"))
    lines += [(f"the same, {step.overrides[0].partition('=')[2]}", step.command)
              for step in item.real if isinstance(step, EvalRun)]  # fmt: skip
    lines += [(f"needs {s.needs}", s.line) for s in item.real if isinstance(s, Command) and s not in item.here]
    return lines


def as_markdown(made: Made) -> str:
    """Write an item with what is there of it."""
    item = made.item
    parts = [f"# {item.id}: {item.shows}"]
    if item.claim:
        parts.append(f"The paper: {item.claim}")
    parts += [one.sentence for one in made.judgements]
    parts += [item.note] if item.note else []
    parts += [table.markdown() for table in our_tables(made)]
    if not made.rows and not made.measured:
        parts.append(_not_there(item))
        parts += [f"{what}:\n\n    {line}" for what, line in commands(item)]
    return "\n\n".join(parts) + "\n"


def as_html(everything: Sequence[Made], quick: bool) -> str:
    """Make the page of all items."""
    named: dict[str, tuple[Made, Judgement]] = {}  # items that share a comparison name it once
    for made in everything:
        for one in made.judgements:
            named.setdefault(one.sentence, (made, one))
    verdicts = [*named.values()]
    counts = {kind: sum(one.verdict == kind for _, one in verdicts) for kind in ("shows", "undecided", "contradicts")}
    parts = [
        f"<p>{len(everything)} items. Verdicts of {amount(len(verdicts), 'comparison')} made here: {counts['shows']} "
        f"for the paper's claim, {counts['contradicts']} against it, {counts['undecided']} undecided. Intervals are "
        "95% bootstrap intervals: of two methods over the samples that both have, paired; of an analysis over its "
        "samples, layers, heads or pairs of tasks. Of methods that do not differ, about one comparison in twenty says "
        "they do."
        + (" This is the quick form, with few samples." if quick else "") + "</p>",
        *(to_table(table).replace("<table>", '<table class="claims">') for table in headlines(everything)),
        _contradictions(verdicts),
        "<nav>" + "".join(_link(made) for made in everything) + "</nav>",
        *(_article(made) for made in everything),
    ]  # fmt: skip
    whole = page(
        "Figures and tables of five papers", [Section("Figures and tables of five papers", body="".join(parts))]
    )
    return whole.replace("</style>", f"{LAYOUT}</style>", 1)


def _not_there(item: Item) -> str:
    """Say why there is nothing to show of an item; names keep their capitals."""
    state = status(item)
    return "Not made yet." if runs(item) else f"{state[0].upper()}{state[1:]}."


def _link(made: Made) -> str:
    item = made.item
    return f'<a href="#{_anchor(item)}"><b>{item.id}</b> {html.escape(item.shows)}</a>'


def _anchor(item: Item) -> str:
    return item.id.replace(":", "-")


def _contradictions(verdicts: Iterable[tuple[Made, Judgement]]) -> str:
    lines = [
        f'<li><a href="#{_anchor(made.item)}">{made.item.id}</a>: {html.escape(one.sentence)}</li>'
        for made, one in verdicts
        if one.verdict == "contradicts"
    ]
    return f"<h2>What contradicts a paper</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _article(made: Made) -> str:
    """Make the part of one item: claim, verdicts, what is made here beside what is printed, commands."""
    item = made.item
    name = f"{published.PAPERS[item.paper]}, {item.number}"
    parts = [f'<article id="{_anchor(item)}"><h2>{name}</h2><p>{html.escape(item.shows)}</p>']
    if item.claim:
        parts.append(f"<p>The paper: {html.escape(item.claim)}</p>")
    parts += [f'<p class="verdict {one.verdict}">{html.escape(one.sentence)}</p>' for one in made.judgements]
    ours = _drawings(made) + "".join(map(_small, our_tables(made)))
    theirs = "".join(map(_small, published_tables(item)))
    if not ours:
        ours = f"<p>{html.escape(_not_there(item))}</p>"
    elif not made.whole:
        ours += "<p>Some of it is not made yet.</p>"
    both = " both" if theirs else ""
    parts.append(f'<div class="sides{both}"><div>{ours}</div>' + (f"<div>{theirs}</div>" if theirs else "") + "</div>")
    if item.note:
        parts.append(f"<p>{html.escape(item.note)}</p>")
    lines = "".join(f"<dt>{html.escape(what)}</dt><dd><code>{html.escape(line)}</code></dd>"
                    for what, line in commands(item))  # fmt: skip
    parts.append(f"<details><summary>Commands</summary><dl>{lines}</dl></details></article>" if lines else "</article>")
    return "".join(parts)


def _small(table: Table) -> str:
    """Make a table under a small heading; a long one is folded."""
    made = to_table(table).replace("<h2>", "<h3>").replace("</h2>", "</h3>")
    if len(table.cells) <= LONG:
        return made
    return f"<details><summary>{html.escape(table.title)}: {len(table.cells)} lines</summary>{made}</details>"


def _drawings(made: Made) -> str:
    """Draw an item's analyses, and a figure's replays."""
    parts = [
        to_figure(one.analysis.__doc__.splitlines()[0] if one.analysis.__doc__ else "",
               style.svg(one.analysis.plot(one.rows), f"{_anchor(made.item)}-{number}"))
        for number, one in enumerate(made.measured)
    ]  # fmt: skip
    if made.item.number.startswith("figure"):
        for place, run in enumerate(made.runs):
            for name in DRAWN:
                drawn = plots.draw(name, run)
                if drawn is not None:
                    salt = f"{_anchor(made.item)}-{name}-{place}"
                    parts.append(to_figure(plots.FIGURES[name][0], style.svg(drawn, salt)))
    return "".join(parts)
