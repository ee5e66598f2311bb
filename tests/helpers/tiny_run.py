"""The main job in seconds: a tiny random decoder in a folder, and settings that fit it."""

import os
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from leank_train.running.recorder import Recorder
from tests import ROOT
from tests.helpers import composed  # noqa: F401  (files of conf are read once)
from tests.helpers.text_tokenizers import tokenizer

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OVERRIDES = (
    "stage1=paper", "stage2=paper",
    "data.tasks={kv: 0, multivalue: 0, multikey: 1, multiquery: 0}",
    "data.min_length=300", "data.max_length=400", "data.questions=2",
    "pruning.align=4", "pruning.sink=4", "pruning.window=32", "stage1.steps=6", "stage2.steps=4", "stage1.lr=0.1",
    "validation.samples=0", "validation.heldout=1", "checkpoint_every=2", "workers=0", "logger=none",
    "trainer.accelerator=cpu",
)  # fmt: skip
VALIDATION = (
    "validation.samples=1", "validation.calibration=1", "validation.lengths=[384]", "validation.tasks=[niah_multikey_2]"
)  # fmt: skip


def save_model(
    folder: Path,
    model_class: type[PreTrainedModel] = LlamaForCausalLM,
    config_class: type[PreTrainedConfig] = LlamaConfig,
    **settings,
) -> Path:
    """A random decoder (two layers, two KV heads, head_dim 16 in a Llama) with the reference tokenizer, in `folder`."""
    words = tokenizer("reference")
    if config_class is LlamaConfig:
        settings = {"head_dim": 16, **settings}
    torch.manual_seed(0)
    model_class(config_class(**{**SIZES, "vocab_size": len(words), **settings})).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def settings(model: Path | str, *overrides: str) -> DictConfig:
    """The configuration of a small run, changed by Hydra overrides."""
    with initialize_config_dir(str(files("leank.conf.train")), version_base="1.3"):
        return compose("train", overrides=[*command(model), *overrides])


def command(model: Path | str) -> list[str]:
    """The same as arguments of the command line."""
    return [f"model.name={model}", *OVERRIDES]


def line_and_env(model: Path | str, *extra: str, out: str = "here") -> tuple[list[str], dict[str, str]]:
    """`python -m leank_train` on the tiny run, which is then in the folder `out`, and its environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return [sys.executable, "-m", "leank_train", *command(model), f"hydra.run.dir={out}", *extra], env


def cli(model: Path | str, cwd: Path, *extra: str, out: str = "here") -> subprocess.Popen:
    """`line_and_env` as a process of its own, begun in the folder `cwd`."""
    line, env = line_and_env(model, *extra, out=out)
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alpha(out: Path) -> torch.Tensor:
    """The learned scores of a run directory."""
    return load_file(out / "alpha.safetensors")["alpha"]


def killed(work) -> bool:
    """Run `work` in a child process and say whether it died of SIGKILL (False: it ended well)."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # the child must not go on with the parent's tests
            print(f"child: {error!r}", flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_at_file(name: str, when: str) -> None:
    """Die just before or after (`when`) a file gets its name; what is to stand in it is written already."""
    replace = os.replace

    def die(source, target):
        if when == "after":
            replace(source, target)
        if str(target).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "before":
            replace(source, target)

    os.replace = die


def at_step(steps: int, number: int = signal.SIGKILL) -> list[int]:
    """Send this process a signal in the step of that number, counted over both stages, before anything of it is kept.

    Returns a list that grows with every step; the patch of `Recorder` stays.
    """
    taken: list[int] = []
    keep = Recorder.on_train_batch_end

    def hook(*args):
        taken.append(1)
        if len(taken) == steps:
            os.kill(os.getpid(), number)
        keep(*args)

    Recorder.on_train_batch_end = hook
    return taken
