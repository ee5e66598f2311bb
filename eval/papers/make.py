"""Make items: replays append their rows to one file that all items share, an analysis writes its rows at its end."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.inference.models import ModelConfig, load_config, load_model
from eval.papers.analyses import Analysis, analysis
from eval.papers.item import Analysed, Item, Replay, Row, Step
from eval.papers.registry import makes
from eval.rows.result_row import ResultRow
from eval.rows.results import NAME, Key, Results, key_of, read
from eval.run.build import build_job
from eval.run.job import Job
from eval.run.progress import duration
from leank_train.common.files import write_json
from leank_train.common.typed import typed

log = logging.getLogger("eval")
HERE = "+experiment=papers/here"  # the model and the mask of analyses
COST_OF_AN_ANALYSIS = 50_000  # tokens; for the estimate of the time that is left


@dataclass(frozen=True)
class Request:
    """How items are made.

    quick: fewer samples and shorter prompts.
    real: with the paper's models, settings and data instead of the reference model.
    overrides: of python -m eval, after those of the item.
    """

    quick: bool = False
    real: bool = False
    overrides: tuple[str, ...] = ()

    def steps(self, item: Item) -> tuple[Step, ...]:
        """Return what is to be run for an item, without what is another command's."""
        return tuple(step for step in (item.real if self.real else item.here) if makes(step))


@dataclass(frozen=True)
class Measured:
    """Rows of one analysis, and the analysis, which draws them."""

    analysis: Analysis
    rows: list[Row]


@dataclass(frozen=True)
class Made:
    """An item with what it gave.

    rows: of its replays.
    measured: of its analyses.
    whole: whether all that was requested is there.
    """

    item: Item
    rows: Sequence[ResultRow]
    measured: Sequence[Measured]
    whole: bool


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration of python -m eval. Raises ValueError naming what Hydra refuses."""
    try:
        with initialize_config_module("conf.eval", version_base="1.3"):
            config = OmegaConf.to_container(compose("eval", overrides=list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def keys_of(job: Job) -> set[Key]:
    """Return the keys that the rows of a job have, whether or not they are there."""
    return {
        job.key(method, cell, row, how)
        for cell in job.benchmark.cells()
        for method in job.by_cell.get(cell, job.methods)
        for sample in cell.samples
        for row in cell.ids(sample)
        for how in (None, job.settings.specials)
    }


class Task:
    """A step under a request: a replay's checked job, or an analysis with its settings, its model and its mask."""

    def __init__(self, step: Replay | Analysed, request: Request) -> None:
        self.step = step
        quick = step.quick if isinstance(step, Replay) and request.quick else ()
        first = () if isinstance(step, Replay) else (HERE,)
        self.config = composed([*first, *step.overrides, *quick, *request.overrides])
        self.analysis: Analysis | None = None
        if isinstance(step, Analysed):
            settings: Mapping[str, Any] = {**step.settings, **(step.quick if request.quick else {})}
            self.analysis = typed(analysis(step.name), settings, f"{step.name}.")

    @cached_property
    def job(self) -> Job | None:
        """The job of a replay."""
        return build_job(self.config)[0] if self.analysis is None else None

    @property
    def model(self) -> ModelConfig:
        """The model that is loaded."""
        return typed(ModelConfig, self.config.get("model") or {}, "model.")

    @property
    def file(self) -> str:
        """The name of an analysis' file: another one for other settings, another model or another mask."""
        assert isinstance(self.step, Analysed)
        model = self.model.identity() if self.step.model else None
        settings = repr((self.analysis, model, self.config.get("mask")))
        return f"{self.step.name}-{hashlib.sha256(settings.encode()).hexdigest()[:10]}.json"


