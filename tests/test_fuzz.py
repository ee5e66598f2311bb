"""Hostile settings: whatever any key holds, the answer is one line that names the key, or a run that makes sense."""

import copy
import functools
import os
import signal
from types import SimpleNamespace

import huggingface_hub
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from leank import backbone
from leank.eval.methods import REGISTRY
from leank.eval.run.build import build_job
from leank.shipped import resolve
from leank.typed import typed
from leank.wandb_log import LoggerConfig
from leank_train import settings as training
from leank_train.running import parallel
from leank_train.train import check_inputs
from tests import ROOT
from tests.helpers import composed
from tests.helpers.fuzzing import ANYTHING, fits, near, of_evaluation, of_training

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # how many the long test tries; 0: its own number
MASK = str(ROOT / "leank_train/assets/reference/mask_70pct.safetensors")
HANGS = {  # seconds after which a call counts as hanging: of its own work, and of waiting, on a machine that is busy
    signal.SIGPROF: (signal.ITIMER_PROF, 10),
    signal.SIGALRM: (signal.ITIMER_REAL, 120),
}
SMALL = {
    "ruler": {"tasks": ["niah_single_1"], "lengths": [1024], "samples": 3},
    "niah": {"lengths": [600], "depths": [50]},
    "multi_turn": {"tasks": ["multikey"], "lengths": [1024], "samples": 2},
    "text": {"lengths": [256], "samples": 2},
    "gsm_infinite": {"subsets": ["medium"], "lengths": [0], "ops": [2], "samples": 2, "max_new_tokens": 64},
}
QUICK = {"min_length": 400, "max_length": 500, "questions": 1, "tasks": {"multikey": 1}}


