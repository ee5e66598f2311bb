"""Trainings in several processes on the CPU, and what they leave."""

import torch

from tests.helpers import forked, tiny_run

# answers of 1 and of 4 values, so that the ranks of a step count different answer tokens; float64 for exactness
SETTINGS = [
    "++data.tasks.niah_multivalue=1",
    "data.questions=1",
    "model.dtype=float64",
    "stage1.steps=3",
    "stage2.steps=2",
    "seed=3",
]


def record(out, stage):
    """What each step of a finished stage left."""
    return torch.load(out / f"checkpoints/{stage}/done.ckpt", weights_only=True)["record"]["steps"]


def of_ranks(trainer="ddp", devices=2):
    """Settings of a training in several processes on the CPU."""
    return f"trainer={trainer}", "trainer.accelerator=cpu", f"trainer.devices={devices}"


def two_ranks(model, cwd, out, *extra):
    """`python -m leank_train`, which starts a second process itself."""
    return tiny_run.cli(model, cwd, *extra, *of_ranks(), out=out)


def forked_ranks(model, cwd, out, *extra, trainer="ddp", devices=2, death=""):
    """The same as forks of this process, as if `torchrun` had started them; returns what they print.

    death: code that makes a rank die in what follows, such as `tiny_run.at_step(3)`; "" lets all live.
    """
    line, env = tiny_run.line_and_env(model, *extra, *of_ranks(trainer, devices), out=out)
    if death:
        assert line[1:3] == ["-m", "leank_train"]
        program = f"import runpy\nfrom tests.helpers import tiny_run\n{death}\n"
        line[1:3] = ["-c", f"{program}runpy.run_module('leank_train', run_name='__main__', alter_sys=True)"]
    return forked.ranks(line, cwd, env, devices, cwd / f"{out}.log", killed=bool(death))
