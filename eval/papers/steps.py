"""What is to be made of an item: its steps under options, each with its checked configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from leank.eval.inference.models import ModelConfig
from leank.eval.papers.analyses import Analysis, analysis
from leank.eval.papers.item import Analysed, EvalRun, Item, Step
from leank.eval.papers.registry import makes
from leank.eval.rows.results import Key
from leank.eval.run.build import build_benchmark, build_job, build_settings, name_methods
from leank.eval.run.job import Job
from leank.typed import typed

HERE = "+experiment=papers/here"  # the model and the mask of analyses


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
        """Return what is to be run for an item, without what is another command's."""
        return tuple(step for step in (item.real if self.real else item.here) if makes(step))


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
    """Return the keys that the rows of a job have, whether or not they are there, in the order of its plan."""
    keys = []
    for cell in job.benchmark.cells():
        ids = [row for sample in cell.samples for row in cell.ids(sample)]
        for method in job.by_cell.get(cell, job.methods):
            either = (job.keys(method, cell, ids, how) for how in (None, job.settings.specials))
            keys += [key for row in zip(*either, strict=True) for key in row]
    return keys


class ResolvedStep:
    """A step under options: a replay's checked job, or an analysis with its settings, its model and its mask."""

    def __init__(self, step: EvalRun | Analysed, options: Options) -> None:
        self.step = step
        quick = step.quick if isinstance(step, EvalRun) and options.quick else ()
        first = () if isinstance(step, EvalRun) else (HERE,)
        self.config = composed([*first, *step.overrides, *quick, *options.overrides])
        self.analysis: Analysis | None = None
        if isinstance(step, Analysed):
            settings: Mapping[str, Any] = {**step.settings, **(step.quick if options.quick else {})}
            self.analysis = typed(analysis(step.name), settings, f"{step.name}.")
            if options.overrides:  # it takes the model and the mask alone, but what no run knows is a slip
                build_settings(self.config)
                build_benchmark(self.config.get("benchmark") or {})
                name_methods(self.config)

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
