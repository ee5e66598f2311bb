"""report.html: one file that needs no other, light or dark as the reader's system is."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from leank.data_gen.amount import amount
from leank.eval.report.fidelity import is_text
from leank.eval.report.groups import Pair, by_label, changed
from leank.eval.report.records import RunSummary, Summary
from leank.eval.report.table import ReportTable
from leank.eval.report.tables import tables
from leank.eval.rows.result_row import ResultRow

SHOWN = 40  # replies listed per method, of those that differ from dense

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1e23; --soft: #5d6570; --line: #d9dde3; --band: #f4f6f8;
  --worse: 214 60 50; --better: 20 140 90; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #9aa3ae; --line: #343a42;
  --band: #1d2126; --worse: 240 100 90; --better: 70 190 130; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 2rem 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem; max-width: 60rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
tr.published td { color: var(--soft); font-style: italic; }
figure { margin: 1rem 0; max-width: 52rem; } figure svg { width: 100%; height: auto; color: var(--text); }
@media (max-width: 40rem) { figure svg { min-width: 36rem; } }
.inner { padding-left: 1.2rem; }
details { border-top: 1px solid var(--line); padding: .4rem 0; } summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; font-size: .86rem;
  padding: .5rem .7rem; background: var(--band); }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { background: var(--band); padding: .7rem; overflow-x: auto; font-size: .8rem; }
"""


def _td(text: str, shade: float | None) -> str:
    """Make a cell. shade: points from dense, which colour it."""
    if not shade:
        return f"<td>{html.escape(text)}</td>"
    kind, strength = ("better" if shade > 0 else "worse"), min(0.55, abs(shade) / 60)
    return f'<td style="background:rgb(var(--{kind}) / {strength:.2f})">{html.escape(text)}</td>'


def to_table(table: ReportTable) -> str:
    """Make a table of HTML; a wide one scrolls while its first column stays."""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in table.head)
    body = ""
    for line in table.lines:
        shades = [*line.shade, *[None] * (len(line.cells) - len(line.shade))]
        cells = "".join(_td(text, shade) for text, shade in zip(line.cells, shades, strict=True))
        body += f"<tr{' class=published' if line.published else ''}>{cells}</tr>"
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<h2>{html.escape(table.title)}</h2><div class=wide><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def listing(pairs: Sequence[Pair], names: tuple[str, str]) -> str:
    """Fold samples with both replies into a list. pairs: rows of the first and of the second method in `names`."""
    parts = []
    for first, second in pairs:
        length = "" if first["length"] is None else f", {first['length']} tokens"
        head = html.escape(f"{first['task']}{length}, sample {first['sample']}")
        scores = f"{100 * first['score']:.0f} &rarr; {100 * second['score']:.0f}"
        fields = [("answers", ", ".join(map(str, first["answers"]))), (names[0], first["prediction"]),
                  (names[1], second["prediction"])]  # fmt: skip
        terms = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v) or '&nbsp;'}</dd>" for k, v in fields)
        parts.append(f"<details><summary>{head}: {scores}</summary><dl>{terms}</dl></details>")
    return "".join(parts)


def _replies(rows: Sequence[ResultRow], run: RunSummary) -> str:
    """List the replies of each method that differ from dense."""
    parts, dense = [], run["dense"]
    if dense is None:
        return ""
    methods = by_label(rows)
    for method in run["methods"]:
        pairs = changed(methods, dense, method)
        if pairs:
            more = f" ({SHOWN} shown, largest loss first)" if len(pairs) > SHOWN else ""
            of = amount(len(pairs), "reply")
            head = f"{html.escape(method)}: {of} other than {html.escape(dense)}'s{more}"
            inner = listing(pairs[:SHOWN], (dense, method))
            parts.append(f"<details><summary>{head}</summary><div class=inner>{inner}</div></details>")
    return "<h2>Replies</h2>" + "".join(parts) if parts else ""


def title(run: RunSummary | ResultRow) -> str:
    """Name a run in words."""
    how = "read through the cache" if is_text(run) else f"compressed {run['compress'].replace('_', ' the ')}"
    return f"{run['benchmark']} on {run['model']}, {how}"


def page(name: str, body: str) -> str:
    """Make a whole page that needs no other file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def figure(caption: str, drawing: str) -> str:
    """Put a caption below an SVG."""
    return f"<figure><div class=wide>{drawing}</div><figcaption>{html.escape(caption)}</figcaption></figure>"


def to_html(
    summary: Summary,
    groups: Iterable[Sequence[ResultRow]],
    figures: Sequence[Sequence[tuple[str, str]]],
) -> str:
    """Make the page of a report.

    groups: the rows of each run.
    figures: (caption, SVG) of each run.
    """
    parts = []
    for run, rows, drawn in zip(summary["runs"], groups, figures, strict=True):
        few = min((c["n"] for c in run["cells"]), default=0)
        warn = f" The smallest cell has {amount(few, 'sample')}: its interval says little." if few < 10 else ""
        parts.append(f"<h1>{html.escape(title(run))}</h1><p>{amount(run['rows'], 'row')}; tasks count alike.{warn}</p>")
        made = [to_table(t) for t in tables(run)]
        parts += [made[0], *(figure(caption, svg) for caption, svg in drawn), *made[1:]]
        parts.append(_replies(rows, run))
        about = {"settings": run["settings"], "methods": run["methods"], "versions": run["versions"]}
        parts.append(f"<h2>Settings</h2><pre>{html.escape(json.dumps(about, indent=1))}</pre>")
    return page(title(summary["runs"][0]), "".join(parts))
