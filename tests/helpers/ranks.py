"""Trainings in several processes on the CPU, and what they leave."""

import os
import subprocess
import sys

import torch

from tests import ROOT
from tests.helpers import forked
from tests.helpers.tiny_run import command

# answers of 1 and of 4 values, so that the ranks of a step count different answer tokens; float64 for exactness
SETTINGS = ["++data.tasks.niah_multivalue=1", "data.questions=1", "model.dtype=float64", "stage1.steps=5", "seed=3"]


def record(out, stage):
    """What each step of a finished stage left."""
    return torch.load(out / f"checkpoints/{stage}/done.ckpt", weights_only=True)["record"]["steps"]


def of_ranks(model, out, *extra, trainer="ddp", devices=2):
    """The command of a training in several processes on the CPU, and its environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "leank_train", *command(model), *extra, f"hydra.run.dir={out}"]
    return [*line, f"trainer={trainer}", "trainer.accelerator=cpu", f"trainer.devices={devices}"], env


def two_ranks(model, cwd, out, *extra):
    """`python -m leank_train`, which starts a second process itself."""
    line, env = of_ranks(model, out, *extra)
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def forked_ranks(model, cwd, out, *extra, trainer="ddp", devices=2):
    """The same as forks of this process, as if `torchrun` had started them; returns what they print."""
    line, env = of_ranks(model, out, *extra, trainer=trainer, devices=devices)
    return forked.ranks(line, cwd, env, devices, cwd / f"{out}.log")