@dataclass
class Workshop:
    """Makes items into a folder, and finds what was made.

    directory: where rows and analyses lie.
    request: how items are made.
    """

    directory: Path
    request: Request
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _tasks: dict[str, Task] = field(default_factory=dict)

    def make(self, items: Sequence[Item]) -> dict[str, str]:
        """Make what is missing of these items. Returns the errors by item; an item that fails stops no other."""
        failed: dict[str, str] = {}
        with Results(self.directory / "rows", folder="--out") as results:
            plans = list(self._plans(items, results, failed))
            total, done, began = sum(cost for *_, cost in plans), 0, time.perf_counter()
            for number, (item, task, cost) in enumerate(plans, 1):
                gone = time.perf_counter() - began
                left = f", about {duration(gone / done * (total - done))} left" if done else ""
                log.info("%s, %d of %d; %s gone%s", item.id, number, len(plans), duration(gone), left)
                try:
                    self._run(task, results)
                except (ValueError, FileNotFoundError, MemoryError) as error:
                    failed.setdefault(item.id, str(error))
                done += cost
        return failed

    def collect(self, items: Sequence[Item]) -> list[Made]:
        """Return what is there of these items."""
        file = self.directory / "rows" / NAME
        stored = {key_of(row): row for row in read(file)} if file.is_file() else {}
        return [self._collected(item, stored) for item in items]

    def _collected(self, item: Item, stored: Mapping[Key, ResultRow]) -> Made:
        rows: dict[Key, ResultRow] = {}
        measured, whole = [], True
        for step in self.request.steps(item):
            try:
                task = self._task(step)
                wanted = keys_of(task.job) if task.job is not None else set()
            except (ValueError, FileNotFoundError):  # `make` has said so
                whole = False
                continue
            rows |= {key: stored[key] for key in stored.keys() & wanted}
            whole &= task.job is None or not task.job.missing({*stored})
            if task.analysis is not None:
                file = self.directory / "analyses" / task.file
                whole &= file.is_file()
                if file.is_file():
                    found = json.loads(file.read_text(encoding="utf-8"))["rows"]
                    measured.append(Measured(task.analysis, found))
        order = {key: number for number, key in enumerate(stored)}
        return Made(item, [rows[key] for key in sorted(rows, key=order.__getitem__)], measured, whole)

    def _task(self, step: Step) -> Task:
        """Return the task of a step; items that share a step share it."""
        assert isinstance(step, Replay | Analysed)
        if repr(step) not in self._tasks:
            self._tasks[repr(step)] = Task(step, self.request)
        return self._tasks[repr(step)]

    def _plans(
        self, items: Sequence[Item], results: Results, failed: dict[str, str]
    ) -> Iterator[tuple[Item, Task, int]]:  # fmt: skip
        """Yield what is to be made, checked, with its cost in tokens of prompts times methods; shared steps once."""
        seen: set[int] = set()
        for item in items:
            for step in self.request.steps(item):
                try:
                    task = self._task(step)
                    if id(task) in seen:
                        continue
                    seen.add(id(task))
                    if task.job is None:
                        if not (self.directory / "analyses" / task.file).is_file():
                            yield item, task, COST_OF_AN_ANALYSIS
                    elif missing := task.job.missing(results.keys):
                        yield item, task, sum(len(m) * len(s) * (cell.length or 4096) for cell, s, m in missing)
                except (ValueError, FileNotFoundError) as error:
                    failed.setdefault(item.id, str(error))

    def _run(self, task: Task, results: Results) -> None:
        if task.job is not None:
            task.job.run(results, *self._loaded(task.model))
        elif task.analysis is not None and isinstance(task.step, Analysed):
            from eval.papers.analyses.source import Source

            source = Source.load(None, task.config.get("mask"))
            if task.step.model:
                model, tokenizer = self._loaded(task.model)
                source = Source(model, tokenizer, source.mask, task.model.label, task.model.chat)
            found = task.analysis.measure(source)
            write_json(self.directory / "analyses" / task.file, {"settings": repr(task.analysis), "rows": found})

    def _loaded(self, config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        key = repr(config)
        if key not in self._models:
            self._models.clear()  # one model at a time, so that each fits
            self._models[key] = load_model(config)
        return self._models[key], load_config(config)[1]
