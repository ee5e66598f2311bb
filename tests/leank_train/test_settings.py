"""Settings of training and evaluation go through one mechanism; what cannot be right is named before training."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import huggingface_hub
import pytest
import torch
from annotated_types import Ge
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    StableLmConfig,
)
from transformers import StableLmForCausalLM as StableLm

from leank import backbone
from leank.eval.benchmarks.base import benchmarks
from leank.eval.methods import REGISTRY, build_method, choice, choice_class
from leank.eval.run.build import build_benchmark
from leank.eval.run.replay import Replay
from leank.typed import BadConfig, Checked, Count, OneOf, Positive, Share, _adapters, typed
from leank.wandb_log import LoggerConfig
from leank_train.objective import distill
from leank_train.recipes import check
from leank_train.stages import Stage
from leank_train.train import run
from tests import ROOT
from tests.helpers import forked
from tests.helpers.composed import training
from tests.helpers.refusals import says
from tests.helpers.tiny_run import VALIDATION, command, save_model, settings

DIGESTS = {  # of methods whose rows are in use, under the default cache
    "iap": ({"channels": {"name": "iap", "ratio": 0.7}}, "6be27f10b9"),
    "kivi": ({"bits": {"name": "kivi", "bits": 2, "group": 32}}, "5c7c068fe6"),
    "lethe": ({"tokens": {"name": "lethe"}, "sink": 4, "window": 32}, "41f2745688"),
    "quest": ({"reads": {"name": "quest", "budget": 1024, "page": 16, "dense_layers": 2}, "sink": 16, "window": 64},
              "4b418ba094"),
    "gemfilter": ({"prefill": {"name": "gemfilter", "budget": 1024, "layer": None}}, "2a422f7f4b"),
}  # fmt: skip
CHOICES = [(axis, name) for axis, names in REGISTRY.items() for name in names]


@dataclass(frozen=True)
class Inner(Checked):
    count: Positive
    share: Share = 0.5
    kind: Annotated[str, OneOf("a", "b")] = "a"
    lengths: Sequence[Count] | None = None
    weights: Mapping[str, Annotated[float, Ge(0)]] | None = None
    flag: bool | None = None
    _found: Any = None


@dataclass(frozen=True)
class Outer(Checked):
    inner: Inner
    other: int = 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": {"count": True}}, "inner.count=True must be"),
        ({"inner": {"count": 1.0}}, "inner.count=1.0 must be"),
        ({"inner": {"count": None}}, "inner.count=None must be"),
        ({"inner": {}}, "inner.count is not set"),
        ({"inner": 3}, "inner=3 must be a group of settings"),
        ({"inner": {"count": 1, "share": float("nan")}}, "inner.share=nan must be"),
        ({"inner": {"count": 1, "share": "abc"}}, "inner.share='abc' must be"),
        ({"inner": {"count": 1, "kind": "c"}}, "inner.kind='c' must be"),
        ({"inner": {"count": 1, "flag": 1}}, "inner.flag=1 must be"),
        (
            {"inner": {"count": 1, "lengths": [1, -1]}},
            "inner.lengths=[1, -1] [1] must be",
        ),
        (
            {"inner": {"count": 1, "weights": {"x": float("inf")}}},
            "inner.weights={'x': inf} must be",
        ),
        (
            {"inner": {"coutn": 1}},
            "inner.coutn is no setting; did you mean count? There are count, share, kind, lengths, weights, flag",
        ),
        ({"inner": {"count": 1}, "_found": 1}, "_found is no setting; there are inner, other"),
    ],
)  # fmt: skip
def test_the_message_names_the_dotted_key_and_what_it_takes(given, message):
    with pytest.raises(BadConfig) as caught:
        typed(Outer, given)
    assert str(caught.value).startswith(message)


def test_values_stay_as_they_are_given():
    """An integer where a number is meant is not converted: digests and fingerprints are of what was written."""
    assert repr(typed(Inner, {"count": 1, "share": 0}).share) == "0"


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())))
def test_a_count_takes_counts_alone(value):
    good = type(value) is int and 1 <= value <= 2**53
    try:
        typed(Inner, {"count": value})
    except BadConfig:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(("axis", "name"), CHOICES)
def test_every_number_of_a_method_has_its_type_and_a_bound(axis, name):
    """No field of a method takes true for a number, a text for a number, or a number below all bounds."""
    target = choice_class(axis, name)
    for field in fields(target):
        if field.name in _adapters(target) and isinstance(field.default, int | float) and field.default is not True:
            for bad in (-1e30, float("nan"), "abc", *([True, -(10**9), 1.5] if type(field.default) is int else ())):
                if bad is True and isinstance(field.default, bool):
                    continue
                with pytest.raises(BadConfig, match=rf"method\.x\.{axis}\.{field.name}="):
                    choice(axis, {"name": name, field.name: bad}, f"method.x.{axis}")


@pytest.mark.parametrize("name", benchmarks())
def test_every_number_of_a_benchmark_has_its_type_and_a_bound(name):
    target = benchmarks()[name]
    for field in fields(target):
        if field.name in _adapters(target) and type(field.default) is int:
            for bad in (-1, 1.5, True, "abc", float("nan")):
                with pytest.raises(BadConfig, match=rf"benchmark\.{field.name}="):
                    build_benchmark({"name": name, field.name: bad})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_method("x", {}, {"windw": 3}), r"cache\.windw is no setting; did you mean window\?"),
        (lambda: build_method("x", {"channel": {}}), r"method\.x\.channel is no setting; did you mean channels\?"),
        (lambda: build_method("x", {"bits": {"name": "kivi"}, "backend": "tritn"}), r"x\.backend='tritn' must be"),
        (lambda: choice("channels", {"name": "os:system"}, "m"), "is no choice of channels; give a dataclass that sub"),
        (lambda: typed(LoggerConfig, {"_target_": "os.system"}, "logger."), "logger._target_ is no setting"),
        (lambda: typed(LoggerConfig, {"kind": "os.system"}, "logger."), "logger.kind='os.system' must be"),
        (lambda: backbone.load_config("reference", {"rope_tetha": 1e4}), r"model\.overrides\.rope_tetha is no setting"),
        (
            lambda: backbone.load_config("reference", {"rope_parameters": {"rope_tetha": 1e4}}),
            r"rope_parameters\.rope_tetha is no setting; did you mean rope_theta\?",
        ),
        (
            lambda: backbone.load_config("reference", {"rope_parameters": 5}),
            r"model\.overrides\.rope_parameters=5 must be a mapping",
        ),
        (
            lambda: backbone.load_config("reference", {"max_position_embeddings": "many"}),
            r"model\.name='reference' cannot be loaded .*field 'max_position_embeddings'.* expected int, got str",
        ),
    ],
)  # fmt: skip
def test_evaluation_refuses_nonsense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+sead=3"], r"sead is no setting; did you mean seed\? There are model, data"),
        (["++stage2.lam=inf"], r"stage2\.lam is no setting; "),
        (["stage1.lam=inf"], r"stage1\.lam=inf must be"),
        (["data.tasks=3"], r"data\.tasks=3 must be"),
        (["+logger._target_=os.system"], r"logger\._target_ is no setting"),
        (["++stage1.straight_through=alpha_beta"], "stage1.straight_through is no setting"),
        (
            ["pruning.nested=[0.8]"],
            r"nested=\[0\.8\] has no effect without pruning\.learns=factors or .*; set pr",
        ),
        (["pruning.scales=packed"], "scales='packed' has no effect without .*; set pruning.scales=whole"),
        (["pruning.learns=x"], "pruning.learns='x' must be 'scores' or 'factors'"),
        (["pruning.learns=factors"], "stage2.steps=10 has no effect on masks by factors .*; set stage2.steps=0"),
        (["stage1.l1=sum"], "stage1.l1='sum' and stage1.reduction='official' with stage1.lam='auto': .* fit means"),
        (["stage1.reduction=paper"], "stage1.reduction='paper' with stage1.lam='auto'"),
        (["trainer.sequence_parallel=2"], "trainer.sequence_parallel=2 needs several processes"),
        (["trainer.shard_weights=true"], "trainer.shard_weights=True needs several processes"),
        (["trainer=fsdp", "validation.samples=1"], "validation.samples=1: validation runs in one process"),
        (
            ["trainer=sequence_parallel", "+model.overrides.rope_parameters={rope_type: dynamic, factor: 2.0}"],
            "trainer.sequence_parallel=4: the RoPE of .*rope_type=dynamic",
        ),
        (["trainer.precision=bf16-true"], "trainer.precision='bf16-true' rounds the scores or the logits"),
        (["trainer.prefill_kernel=flash_attn"], "prefill_kernel='flash_attn', but the package is not installed"),
    ],
)
def test_training_refuses_nonsense(overrides, message):
    with pytest.raises(BadConfig, match=message):
        check(training("+experiment=reference_demo", *overrides))


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_of_methods_are_those_of_rows_in_use(name):
    given, digest = DIGESTS[name]
    config = build_method(name, given, {"sink": 128, "window": 1024, "flush": 32}).config()
    assert hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10] == digest


PARTIAL = {
    "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}  # fmt: skip


BEFORE_TRAINING = {
    "alignment": (["pruning.align=5"], [r"pruning\.align=5 does not divide head_dim=16", "use a divisor"]),
    "window and sink": (
        ["pruning.sink=100", "pruning.window=200"],
        [r"sink \+ pruning\.window = 300 tokens", r"data\.min_length=300; lower pruning\.window=200 or raise data"],
    ),
    "window and sink of the validation": (
        [*VALIDATION, "pruning.window=200", "validation.lengths=[150]"],
        [r"validation\.lengths=150; lower pruning\.window=200"],
    ),
    "positions": (
        ["data.max_length=513"], [r"data\.max_length=513 is beyond the 512 positions", "lower it, or extend the model"],
    ),
    "positions of the validation": (
        [*VALIDATION, "validation.lengths=[384,640]"], [r"validation\.lengths=640 is beyond the 512 positions"],
    ),
    "missing weights": (
        ["model.name=/nowhere/Llama-8B"],
        [r"model\.name='/nowhere/Llama-8B': there is no such file or folder", r"\*\.safetensors"],
    ),
    "no network": (["model.name=org/Llama-8B"], [r"model\.name='org/Llama-8B'", "or log in to the hub"]),
    "missing essays": (["data.essays=/nowhere.txt"], [r"essays='/nowhere\.txt' does not exist", "give a .txt"]),
    "missing text": (
        ["data.text=/nowhere.txt", "++data.tasks.text=1"], [r"data\.text: essays='/nowhere\.txt' does not exist"],
    ),
    "text that nothing reads": (["data.text=a.txt"], [r"data\.text='a\.txt' has no effect", r"\+data\.tasks\.text=1"]),
    "missing prompts": (
        ["data.prompts=/nowhere", "++data.tasks.prompts=1"], [r"data\.prompts='/nowhere' does not exist; give a file"],
    ),
    "prompts that nothing reads": (["data.prompts=a"], [r"data\.prompts='a' has no effect", "take data=own_prompts"]),
    "no prompts": (["++data.tasks.prompts=1"], [r"data\.tasks\.prompts=1.* reads prompts of yours: set data\.pro"]),
    "lengths": (["data.min_length=500"], [r"data\.min_length=500 is above data\.max_length=400"]),
    # tasks
    "unknown task": (["++data.tasks.vtt=1"], ["task='vtt' is unknown; choose one of .*multikey"]),
    "unknown task of the validation": (
        [*VALIDATION, "validation.tasks=[niah]"], ["task='niah' is unknown; choose one of niah_single_1"],
    ),
    "no task": (["++data.tasks.multikey=0"], [r"data\.tasks=.* has no task to draw", "at least one above 0"]),
    "no length": ([*VALIDATION, "validation.lengths=[]"], [r"validation\.lengths is empty", r"validation\.samples=0"]),
    "a length twice": (
        [*VALIDATION, "validation.lengths=[384,400,384]"], [r"validation\.lengths=\[384, 400, 384\] names one twice"],
    ),
    "a task twice": (
        [*VALIDATION, "validation.tasks=[niah_multikey_2,niah_multikey_2]"], [r"validation\.tasks=.* names one twice"],
    ),
    "short for a task": (
        ["++data.tasks.passkey=1", "data.questions=1"],
        [r"data\.min_length or data\.tasks\.passkey: length=300 is too short for task 'passkey'", "raise length"],
    ),
    "short for the calibration of the validation": (
        [*VALIDATION, "data.min_length=250", "data.max_length=250"],
        [r"data\.max_length, which bounds .*: length=250 is too short for task 'niah_multikey_3'", "raise length"],
    ),
    "short for a task of the validation": (
        [*VALIDATION, "validation.tasks=[niah_multivalue]", "validation.lengths=[200]"],
        [r"validation\.lengths: .*length=200 is too short for task 'niah_multivalue'", "raise length"],
    ),
    "tasks with other numbers of questions": (
        ["++data.tasks.fwe=1", "data.documents=2", "data.min_length=400"],
        [r"have \[1, 2\] questions; mix tasks with the same"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_TRAINING)
def test_before_training(model_folder, tmp_path, no_step, case, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("leank.backbone._weights", lambda *given: pytest.fail("weights are loaded"))
    changed, parts = BEFORE_TRAINING[case]
    says(lambda: run(settings(model_folder, *changed), tmp_path / "run"), *parts)
    assert not (tmp_path / "run/checkpoints").exists()


MODELS = {
    "rotates part of a head": (
        (StableLm, StableLmConfig, PARTIAL), VALIDATION,
        [r"validation\.samples=1: .*partial_rotary_factor=0\.5", r"set validation\.samples=0"],
    ),
    "slides its own window": (
        (MistralForCausalLM, MistralConfig, {"head_dim": 16, "sliding_window": 350}), [],
        [r"data\.max_length=400 is beyond the sliding_window=350 of model\.name", "lower it, or choose"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_trained(tmp_path, no_step, case):
    (model_class, config_class, sizes), changed, parts = MODELS[case]
    folder = save_model(tmp_path / "other", model_class, config_class, **sizes)
    says(lambda: run(settings(folder, *changed), tmp_path / "run"), *parts)


def test_a_refused_run_leaves_the_folder_as_it_was(model_folder, tmp_path, no_step):
    changed, _ = BEFORE_TRAINING["short for a task"]  # refused when the folder has been claimed
    for _ in range(2):
        says(lambda: run(settings(model_folder, *changed), tmp_path), "is too short for task")
        assert not list(tmp_path.iterdir())


def test_a_folder_without_weights(model_folder, tmp_path, no_step):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((model_folder / name).read_bytes())
    says(
        lambda: run(settings(tmp_path / "model"), tmp_path / "run"),
        r"model\.name='.*/model' cannot be loaded \(OSError: ", r"a folder with config\.json, \*\.safetensors",
    )  # fmt: skip


def test_an_answer_without_tokens(model_folder, tmp_path, no_step, monkeypatch):
    monkeypatch.setattr("leank.backbone.Backbone.encode", lambda self, text: [])
    says(
        lambda: run(settings(model_folder), tmp_path / "run"),
        r"the answer ' \d+\.' to .* has no tokens: nothing to distil",
    )
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_loss_that_is_not_finite(model_folder, tmp_path, monkeypatch):
    rows = distill.answer_rows
    monkeypatch.setattr(distill, "answer_rows", lambda *args: rows(*args) * float("nan"))
    says(
        lambda: run(settings(model_folder), tmp_path),
        "the distillation loss is nan; lower the learning rate", r"stage1\.lr", r"model\.dtype=float32",
    )  # fmt: skip
    assert not (tmp_path / "mask.safetensors").exists()


def test_a_folder_of_another_config(model_folder, tmp_path):
    run(settings(model_folder, "stage1.steps=1", "stage2.steps=0"), tmp_path)
    mask = (tmp_path / "mask.safetensors").read_bytes()
    says(
        lambda: run(settings(model_folder, "stage1.steps=2", "stage2.steps=0"), tmp_path),
        r"was begun with config=\w{12}, and this run has config=\w{12}: set hydra\.run\.dir", r"config\.yaml has the",
    )  # fmt: skip
    says(
        lambda: run(settings(model_folder, "stage1.steps=1", "stage2.steps=0", "resume=false"), tmp_path),
        "resume=false", "holds a run already", r"set hydra\.run\.dir to a new folder, or resume=true",
    )  # fmt: skip
    assert (tmp_path / "mask.safetensors").read_bytes() == mask


CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.parametrize("where", ["loading", "loading on a CPU", "stage1", "stage2", "validation"])
def test_out_of_memory(model_folder, tmp_path, monkeypatch, where):
    def full(*args, **kwargs):
        raise CPU if "CPU" in where else torch.OutOfMemoryError("CUDA out of memory")

    sizes = [r"lower data\.max_length=400, data\.questions=2, data\.documents=1"]
    if "loading" in where:
        monkeypatch.setattr("leank.backbone.load", full)
        sizes = [r"lower the precision, model\.dtype=auto"]
    elif where == "validation":
        monkeypatch.setattr(Replay, "_decode", full)
        sizes = [r"lower validation\.batch=8, validation\.lengths=\[384\]", "the mask is saved"]
    else:
        step = Stage.training_step
        monkeypatch.setattr(
            Stage, "training_step", lambda *args: (full if type(args[0]).__name__.lower() == where else step)(*args)
        )
    says(
        lambda: run(settings(model_folder, *VALIDATION), tmp_path), f"out of (GPU )?memory .*{where.split()[0]}", *sizes
    )
    assert not (tmp_path / "metrics.json").exists()
    assert (tmp_path / "mask.safetensors").exists() == (where == "validation")


def test_the_command_line_shows_the_message_alone(tmp_path):
    line = [sys.executable, "-m", "leank_train", *command("reference"), "pruning.ratio=1.5", "hydra.run.dir=here"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""}
    with (tmp_path / "log").open("w") as log:
        assert forked.run(line, tmp_path, env, log).returncode == 1
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith("leank_train: pruning.ratio=1.5 must be")
    assert "Traceback" not in said
