"""One Markdown page of items: verdicts, then what was made of each beside the figures that the paper prints."""

import os
from collections.abc import Sequence
from pathlib import Path

from leank.eval import published
from leank.eval.papers.item import Item
from leank.eval.papers.make import Made
from leank.eval.report.tables import Table, by_length, number, overall

WORDS = {"shows": "shows", "contradicts": "contradicted", "undecided": "not decided"}


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
        found.append(Table.of(title, head, lines, " ".join(table["errata"])))
    return found


def commands(item: Item) -> list[str]:
    """Return what makes an item: what each command needs, and the command."""
    lines = [f"with the reference model:\n\n    python -m leank.eval.papers {item.id}"] if item.runs else []
    for step in dict.fromkeys(step for step in (*item.here, *item.real) if step in item.real or not step.runs):
        needs = f"with {item.needs}" if step.runs else f"needs {step.needs}" if step.needs else "training"
        lines.append(f"{needs}:\n\n    python -m {step.run}")
    return lines


def verdicts(everything: Sequence[Made]) -> Table:
    """Return the table of verdicts; a comparison that items share stands once."""
    lines = {
        one.sentence: [made.item.id, one.compared, one.figures,
                       WORDS[one.verdict] + (f" ({said})" if (said := "; ".join(filter(None, [one.why, *one.remarks])))
                                             else "")]
        for made in reversed(everything) for one in made.judgements
    }  # fmt: skip
    ordered = [lines.pop(one.sentence) for made in everything for one in made.judgements if one.sentence in lines]
    return Table.of("Verdicts", ["item", "what is compared, and the claim", "here, 95% interval", "verdict"], ordered)


def of_item(made: Made, folder: Path) -> str:
    """Write an item with what is there of it. folder: of the page, from which its pictures are linked."""
    item, state = made.item, made.item.status
    parts = [f"## {item.id}: {published.PAPERS[item.paper]}, {item.number}", item.shows]
    parts += [f"The paper: {item.claim}"] if item.claim else []
    parts += [one.sentence for one in made.judgements]
    parts += [f"Failed: {error}" for error in made.failed]
    parts += [f"![{path.parent.name}]({os.path.relpath(path, folder)})" for path in made.pictures]
    for run in made.runs:
        parts += [table.markdown() for table in (overall(run), by_length(run)) if table is not None]
    if not made.runs and not made.pictures:
        parts.append("Not made yet." if item.runs else f"{state[0].upper()}{state[1:]}.")
        parts += commands(item)
    parts += [table.markdown() for table in published_tables(item)]
    parts += [item.note] if item.note else []
    return "\n\n".join([parts[0], *(f"#{part}" if part.startswith("## ") else part for part in parts[1:])])


def page(everything: Sequence[Made], folder: Path, quick: bool) -> str:
    """Write the page of all items."""
    about = (
        f"{len(everything)} items. Intervals are 95% bootstrap intervals: of two methods over the samples that both "
        "have, paired; of an analysis over its samples, layers, heads or pairs of tasks. Of methods that do not "
        "differ, about one comparison in twenty says that they do."
    )
    about += " This is the quick form, with few samples." if quick else ""
    parts = ["# Figures and tables of five papers", about, verdicts(everything).markdown()]
    return "\n\n".join([*parts, *(of_item(made, folder) for made in everything)]) + "\n"
