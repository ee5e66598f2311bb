"""Run the command lines of items one after the other in one folder, and read what they leave.

Replays append their rows to OUT/rows, which all items share; an analysis has a folder of its own below OUT/analyses.
What is there is not made again.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from leank.eval.inference.models import load_config, load_model
from leank.eval.papers.item import Analysed, Contrast, EvalRun, Item, Measurement, Step
from leank.eval.papers.judge import Judgement, contrast, expect
from leank.eval.papers.registry import makes
from leank.eval.report.summary import Run, summarise
from leank.eval.rows.result_row import ResultRow
from leank.eval.rows.results import GLOB, Key, Results, key_of, read
from leank.eval.run.build import build_job
from leank.eval.run.job import Job

FAILURES = (ValueError, FileNotFoundError, MemoryError)  # of one command; the others go on
log = logging.getLogger("eval")


@dataclass(frozen=True)
class Options:
    """How items are made.

    quick: fewer samples and shorter prompts.
    real: with the paper's models, settings and data instead of the reference model.
    overrides: of python -m eval, after those of the item.
    """

    quick: bool = False
    real: bool = False
    overrides: tuple[str, ...] = ()

    def steps(self, item: Item) -> tuple[Step, ...]:
        """Return what is to be run for an item, without what another command makes."""
        return tuple(step for step in (item.real if self.real else item.here) if makes(step))

    def replay(self, step: EvalRun) -> tuple[str, ...]:
        """Return the overrides of a replay."""
        return (*step.overrides, *(step.quick if self.quick else ()), *self.overrides)

    def analysis(self, step: Analysed) -> tuple[str, ...]:
        """Return the arguments of an analysis, whose model and mask alone the overrides choose."""
        own = [one for one in self.overrides if one.startswith(("model", "mask"))]
        return step.arguments(self.quick) + tuple(own)


@dataclass(frozen=True)
class Made:
    """An item with what its commands gave: rows of replays, rows of analyses, and the pictures of the latter.

    failed: what its commands said that failed.
    alone: whether no other process made rows, so that seconds are of a machine that was not shared.
    """

    item: Item
    rows: Sequence[ResultRow] = ()
    measured: Sequence[Measurement] = ()
    pictures: Sequence[Path] = ()
    failed: Sequence[str] = ()
    alone: bool = True

    @cached_property
    def runs(self) -> list[Run]:
        """The tables' numbers: a run for all rows that differ in the method alone."""
        return summarise(self.rows)["runs"] if self.rows else []

    @cached_property
    def judgements(self) -> list[Judgement]:
        """What every claim comes to, of those on which something is there."""
        found = [
            contrast(claim, self.rows, self.alone) if isinstance(claim, Contrast) else expect(claim, self.measured)
            for claim in self.item.claims
        ]
        return [one for one in found if one.verdict != "not compared"]


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration of python -m eval. Raises ValueError naming what Hydra refuses."""
    try:
        with initialize_config_module("leank.conf.eval", version_base="1.3"):
            config = OmegaConf.to_container(compose("eval", overrides=list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def keys_of(job: Job) -> list[Key]:
    """Return the keys that the rows of a job have, whether or not they are there, in its own order."""
    keys = []
    for cell in job.benchmark.cells():
        ids = [row for sample in cell.samples for row in cell.ids(sample)]
        for method in job.by_cell.get(cell, job.methods):
            either = (job.keys(method, cell, ids, how) for how in (None, job.settings.specials))
            keys += [key for row in zip(*either, strict=True) for key in row]
    return keys


@dataclass
class Runner:
    """Runs commands into a folder; items that share a command share what it gives."""

    out: Path
    options: Options
    _jobs: dict[tuple[str, ...], Job] = field(default_factory=dict)
    _failed: dict[tuple[str, ...], str] = field(default_factory=dict)
    _model: tuple[str, Any] = ("", None)

    def make(self, items: Sequence[Item]) -> list[Made]:
        """Run what is missing of these items. Returns what is there of each; a command that fails stops no other."""
        for item in items:
            for step in self.options.steps(item):
                if (line := self._line(step)) not in self._failed and line not in self._jobs:
                    log.info("%s: %s", item.id, " ".join(line))
                    try:
                        self._replay(line) if isinstance(step, EvalRun) else self._analyse(line)
                    except FAILURES as error:
                        self._failed[line] = str(error)
        folder = self.out / "rows"
        stored = {key_of(row): row for row in read(folder)} if any(folder.glob(GLOB)) else {}
        alone = not any(folder.glob("results-*.jsonl"))
        return [self._made(item, stored, alone) for item in items]

    def _line(self, step: Step) -> tuple[str, ...]:
        """Return the command line of a step, without the interpreter and the folder."""
        if isinstance(step, EvalRun):
            return ("eval", *self.options.replay(step))
        assert isinstance(step, Analysed)
        return (step.name, *self.options.analysis(step))

    def _replay(self, line: tuple[str, ...]) -> None:
        job, _ = build_job(composed(line[1:]))
        shard, shards = job.settings.numbered_shard
        with Results(self.out / "rows", f"-{shard}-of-{shards}" if shards > 1 else "", folder="--out") as results:
            if job.missing(results.keys):
                if self._model[0] != repr(job.model):
                    self._model = ("", None)  # one model at a time
                    self._model = (repr(job.model), (load_model(job.model), load_config(job.model)[1]))
                job.run(results, *self._model[1])
        self._jobs[line] = job

    def _folder(self, line: tuple[str, ...]) -> Path:
        """Return the folder of an analysis: another one for other settings, another model or another mask."""
        return self.out / "analyses" / f"{line[0]}-{hashlib.sha256(repr(line).encode()).hexdigest()[:10]}"

    def _analyse(self, line: tuple[str, ...]) -> None:
        folder = self._folder(line)
        if (folder / "figure.png").is_file():  # which is written last
            return
        command = [sys.executable, "-m", "scripts.analyses", line[0], str(folder), *line[1:]]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])

    def _made(self, item: Item, stored: dict[Key, ResultRow], alone: bool) -> Made:
        rows: dict[Key, ResultRow] = {}
        measured: list[Measurement] = []
        pictures, failed = [], []
        for step in self.options.steps(item):
            line = self._line(step)
            if line in self._failed:
                failed.append(self._failed[line])
            elif isinstance(step, EvalRun):
                rows |= {key: stored[key] for key in keys_of(self._jobs[line]) if key in stored}
            else:
                table = pd.read_csv(self._folder(line) / "rows.csv")
                measured += [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
                pictures.append(self._folder(line) / "figure.png")
        return Made(item, [*rows.values()], measured, pictures, failed, alone)
