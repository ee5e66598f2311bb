"""The configuration: every experiment composes and passes the checks, the paper's numbers are the paper's."""

import os
import subprocess
import sys
import time
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import LlamaConfig, Qwen2Config

from leank_train import backbone, settings
from leank_train.stages import StageConfig
from tests.tiny_run import ROOT

CONF = Path(str(files("conf")))
EXPERIMENTS = sorted(p.stem for p in CONF.glob("experiment/*.yaml") if "benchmark" not in OmegaConf.load(p))
PAPER = {  # section 4.1: learning rates of the stages, range of the training lengths
    "llama_70pct": ((0.02, 0.01), (16 * 1024, 96 * 1024)),
    "qwen_70pct": ((0.04, 0.02), (4 * 1024, 32 * 1024)),
    "qwen_70pct_yarn": ((0.04, 0.02), (64 * 1024, 96 * 1024)),
}
MODELS = {  # the published configs, as far as the checks look
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "meta-llama/Llama-3.1-70B-Instruct": LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        max_position_embeddings=32768, sliding_window=131072, use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
}  # fmt: skip


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def test_there_are_the_promised_experiments():
    assert {*PAPER, "reference_demo", "reference_70pct", "reference_80pct"} <= {*EXPERIMENTS}


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The published models' configs in folders, in place of the hub."""
    resolve = backbone.resolve
    for name, config in MODELS.items():
        config.save_pretrained(tmp_path / name)
    monkeypatch.setattr(backbone, "resolve", lambda name: str(tmp_path / name) if name in MODELS else resolve(name))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_passes_the_checks(name, published):
    config = composed(f"+experiment={name}")
    settings.check(config)
    assert config.name == name
    for stage in ("stage1", "stage2"):
        settings.stage_config(config, stage)
    assert len(settings.fingerprint(config)) == 12


def test_fingerprints_differ_between_experiments():
    assert len({settings.fingerprint(composed(f"+experiment={name}")) for name in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_numbers(name):
    config = composed(f"+experiment={name}")
    (first, second), (low, high) = PAPER[name]
    assert (config.stage1.lr, config.stage2.lr) == (first, second)
    assert (config.stage1.steps, config.stage2.steps) == (2000, 200)
    assert config.stage1.lam == 0.06
    assert (config.data.min_length, config.data.max_length) == (low, high)
    assert (config.mask.sink, config.mask.window, config.mask.ratio) == (128, 1024, 0.7)


def test_yarn_extends_qwen_fourfold(published):
    config = composed("+experiment=qwen_70pct_yarn")
    model = backbone.load_config(config.model.name, settings.overrides(config))
    assert model.rope_parameters["rope_type"] == "yarn"
    assert model.rope_parameters["factor"] == 4.0
    assert model.rope_parameters["original_max_position_embeddings"] == 32768
    assert model.rope_parameters["rope_theta"] == 1_000_000.0  # what is not overridden stays
    assert model.max_position_embeddings == 4 * 32768


@pytest.mark.parametrize("name", [f"reference_{ratio}pct" for ratio in (70, 80, 90, 95)])
def test_reference_experiments(name):
    config = composed(f"+experiment={name}")
    assert config.model.name == "reference"
    assert config.mask.sink == 16
    assert config.mask.window <= 256
    assert config.mask.ratio == int(name[10:12]) / 100
    assert config.mask.align == 16
    assert (config.stage1.objective, config.stage1.lam, config.stage2.objective) == ("kl", "auto", "kl")


def test_overrides_win():
    config = composed("+experiment=llama_70pct", "model.name=/models/x", "mask.ratio=0.5", "stage2.lr=1", "seed=7")
    assert (config.model.name, config.mask.ratio, config.stage2.lr, config.seed) == ("/models/x", 0.5, 1, 7)
    assert config.logger.group == "llama_70pct"
    one_task = composed("data=paper")
    assert {name for name, share in one_task.data.tasks.items() if share} == {"kv", "multivalue"}
    assert not composed("logger=none").logger
    assert composed("trainer=ddp").trainer.strategy == "ddp"


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_stage_takes_every_key(stage):
    keys = {f.name: f.default for f in fields(StageConfig)} | {"steps": 3, "lr": 0.5}
    assert {*composed()[stage]} <= {*keys}
    config = composed(*(f"++{stage}.{key}={value}" for key, value in keys.items()))
    assert settings.stage_config(config, stage) == StageConfig(**keys)


def test_help_is_quick_and_names_the_groups(tmp_path):
    started = time.time()
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "leank_train", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0
    assert time.time() - started < 10  # a second on an idle machine
    for group in ("experiment", "model", "pruning", "stage1", "validation"):
        assert f"{group}: " in found.stdout
    assert all(name in found.stdout for name in EXPERIMENTS)
    modules = {line.rsplit("|", 1)[1].strip() for line in found.stderr.splitlines() if line.startswith("import time:")}
    assert not modules & {"torch", "transformers", "lightning", "matplotlib"}
    assert not list(tmp_path.iterdir())
