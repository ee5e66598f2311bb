"""Make items: replays append their rows to one folder that all items share, an analysis writes its rows at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.papers.analyses import Analysis
from leank.eval.papers.item import Analysed, Contrast, EvalRun, Item, Measurement, Step
from leank.eval.papers.judge import Judgement, contrast, expect
from leank.eval.papers.portions import Portion, portions
from leank.eval.papers.side_by_side import one_by_one, side_by_side
from leank.eval.papers.steps import Options, ResolvedStep, keys_of
from leank.eval.report.summary import Run, summarise
from leank.eval.rows.result_row import ResultRow
from leank.eval.rows.results import GLOB, Key, Results, key_of, read
from leank.files import write_json


@dataclass(frozen=True)
class Measured:
    """Rows of one analysis, and the analysis, which draws them."""

    analysis: Analysis
    rows: list[Measurement]


@dataclass(frozen=True)
class Made:
    """An item with what it gave.

    rows: of its replays.
    measured: of its analyses.
    whole: whether all that was requested is there.
    alone: whether one process made the rows, so that their seconds are of a machine that it did not share.
    """

    item: Item
    rows: Sequence[ResultRow]
    measured: Sequence[Measured]
    whole: bool
    alone: bool = True

    @cached_property
    def runs(self) -> list[Run]:
        """The tables' numbers: a run for all rows that differ in the method alone."""
        return summarise(self.rows)["runs"] if self.rows else []

    @cached_property
    def judgements(self) -> list[Judgement]:
        """What every claim comes to, of those on which something is there."""
        measured = [row for one in self.measured for row in one.rows]
        found = []
        for claim in self.item.claims:
            if isinstance(claim, Contrast):
                found += [contrast(claim, self.rows, self.alone)] if self.rows else []
            elif measured:
                found.append(expect(claim, measured))
        return [one for one in found if one.verdict != "not compared"]


@dataclass
class Workshop:
    """Makes items into a folder, and finds what was made.

    directory: where rows and analyses lie.
    options: how items are made.
    """

    directory: Path
    options: Options
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _resolved: dict[str, ResolvedStep] = field(default_factory=dict)

    def make(self, items: Sequence[Item], jobs: int = 1) -> dict[str, str]:
        """Make what is missing of these items. Returns the errors by item; an item that fails stops no other.

        jobs: int: how many processes work side by side; 1 makes everything in this one.
        """
        failed: dict[str, str] = {}
        with Results(self.directory / "rows", folder="--out") as results:
            waiting = portions(list(self._plans(items, failed)), results.keys, jobs)
            if jobs == 1:
                return failed | one_by_one(self.make_portion, waiting, results)
            # each process gets a copy of this workshop: its steps are checked, and no model is loaded yet
            return failed | side_by_side(self.make_portion, waiting, jobs, self.directory)

    def make_portion(self, portion: Portion, results: Results) -> None:
        """Make one portion. Raises what its replay or its analysis raises."""
        resolved = self._resolve(portion.parts[0].step)
        if resolved.job is None:
            self._analyse(resolved)
        else:
            job = portion.of([job for part in portion.parts if (job := self._resolve(part.step).job) is not None])
            job.run(results, *self._loaded(resolved.model))

    def collect(self, items: Sequence[Item]) -> list[Made]:
        """Return what is there of these items."""
        folder = self.directory / "rows"
        stored = {key_of(row): row for row in read(folder)} if any(folder.glob(GLOB)) else {}
        return [self._collected(item, stored) for item in items]

    def _collected(self, item: Item, stored: Mapping[Key, ResultRow]) -> Made:
        rows: dict[Key, ResultRow] = {}
        measured, whole = [], True
        for step in self.options.steps(item):
            try:
                resolved = self._resolve(step)
                wanted = keys_of(resolved.job) if resolved.job is not None else []
            except (ValueError, FileNotFoundError):  # `make` has said so
                whole = False
                continue
            rows |= {key: stored[key] for key in wanted if key in stored}
            whole &= resolved.job is None or not resolved.job.missing({*stored})
            if resolved.analysis is not None:
                file = self.directory / "analyses" / resolved.file
                whole &= file.is_file()
                if file.is_file():
                    measured.append(Measured(resolved.analysis, _rows_in(file)))
        alone = not any((self.directory / "rows").glob("results-*.jsonl"))
        return Made(item, [*rows.values()], measured, whole, alone)

    def _resolve(self, step: Step) -> ResolvedStep:
        """Return a step with its checked configuration; items that share a step share it."""
        assert isinstance(step, EvalRun | Analysed)
        if repr(step) not in self._resolved:
            self._resolved[repr(step)] = ResolvedStep(step, self.options)
        return self._resolved[repr(step)]

    def _plans(self, items: Sequence[Item], failed: dict[str, str]) -> Iterator[tuple[Item, ResolvedStep]]:
        """Yield what the items are made of, checked, without the analyses that are there; shared steps once."""
        seen: set[int] = set()
        for item in items:
            for step in self.options.steps(item):
                try:
                    resolved = self._resolve(step)
                    if id(resolved) in seen:
                        continue
                    seen.add(id(resolved))
                    if resolved.job is not None or not (self.directory / "analyses" / resolved.file).is_file():
                        yield item, resolved
                except (ValueError, FileNotFoundError) as error:
                    failed.setdefault(item.id, str(error))

    def _analyse(self, resolved: ResolvedStep) -> None:
        from leank.eval.papers.analyses.source import Source

        assert resolved.analysis is not None
        source = Source.load(None, resolved.config.get("mask"))
        if isinstance(resolved.step, Analysed) and resolved.step.model:
            model, tokenizer = self._loaded(resolved.model)
            source = Source(model, tokenizer, source.mask, resolved.model.label, resolved.model.chat)
        found = resolved.analysis.measure(source)
        write_json(self.directory / "analyses" / resolved.file, {"settings": repr(resolved.analysis), "rows": found})

    def _loaded(self, config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        key = repr(config)
        if key not in self._models:
            self._models.clear()  # one model at a time, so that each fits
            self._models[key] = load_model(config)
        return self._models[key], load_config(config)[1]


def _rows_in(file: Path) -> list[Measurement]:
    """Return the rows of an analysis that was made before. Raises ValueError for a file that is damaged."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
        reason: object = "its rows are no list of rows"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = repr(error)
    raise ValueError(f"{file} is damaged ({reason}); remove it and give the command again without --show")
