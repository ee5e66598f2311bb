"""From the resolved configuration to a checked Job; no weights are loaded here.

A method's `each` lists values of its settings and stands for every combination of them:

    snapkv_think:
      tokens: {name: snapkv}
      channels: {name: think}
      each: {tokens: {budget: [512, 1024]}, channels: {ratio: [0.4, 0.5]}}

are snapkv_think_512_0.4, snapkv_think_512_0.5, snapkv_think_1024_0.4 and snapkv_think_1024_0.5. Instead of a list,
`each: {channels: {mask: masks/*.safetensors}}` takes every file that the pattern matches, by name.

`match` brings methods to equal bytes: match=0.4 is a share of dense, match=leank another method's bytes.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.errors import naming
from leank.eval.benchmarks.base import Benchmark, Cell, benchmarks
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prompts import encode, overhead, thinks
from leank.eval.methods import Method, build_method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.memory import free_settings, match, share_of_dense
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from leank.shipped import matching
from leank.typed import group, refuse_unknown, shown, typed

Setting = tuple[str, ...]  # where a setting stands in a method's configuration
GROUPS = ("model", "benchmark", "method", "cache", "mask", "name", "logger")
log = logging.getLogger("eval")


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration of python -m leank.eval. Raises ValueError naming what Hydra refuses."""
    try:
        with initialize_config_module("leank.conf.eval", version_base="1.3"):
            config = OmegaConf.to_container(compose("eval", list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    return cast("dict[str, Any]", config)


def build_benchmark(config: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark that `config.name` names. Raises ValueError for an unknown one."""
    name = group(config, "benchmark").get("name")
    known = benchmarks()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"benchmark.name={shown(name)} is unknown; choose one of {', '.join(known)}")
    return cast("Benchmark", typed(known[name], config, "benchmark."))


def build_methods(
    config: Mapping[str, Any], model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Method]:  # fmt: skip
    """Return the methods of a resolved configuration, checked against the model's. Raises as `build_job`."""
    labels = expanded(group({} if config.get("method") is None else config["method"], "method"))
    if not labels:
        raise ValueError("method is empty; give method=[dense,leank] or other names of conf/method")
    methods = [build_method(label, given, config.get("cache")) for label, given in labels.items()]
    text_config = model_config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    for one in methods:
        for axis, choice in one.axes.items():
            length = getattr(choice, "length", None)  # of calibration samples
            if limit is not None and length is not None and length > limit:
                raise ValueError(
                    f"method.{one.label}.{axis}.length={length} is more than the model's max_position_embeddings="
                    f"{limit}; give a shorter one"
                )
            with naming(f"method.{one.label}"):
                choice.check(text_config, tokenizer)
        one.layout()
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
    """Return settings of model and replay, the model's own config and tokenizer, no weights. Raises as `build_job`."""
    refuse_unknown(config, [*GROUPS, *(f.name for f in fields(Settings))], "")
    for name, what in (("name", "a text; the run's folder is called so"), ("mask", "the path of one mask")):
        if isinstance(config.get(name), Mapping | list):
            raise ValueError(f"{name}={shown(config[name])} must be {what}")
    settings = typed(Settings, {k: v for k, v in config.items() if k not in GROUPS})
    model = typed(ModelConfig, {} if config.get("model") is None else config["model"], "model.")
    return model, settings, *load_config(model)


def build_job(config: Mapping[str, Any]) -> tuple[Job, PreTrainedTokenizerBase]:
    """Return the job of a resolved configuration (conf/eval/eval.yaml), and the tokenizer.

    Raises ValueError or FileNotFoundError, naming the setting at fault.
    """
    model, settings, model_config, tokenizer = build_model(config)
    methods = build_methods(config, model_config, tokenizer)
    benchmark = build_benchmark({} if config.get("benchmark") is None else config["benchmark"])
    if (needed := benchmark.compress) not in (None, settings.compress):
        raise ValueError(f"compress={settings.compress}: benchmark={benchmark.name} needs compress={needed}")
    text_config = model_config.get_text_config(decoder=True)
    benchmark.check(text_config, tokenizer, overhead(tokenizer, model.chat), settings.max_new_tokens)
    warn_of_spans(methods)  # once nothing is refused any more, so that a run that is leaves no log
    job = Job(model, methods, benchmark, settings, thinks=thinks(tokenizer))
    return job if settings.match is None else matched(job, text_config, tokenizer), tokenizer


def expanded(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods by label, each `each` expanded. Raises ValueError for a wrong one, or a label twice."""
    found: dict[str, Any] = {}
    for label, given in methods.items():
        for name, one in _combinations(label, given):
            if name in found:
                raise ValueError(f"method.{name} is there twice; give one of the two another label")
            found[name] = one
    return found


def _combinations(label: str, given: object) -> Iterator[tuple[str, object]]:
    """Yield every combination of a method's `each`, with its label; the method as it is without any."""
    if not isinstance(given, Mapping) or "each" not in given:
        yield label, given
        return
    lists = dict(_lists(given["each"], (), f"method.{label}.each"))
    for values in product(*lists.values()):
        one: dict[str, Any] = copy.deepcopy({key: value for key, value in given.items() if key != "each"})
        for place, value in zip(lists, values, strict=True):
            group = one
            for key in place[:-1]:
                group = group.setdefault(key, {})
            group[place[-1]] = value
        yield "_".join([label, *map(_word, values)]), one


def _lists(tree: object, place: Setting, where: str) -> Iterator[tuple[Setting, list[object]]]:
    """Yield every list of values with the place of its setting. A text is a pattern of files: those that it matches."""
    given = tree
    if isinstance(given, str) and place:
        tree = matching(given)
    if isinstance(tree, list) and tree and place:
        yield place, tree
    elif isinstance(tree, Mapping) and tree:
        for key, below in tree.items():
            yield from _lists(below, (*place, str(key)), f"{where}.{key}")
    else:
        raise ValueError(
            f"{where}={given!r} must be a list of values, such as each: {{channels: {{ratio: [0.5, 0.7]}}}}, or a "
            "pattern that matches files, such as masks/*.safetensors"
        )


def _word(value: object) -> str:
    """Write a value as a part of a label; a file counts by its name."""
    if isinstance(value, str):
        return Path(value).stem
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def matched(job: Job, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Job:
    """Return the job with settings.match applied; config: the model's text config.

    In every cell (samples of one task and length) each method's free setting is chosen so that the prompts together
    take the wanted share of their dense bytes. Every sample is built once for its length. A method that cannot get
    there keeps its own settings, and the log says so.
    Raises ValueError if match is neither a share nor the label of a method whose bytes are known from settings.
    """
    to, itemsize = job.settings.match, job.model.torch_dtype.itemsize
    other = next((method for method in job.methods if method.label == to), None)
    by_cell: dict[Cell, Sequence[Method]] = {}
    said: set[tuple[str, int | None]] = set()
    for cell in job.benchmark.cells():
        where, lengths = cell.place, _lengths(job, cell, tokenizer)
        try:
            share = _share(to) if other is None else share_of_dense(other, config, lengths, itemsize)
        except ValueError as error:
            labels = ", ".join(method.label for method in job.methods)
            raise ValueError(f"match={to}: {error}; give a share of dense bytes or one of {labels}") from error
        methods = []
        for one in job.methods:
            if one is not other and one.axes:
                try:
                    found = match(one, share, config, lengths, itemsize)
                    for choice in found.axes.values():
                        choice.check(config, tokenizer)
                    one = replace(found, matched={"settings": free_settings(found), "to": to})
                except ValueError as error:
                    if (one.label, cell.length) not in said:
                        log.warning("match=%s (%s): %s keeps its settings: %s", to, where, one.label, error)
                    said.add((one.label, cell.length))
            methods.append(one)
        by_cell[cell] = methods
        log.info("match=%s (%s): %.1f%% of dense bytes", to, where, 100 * share)
    return replace(job, by_cell=by_cell)


def _share(to: object) -> float:
    if isinstance(to, bool) or not isinstance(to, int | float) or not 0 < to <= 1:
        raise ValueError(f"{to!r} is neither a share in (0, 1] nor a method of this run")
    return float(to)


def _lengths(job: Job, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a method compresses of each prompt of a cell."""
    chat, before = job.model.chat, job.settings.compress == "before_question"
    extra = overhead(tokenizer, chat)
    rows = (job.benchmark.row(cell, sample, tokenizer, extra) for sample in cell.samples)
    prompts = ((row, encode(tokenizer, row, chat, job.settings.specials)) for row in rows)
    return [prompt.question if before or row.read else len(prompt.ids) for row, prompt in prompts]
