"""Run the command lines of items one after the other in one folder, and make one Markdown page of what they leave.

Replays append their rows to OUT/rows, which all items share; an analysis has a folder of its own below OUT/analyses.
What is there is not made again.
"""

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from leank.eval import published
from leank.eval.inference.models import load_model
from leank.eval.papers.item import OUT, Contrast, Item
from leank.eval.papers.judge import Judgement, contrast, expect
from leank.eval.report.groups import frame, group
from leank.eval.report.summary import Run, summarise_groups
from leank.eval.report.tables import Table, by_length, number, overall
from leank.eval.rows import GLOB, Key, Results, key_of, read
from leank.eval.run import devices
from leank.eval.run.build import build_job, composed

FAILURES = (ValueError, FileNotFoundError, MemoryError)  # of one command; the others go on
log = logging.getLogger("eval")


@dataclass(frozen=True)
class Made:
    """An item with what its commands gave."""

    item: Item
    judgements: Sequence[Judgement] = ()  # what every check comes to, of those on which something is there
    runs: Sequence[Run] = ()  # numbers of the tables, a run for all rows that differ in the method alone
    pictures: Sequence[Path] = ()  # of analyses
    failed: Sequence[str] = ()  # what its commands said that failed


@dataclass
class Runner:
    """Runs commands into a folder; items that share a command share what it gives."""

    out: Path  # the folder
    quick: bool = False  # whether few samples and short prompts will do
    real: bool = False  # whether the paper's models, settings and data are taken instead of the reference model
    overrides: tuple[str, ...] = ()  # of python -m leank.eval, after those of the item
    _keys: dict[tuple[str, ...], list[Key]] = field(default_factory=dict)
    _failed: dict[tuple[str, ...], str] = field(default_factory=dict)
    _model: tuple[str, Any] = ("", None)

    def make(self, items: Sequence[Item]) -> list[Made]:
        """Run what is missing of these items. Returns what is there of each; a command that fails stops no other."""
        for item in items:
            for line in self._lines(item):
                if line not in self._failed and line not in self._keys:
                    log.info("%s: %s", item.id, " ".join(line))
                    try:
                        self._keys[line] = self._analyse(line) if OUT in line else self._replay(line)
                    except FAILURES as error:
                        self._failed[line] = str(error)
        folder = self.out / "rows"
        stored = {key_of(row): row for row in read(folder)} if any(folder.glob(GLOB)) else {}
        return [self._made(item, stored) for item in items]

    def _lines(self, item: Item) -> list[tuple[str, ...]]:
        steps = item.real if self.real else item.here
        return [step.line(self.quick, self.overrides) for step in steps if step.runs]

    def _replay(self, line: tuple[str, ...]) -> list[Key]:
        job, tokenizer = build_job(composed(line[1:]))
        if job.settings.devices > 1:
            devices.replay(job, tokenizer, self.out / "rows")
            return job.all_keys()
        shard, shards = job.settings.numbered_shard
        with Results(self.out / "rows", f"-{shard}-of-{shards}" if shards > 1 else "", folder="--out") as results:
            if job.missing(results.keys):
                if self._model[0] != repr(job.model):
                    self._model = ("", None)  # one model at a time
                    self._model = (repr(job.model), load_model(job.model))
                job.run(results, self._model[1], tokenizer)
        return job.all_keys()

    def _folder(self, line: tuple[str, ...]) -> Path:
        """Return the folder of an analysis: another one for other settings, another model or another mask."""
        return self.out / "analyses" / f"{line[1]}-{hashlib.sha256(repr(line).encode()).hexdigest()[:10]}"

    def _analyse(self, line: tuple[str, ...]) -> list[Key]:
        folder = self._folder(line)
        if not (folder / "figure.png").is_file():  # which is written last
            words = [str(folder) if word == OUT else word for word in line]
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
            if done.returncode:
                raise ValueError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
        return []

    def _made(self, item: Item, stored: dict[Key, Any]) -> Made:
        lines = self._lines(item)
        rows = {key: stored[key] for line in lines for key in self._keys.get(line, ()) if key in stored}
        folders = [self._folder(line) for line in lines if OUT in line and line in self._keys]
        groups = group(rows.values())
        tables = [frame(some) for some in groups]
        measured = pd.concat([pd.read_csv(folder / "rows.csv") for folder in folders] or [pd.DataFrame({"value": []})])
        judged = [
            contrast(check, tables) if isinstance(check, Contrast) else expect(check, measured) for check in item.checks
        ]
        return Made(
            item,
            [one for one in judged if one is not None],
            summarise_groups(groups)["runs"],
            [folder / "figure.png" for folder in folders],
            [self._failed[line] for line in lines if line in self._failed],
        )


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