class Hangs(Exception):
    """A call has not come back."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Keep the reference model's config and tokenizer in memory, and the network out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        for kind in (backbone.AutoConfig, backbone.AutoTokenizer):
            patch.setattr(kind, "from_pretrained", kept(kind.from_pretrained, kind is backbone.AutoConfig))
        yield


def kept(load, changes):
    """A loader that reads the reference model once; changes: callers change what they are given."""
    own = resolve("reference")
    once = functools.cache(load)

    def loader(name, *args, **kwargs):
        found = once(own) if name == own else load(name, *args, **kwargs)
        return copy.deepcopy(found) if changes and name == own else found

    return loader


@functools.cache
def base_of_training():
    config = OmegaConf.to_container(composed.training("+experiment=reference_demo", "logger=none"), resolve=True)
    config["data"] |= QUICK
    config["validation"] |= {"lengths": [400], "tasks": ["niah_multikey_2"]}
    return config


def base_of_evaluation(choice):
    """A configuration that is quick to build. choice: "benchmark NAME", "AXIS NAME" of a method, or nothing."""
    kind, _, name = choice.partition(" ")
    benchmark = OmegaConf.to_container(
        OmegaConf.load(ROOT / f"conf/eval/benchmark/{name if kind == 'benchmark' else 'ruler'}.yaml")
    )
    benchmark |= SMALL.get(benchmark["name"], {"path": "/dev/null"})
    method = {kind: {"name": name}} if name and kind != "benchmark" else {"channels": {"name": "random"}}
    if name.startswith("leank"):
        method["channels"]["mask"] = MASK
    if name == "by_length":
        method["channels"] |= {"below": {"name": "random"}, "above": {"name": "magnitude"}}
    model = {"name": "reference", "dtype": "auto", "chat": None, "overrides": {}, "device": "cpu"}
    compress = "before_question" if benchmark["name"] == "multi_turn" else "after_question"
    return {"model": model, "benchmark": benchmark, "method": {"fuzzed": method}, "logger": {"kind": "none"},
            "cache": {"sink": 16, "window": 144, "flush": 32}, "name": "fuzz", "mask": None,
            "compress": compress}  # fmt: skip


def describe_training(config):
    """All that training checks before it loads weights, and its first documents."""
    made = training.check(config)
    training.fingerprint(config)
    parallel.role(made.trainer)
    name, overrides = made.model.name, made.model.overrides
    light = SimpleNamespace(config=backbone.load_config(name, overrides))
    check_inputs(made, backbone.Backbone(light, backbone.load_tokenizer(name), name))


def describe_evaluation(config):
    """The job and its keys."""
    typed(LoggerConfig, {} if config.get("logger") is None else config["logger"], "logger.")
    job, _ = build_job(config)
    job.missing(set())


def answer(describe, config, keys):
    """Whether the configuration is accepted; fails for an answer that is not one line naming one of the keys."""

    def late(*_):
        raise Hangs(keys)

    before = {number: signal.signal(number, late) for number in HANGS}
    for timer, seconds in HANGS.values():
        signal.setitimer(timer, seconds)
    try:
        describe(config)
        return True
    except (ValueError, OSError) as error:
        said = functools.reduce(lambda said, text: said.replace(text, "..."), broken_texts(config), str(error))
        assert len(said.splitlines()) == 1, said
        parts = {part for key in keys for part in (key.path[-1], ".".join(key.path[:2]))}
        named = any(part in said for part in (*parts, *(["pruning"] if "mask" in parts else [])))
        by_path = isinstance(error, OSError) or "dev/null" in said  # the system's errors name a path
        assert named or by_path, said
        return False
    finally:
        for number, (timer, _) in HANGS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def broken_texts(config):
    """The texts of several lines that a configuration holds: a message quotes them as they are."""
    if isinstance(config, dict | list):
        parts = config if isinstance(config, list) else [*config, *config.values()]
        return [text for part in parts for text in broken_texts(part)]
    return [config] if isinstance(config, str) and config and config.splitlines() != [config] else []


def with_values(config, keys, values):
    """A copy of the configuration with other values; a key below a value that is no group is left out."""
    config, changed = copy.deepcopy(config), []
    for key, value in zip(keys, values, strict=True):
        group = config
        for part in key.path[:-1]:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if isinstance(group, dict):
            group[key.path[-1]] = value
            changed.append((key, value))
    return config, changed


def fuzz(describe, base, keys, data):
    """Try one example. keys: those to choose from."""
    first = data.draw(st.sampled_from(keys), label="key")
    others = [key for key in keys if key.choice in ("", first.choice) and key != first]
    chosen = [first, *data.draw(st.lists(st.sampled_from(others), max_size=1), label="and")]
    values = [data.draw(st.one_of(ANYTHING, *2 * [near(key.hint)]), label=str(key)) for key in chosen]
    config, changed = with_values(base(first.choice), chosen, values)
    if answer(describe, config, chosen):
        for key, value in changed:
            shadowed = any(other.path == key.path[: len(other.path)] for other, _ in changed if other is not key)
            assert shadowed or fits(value, key.hint), f"{key}={value!r} was accepted"


TRAINING, EVALUATION = of_training(), of_evaluation()
CHECKS = {
    "deadline": None,
    "derandomize": not EXAMPLES,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


def test_every_key_is_found():
    """The keys come from the classes, so a new setting is tried without a word here."""
    assert {"stage1.lr", "data.tasks", "pruning.ratio", "trainer.devices"} <= {str(key) for key in TRAINING}
    names = {str(key) for key in EVALUATION}
    assert {"batch_size", "model.device", "cache.window", "benchmark.ruler.benchmark.lengths"} <= names
    assert "tokens.snapkv.method.fuzzed.tokens.budget" in names


def test_the_configurations_that_are_changed_are_right():
    assert answer(describe_training, base_of_training(), [])
    choices = ["", *(f"benchmark {name}" for name in SMALL)]
    choices += [f"{axis} {name}" for axis, names in REGISTRY.items() for name in names]
    refused = []
    for choice in choices:
        try:
            describe_evaluation(base_of_evaluation(choice))
        except (ValueError, OSError) as error:
            refused.append((choice, str(error)))
    assert not refused


@settings(max_examples=250, **CHECKS)
@given(st.data())
def test_training_answers_in_one_line_or_runs(data):
    fuzz(describe_training, lambda choice: base_of_training(), TRAINING, data)


@settings(max_examples=250, **CHECKS)
@given(st.data())
def test_evaluation_answers_in_one_line_or_runs(data):
    fuzz(describe_evaluation, base_of_evaluation, EVALUATION, data)


@pytest.mark.slow
@settings(max_examples=EXAMPLES or 5000, **CHECKS)
@given(st.data())
def test_many_settings_of_training(data):
    fuzz(describe_training, lambda choice: base_of_training(), TRAINING, data)


@pytest.mark.slow
@settings(max_examples=EXAMPLES or 5000, **CHECKS)
@given(st.data())
def test_many_settings_of_evaluation(data):
    fuzz(describe_evaluation, base_of_evaluation, EVALUATION, data)
