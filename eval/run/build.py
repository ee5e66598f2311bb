"""From the resolved configuration to a checked Job; no weights are loaded here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.benchmarks.base import Benchmark
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prompts import overhead
from leank.eval.methods import Method, method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.run.grid import expanded
from leank.eval.run.job import Job
from leank.eval.run.matched import matched
from leank.eval.run.settings import Settings
from leank.typed import group, refuse_unknown, shown, typed

# name -> "module:class"; imported when first used
BENCHMARKS = {
    "gsm_infinite": "leank.eval.benchmarks.gsm_infinite:GsmInfinite",
    "infinitebench": "leank.eval.benchmarks.infinitebench:InfiniteBench",
    "longbench": "leank.eval.benchmarks.longbench:LongBench",
    "math500": "leank.eval.benchmarks.math500:Math500",
    "mmlu": "leank.eval.benchmarks.mmlu:Mmlu",
    "multi_turn": "leank.eval.benchmarks.multi_turn:MultiTurn",
    "niah": "leank.eval.benchmarks.niah:NeedleGrid",
    "ruler": "leank.eval.benchmarks.ruler:Ruler",
    "text": "leank.eval.benchmarks.text:Text",
}
GROUPS = ("model", "benchmark", "method", "cache", "mask", "name", "logger")
log = logging.getLogger("eval")


def build_benchmark(config: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark that `config.name` names. Raises ValueError for an unknown one."""
    name = group(config, "benchmark").get("name")
    if not isinstance(name, str) or name not in BENCHMARKS:
        raise ValueError(f"benchmark.name={shown(name)} is unknown; choose one of {', '.join(BENCHMARKS)}")
    module, attribute = BENCHMARKS[name].split(":")
    return typed(getattr(importlib.import_module(module), attribute), config, "benchmark.")


def name_methods(config: Mapping[str, Any]) -> list[Method]:
    """Return the methods of a resolved configuration, each checked by itself. Raises ValueError naming the setting."""
    labels = expanded(group({} if config.get("method") is None else config["method"], "method"))
    if not labels:
        raise ValueError("method is empty; give method=[dense,leank] or other names of conf/method")
    return [method(label, given, config.get("cache")) for label, given in labels.items()]


def build_methods(
    config: Mapping[str, Any], model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Method]:  # fmt: skip
    """Return the methods of a resolved configuration, checked against the model's own config.

    Raises ValueError or FileNotFoundError, naming the setting at fault.
    """
    methods = name_methods(config)
    for one in methods:
        text_config = model_config.get_text_config(decoder=True)
        limit = getattr(text_config, "max_position_embeddings", None)
        for axis, choice in one.axes.items():
            length = getattr(choice, "length", None)  # of calibration samples
            if limit is not None and length is not None and length > limit:
                raise ValueError(
                    f"method.{one.label}.{axis}.length={length} is more than the model's max_position_embeddings="
                    f"{limit}; give a shorter one"
                )
            try:
                choice.check(text_config, tokenizer)
            except ValueError as error:
                raise ValueError(f"method.{one.label}: {error}") from error
    return methods


def warn_of_spans(methods: Sequence[Method]) -> None:
    """Log where a mask was trained with another sink or window than its method's cache has."""
    for one in methods:
        if isinstance(one.channels, LeanK):
            trained = one.channels.loaded.metadata
            for key in ("sink", "window"):
                if trained.get(key) not in (None, getattr(one, key)):
                    log.warning("mask was trained with %s=%s; cache.%s=%s", key, trained[key], key, getattr(one, key))


def build_model(
    config: Mapping[str, object],
) -> tuple[ModelConfig, Settings, PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the model's settings, those of the replay, the model's own config and the tokenizer; load no weights.

    Raises ValueError or FileNotFoundError, naming the setting at fault.
    """
    model, settings = build_settings(config)
    return model, settings, *load_config(model)


def build_settings(config: Mapping[str, object]) -> tuple[ModelConfig, Settings]:
    """Return the settings of the model and of the replay; read no file. Raises ValueError naming the setting."""
    refuse_unknown(config, [*GROUPS, *(f.name for f in fields(Settings))], "")
    if isinstance(config.get("name"), Mapping | list):
        raise ValueError(f"name={shown(config['name'])} must be a text; the run's folder is called so")
    settings = typed(Settings, {k: v for k, v in config.items() if k not in GROUPS})
    return typed(ModelConfig, {} if config.get("model") is None else config["model"], "model."), settings


def build_job(config: Mapping[str, Any]) -> tuple[Job, PreTrainedTokenizerBase]:
    """Return the job of a resolved configuration (conf/eval/eval.yaml), and the tokenizer.

    Raises ValueError or FileNotFoundError, naming the setting at fault.
    """
    model, settings, model_config, tokenizer = build_model(config)
    methods = build_methods(config, model_config, tokenizer)
    benchmark = build_benchmark({} if config.get("benchmark") is None else config["benchmark"])
    wanted = getattr(benchmark, "compress", settings.compress)
    if settings.compress != wanted:
        raise ValueError(f"compress={settings.compress}: benchmark={benchmark.name} needs compress={wanted}")
    text_config = model_config.get_text_config(decoder=True)
    benchmark.check(text_config, tokenizer, overhead(tokenizer, model.chat), settings.max_new_tokens)
    warn_of_spans(methods)  # once nothing is refused any more, so that a run that is leaves no log
    job = Job(model, methods, benchmark, settings)
    return job if settings.match is None else matched(job, text_config, tokenizer), tokenizer
