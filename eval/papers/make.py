"""Run the command lines of items one after the other in one folder, and read what they leave.

Replays append their rows to OUT/rows, which all items share; an analysis has a folder of its own below OUT/analyses.
What is there is not made again.
"""

import hashlib
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from leank.eval.inference.models import load_model
from leank.eval.papers.item import OUT, Contrast, Item
from leank.eval.papers.judge import Judgement, contrast, expect
from leank.eval.report.groups import frame, group
from leank.eval.report.summary import Run, summarise_groups
from leank.eval.rows import GLOB, Key, Results, key_of, read
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
