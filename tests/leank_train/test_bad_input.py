"""Bad input of the main job: the message names the setting, its value and what to do, and comes before training."""

import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    StableLmConfig,
)
from transformers import StableLmForCausalLM as StableLm

from leank.eval.run.replay import Replay
from leank.files import write_bytes
from leank.mask import ChannelMask
from leank_train.objective import distill
from leank_train.stages import Stage
from leank_train.train import run
from tests import ROOT
from tests.helpers import forked
from tests.helpers.refusals import says
from tests.helpers.tiny_run import VALIDATION, command, save_model, settings


@pytest.fixture
def no_step(monkeypatch):
    """Training must not begin."""

    def step(*args):
        raise AssertionError("training has begun")

    monkeypatch.setattr(Stage, "training_step", step)


BEFORE_TRAINING = {
    # the design's list
    "ratio of all": (["pruning.ratio=1.0"], [r"pruning\.ratio=1\.0 must be", "share of channels"]),
    "negative ratio": (["pruning.ratio=-0.1"], [r"pruning\.ratio=-0\.1 must be"]),
    "ratio is no number": (["pruning.ratio=most"], [r"pruning\.ratio='most' must be"]),
    "alignment": (["pruning.align=5"], [r"pruning\.align=5 does not divide head_dim=16", "use a divisor"]),
    "no alignment": (["pruning.align=0"], [r"pruning\.align=0 must be"]),
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
        [r"model\.name='/nowhere/Llama-8B'", "no such folder", r"\*\.safetensors", r"set model\.name=/path/to/Llama"],
    ),
    "no network": (["model.name=org/Llama-8B"], [r"model\.name='org/Llama-8B'", "no hub copy", "or log in to the hub"]),
    "missing essays": (["data.essays=/nowhere.txt"], [r"essays='/nowhere\.txt' does not exist", "give a .txt"]),
    # names of variants
    **{
        key: ([f"++stage1.{key}=other"], [rf"stage1\.{key}='other' must be"])
        for key in ("schedule", "reduction", "l1", "straight_through", "empty_heads", "objective")
    },
    "rounding": (["pruning.rounding=up"], [r"pruning\.rounding='up' must be"]),
    "type of the weights": (["model.dtype=int4"], [r"model\.dtype='int4' must be"]),
    "key of a stage": (["+stage2.lamda=1"], [r"stage2\.lamda is no setting; did you mean lam\? There are steps, lr"]),
    # numbers
    "learning rate": (["stage2.lr=0"], [r"stage2\.lr=0 must be"]),
    "lambda": (["stage1.lam=-1"], [r"stage1\.lam=-1 must be"]),
    "steps": (["stage2.steps=-1"], [r"stage2\.steps=-1 must be"]),
    "half a document": (["data.documents=0.5"], [r"data\.documents=0\.5 must be"]),
    "questions": (["data.questions=0"], [r"data\.questions=0 must be"]),
    "lengths": (["data.min_length=500"], [r"data\.min_length=500 is above data\.max_length=400"]),
    "batch": ([*VALIDATION, "validation.batch=0"], [r"validation\.batch=0 must be"]),
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
    changed, parts = BEFORE_TRAINING[case]
    says(lambda: run(settings(model_folder, *changed), tmp_path / "run"), *parts)
    assert not (tmp_path / "run/checkpoints").exists()


def other(tmp_path, model_class, config_class, **sizes):
    return save_model(tmp_path / "other", model_class, config_class, **sizes)


def test_a_refused_run_leaves_the_folder_as_it_was(model_folder, tmp_path, no_step):
    changed, _ = BEFORE_TRAINING["short for a task"]  # refused when the folder has been claimed
    for _ in range(2):
        says(lambda: run(settings(model_folder, *changed), tmp_path), "is too short for task")
        assert not list(tmp_path.iterdir())
    (tmp_path / "config.yaml").write_text("of an earlier start")
    says(lambda: run(settings(model_folder, *changed), tmp_path), "is too short for task")
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_model_without_rotary_positions(tmp_path, no_step):
    folder = other(
        tmp_path, GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=1, n_head=2,
        **dict.fromkeys(["num_key_value_heads", "intermediate_size"], 2),
    )  # fmt: skip
    says(
        lambda: run(settings(folder), tmp_path / "run"),
        rf"model\.name={folder} \(gpt2\) has no rotary positions", "choose a RoPE decoder",
    )  # fmt: skip


