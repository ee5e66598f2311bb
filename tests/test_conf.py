"""The configuration: every experiment composes and passes the checks, the paper's numbers are the paper's."""

import os
import re
import resource
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from leank import backbone
from leank.eval.__main__ import refuse_repeated
from leank_train import recipes, settings
from tests import ROOT
from tests.helpers.composed import training

CONF = Path(str(files("leank.conf.train")))
EXPERIMENTS = sorted(p.stem for p in CONF.glob("experiment/*.yaml"))
OF_EVAL = sorted(p.stem for p in CONF.parent.glob("eval/experiment/*.yaml"))
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
    "smollm2": LlamaConfig(  # of a package that need not be installed
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        max_position_embeddings=32768, use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        max_position_embeddings=32768, sliding_window=131072, use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
}  # fmt: skip


GROUPS = {"train": {"data", "pruning", "stage1", "trainer", "validation"}, "eval": {"benchmark", "method"}}
COMMANDS = {"train": "leank_train", "eval": "leank.eval"}


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The published models' configs in folders, in place of the hub."""
    resolve = backbone.resolve
    for name, config in MODELS.items():
        config.save_pretrained(tmp_path / name)
    monkeypatch.setattr(backbone, "resolve", lambda name: str(tmp_path / name) if name in MODELS else resolve(name))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_passes_the_checks(name, published):
    config = training(f"+experiment={name}")
    assert recipes.check(config).name == name
    assert len(settings.fingerprint(config)) == 12


def test_fingerprints_differ_between_experiments():
    assert len({settings.fingerprint(training(f"+experiment={name}")) for name in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_numbers(name):
    config = training(f"+experiment={name}")
    (first, second), (low, high) = PAPER[name]
    assert (config.stage1.lr, config.stage2.lr) == (first, second)
    assert (config.stage1.steps, config.stage2.steps) == (2000, 200)
    assert config.stage1.lam == 0.06
    assert (config.data.min_length, config.data.max_length) == (low, high)
    assert (config.pruning.sink, config.pruning.window, config.pruning.ratio) == (128, 1024, 0.7)
    one_task = training(f"+experiment={name}", "data=paper")
    assert {task for task, share in one_task.data.tasks.items() if share} == {"kv", "multivalue"}


def test_yarn_extends_qwen_fourfold(published):
    config = training("+experiment=qwen_70pct_yarn")
    model = backbone.load_config(config.model.name, config.model.overrides)
    assert model.rope_parameters["rope_type"] == "yarn"
    assert model.rope_parameters["factor"] == 4.0
    assert model.rope_parameters["original_max_position_embeddings"] == 32768
    assert model.rope_parameters["rope_theta"] == 1_000_000.0  # what is not overridden stays
    assert model.max_position_embeddings == 4 * 32768


def test_files_that_configurations_read_are_shipped_with_the_packages():
    named = {
        path
        for file in (*CONF.parent.rglob("*.yaml"), *ROOT.glob("eval/papers/*.yaml"))
        for path in re.findall(r"[\w./*-]+\.(?:safetensors|pth)\b", re.sub(r"#.*", "", file.read_text("utf-8")))
        if "/" in path and not path.startswith("outputs/")  # an example in a help text
    }
    assert sum(len(list(ROOT.glob(path))) for path in named) > 80  # masks, most of them named by a pattern
    assert not {path for path in named if not path.startswith("models/") or not any(ROOT.glob(path))}


def command(root, tmp_path, *arguments):
    """A command's (return code, stdout, stderr)."""
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", COMMANDS[root], *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("root", COMMANDS)
def test_help_is_quick_and_shows_what_the_command_takes(root, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, said, imported = command(root, tmp_path, "--help")
    assert code == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5  # of work: about a second
    head, groups = said.split("== Configuration groups ==")
    assert head.count(f"python -m {COMMANDS[root]} ") >= 3  # examples
    listed = dict(line.split(": ", 1) for line in groups.split("== Config ==")[0].splitlines() if ": " in line)
    (other,) = COMMANDS.keys() - {root}
    assert GROUPS[root] <= listed.keys()
    assert not GROUPS[other] & listed.keys()
    assert listed["experiment"].split(", ") == (EXPERIMENTS if root == "train" else OF_EVAL)
    for shared in ("model", "logger"):
        names = ", ".join(sorted(p.stem for p in CONF.parent.glob(f"shared/{shared}/*.yaml")))
        assert f"\n{shared}: {names}\n" in head
    modules = {line.rsplit("|", 1)[1].strip() for line in imported.splitlines() if line.startswith("import time:")}
    assert not modules & {"torch", "transformers", "lightning", "matplotlib"}
    assert not list(tmp_path.iterdir())


def test_a_method_named_twice_is_refused():
    refuse_repeated(["method=[dense,h2o,reference/think]", "method.h2o.window=3", "method=dense"])
    for again in ("h2o", "reference/h2o"):
        with pytest.raises(ValueError, match="h2o is there twice; leave one out"):
            refuse_repeated(["seed=1", f"method=[dense, h2o, {again}]"])