def test_a_model_that_takes_no_other_attention(tmp_path, no_step):
    folder = other(
        tmp_path,
        StableLm,
        StableLmConfig,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )
    says(
        lambda: run(settings(folder), tmp_path / "run"),
        rf"model\.name='{folder}' cannot be used: model=stablelm takes no registered attention", "choose another model",
    )  # fmt: skip
    says(
        lambda: run(settings(folder, *VALIDATION), tmp_path / "run"),
        r"validation\.samples=1: .*partial_rotary_factor=0\.5", r"set validation\.samples=0",
    )  # fmt: skip


def test_a_model_whose_attention_transformers_runs_in_one_way_alone(tmp_path, no_step):
    folder = other(tmp_path, Gemma2ForCausalLM, Gemma2Config, head_dim=16, final_logit_softcapping=30.0)
    says(
        lambda: run(settings(folder), tmp_path / "run"),
        rf"model\.name='{folder}' cannot be used: .* attention=sdpa for gemma2", "soft-capped", "choose another model",
    )  # fmt: skip


def test_a_model_that_slides_its_own_window(tmp_path, no_step):
    folder = other(tmp_path, MistralForCausalLM, MistralConfig, head_dim=16, sliding_window=350)
    says(
        lambda: run(settings(folder), tmp_path / "run"),
        r"data\.max_length=400 is beyond the sliding_window=350 of model\.name", "lower it, or choose",
    )  # fmt: skip


def test_a_folder_without_weights(model_folder, tmp_path, no_step):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((model_folder / name).read_bytes())
    says(
        lambda: run(settings(tmp_path / "model"), tmp_path / "run"),
        r"model\.name='.*/model' cannot be loaded", "does not hold a complete model", r"Put config\.json, \*\.safe",
    )  # fmt: skip


def test_a_mask_of_another_shape_or_model(model_folder, tmp_path):
    config = AutoConfig.from_pretrained(model_folder)
    mask = ChannelMask(torch.ones(3, 2, 16, dtype=torch.bool), {"model": "org/other"})
    says(
        lambda: mask.check_model(config), r"\[3, 2, 16\]", "org/other", r"needs .* = \[2, 2, 16\]; take a mask trained"
    )
    with pytest.warns(UserWarning, match=r"trained on org/other and is used on .*model"):
        ChannelMask(torch.ones(2, 2, 16, dtype=torch.bool), {"model": "org/other"}).check_model(config)


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
        "holds checkpoints of another config", r"compare .*/config\.yaml", r"set hydra\.run\.dir to a new folder",
    )  # fmt: skip
    says(
        lambda: run(settings(model_folder, "stage1.steps=1", "stage2.steps=0", "resume=false"), tmp_path),
        "resume=false", "holds a run already", r"set hydra\.run\.dir to a new folder, or resume=true",
    )  # fmt: skip
    for spoil in (lambda file: file.write_bytes(b"\xff"), Path.unlink):
        spoil(tmp_path / "config.hash")
        says(
            lambda: run(settings(model_folder, "stage1.steps=1", "stage2.steps=0"), tmp_path),
            "holds checkpoints of another config", r"set hydra\.run\.dir to a new folder",
        )  # fmt: skip
    assert (tmp_path / "mask.safetensors").read_bytes() == mask


def test_out_of_memory_on_a_cpu(model_folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr("leank.backbone.load", full)
    says(lambda: run(settings(model_folder), tmp_path), "out of memory while loading the model; lower the precision")


@pytest.mark.parametrize("where", ["loading", "stage1", "stage2", "validation"])
def test_out_of_gpu_memory(model_folder, tmp_path, monkeypatch, where):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sizes = [r"lower data\.max_length=400, data\.questions=2, data\.documents=1"]
    if where == "loading":
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
    says(lambda: run(settings(model_folder, *VALIDATION), tmp_path), f"out of (GPU )?memory .*{where}", *sizes)
    assert not (tmp_path / "metrics.json").exists()
    assert (tmp_path / "mask.safetensors").exists() == (where == "validation")


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    target = tmp_path / "folder/result.json"
    write_bytes(target, b"first")

    def no_disk(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("leank.files.os.replace", no_disk)
    with pytest.raises(OSError, match="No space"):
        write_bytes(target, b"second")
    assert [p.name for p in target.parent.iterdir()] == ["result.json"]
    assert target.read_bytes() == b"first"


def test_the_command_line_shows_the_message_alone(tmp_path):
    line = [sys.executable, "-m", "leank_train", *command("reference"), "pruning.ratio=1.5", "hydra.run.dir=here"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""}
    with (tmp_path / "log").open("w") as log:
        assert forked.run(line, tmp_path, env, log).returncode == 1
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith("leank_train: pruning.ratio=1.5 must be")
    assert "Traceback" not in said
