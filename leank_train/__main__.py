"""Train a mask: python -m leank_train +experiment=reference_70pct."""

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from leank.cli import again, ending, leave_no_trace
from leank.launch import launch

CONF = str(files("leank.conf.train"))
COMMANDS = {"doctor": "consult", "share": "share"}  # and their modules, beside the training that Hydra starts


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
def main(config: DictConfig) -> float:
    """Train in Hydra's run directory, and return the score that a sweep maximises."""
    # after --help and config errors: seconds to import
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from leank_train.running.preempt import Signals
    from leank_train.train import run

    hydra_config = HydraConfig.get()
    out, alone = Path(hydra_config.runtime.output_dir), hydra_config.mode == RunMode.RUN

    def kept() -> str:
        """Say what is saved, and how to go on; Hydra's own files alone are not worth keeping."""
        if alone:
            leave_no_trace(out)
        what = f"{out} keeps its checkpoints" if (out / "checkpoints").exists() else "nothing is saved yet"
        return f"{what}; to go on: {again('leank_train')}"

    try:
        requeues = config.get("requeues")
        with ending("leank_train", kept), Signals(requeues if isinstance(requeues, int) else 0, kept) as signals:
            named = [one.lstrip("+").partition("=")[0] for one in hydra_config.overrides.task]
            config, fit = fitted(config, named, "experiment" in hydra_config.runtime.choices)
            rank_zero_only(print)(f"outputs   {out}", flush=True)
            if fit:
                rank_zero_only(print)(
                    f"settings  fitted to {config.model.name}, as nothing sets them: {fit}", flush=True
                )
            metrics = run(config, out, signals)
    except Exception:
        if not alone:
            traceback.print_exc()  # the launcher of a sweep keeps it from the job's log
        raise
    if not metrics:  # another process of the run reports them
        return float("nan")
    recall = metrics.get("validation", {}).get("recall", {})
    print(f"mask      {out / 'mask.safetensors'}  ({100 * metrics['pruning_ratio']:.1f}% of K channels pruned)")
    if "bytes" in metrics:
        print(f"layout    {metrics['bytes']:.3f} of dense's bytes in the middle; other budgets are in masks/")
    elif metrics["separation"]:
        between, margin = (metrics["separation"][key] for key in ("between", "margin"))
        print(f"scores    {100 * between:.1f}% of the channels ended between .1 and .9; margin at the cut {margin:.2f}")
    left = ["metrics.json", "plots/", *(["validation.md"] if "validation" in metrics else [])]
    print(f"results   {out}  ({', '.join(left)})")
    if (out / "wandb").exists():
        print(f"curves    wandb leet {out / 'wandb'}  (or: wandb sync {out / 'wandb'}/offline-run-*)")
    return recall.get("leank", {}).get("average", float("nan"))


def fitted(given: DictConfig, named: Sequence[str], experiment: bool) -> tuple[DictConfig, str]:
    """Return a configuration with settings that fit the model in place of refused defaults, and what they are.

    given: the configuration; one that `check` takes is returned as it is, and so is that of an experiment.
    named: settings and groups that the command line sets, which stay; documents of `data` do not set lengths.
    Raises BadConfig if what is left cannot work.
    """
    # seconds to import
    from leank.backbone import load_config
    from leank.typed import BadConfig
    from leank_train.doctor import fitting
    from leank_train.recipes import check
    from leank_train.settings import plain

    if experiment:
        return given, ""
    try:
        check(given)
    except BadConfig:
        model, new = plain(given)["model"], given.copy()
        assert isinstance(model, dict)
        config = load_config(model["name"], model["overrides"]).get_text_config(decoder=True)
        free = {k: v for k, v in fitting(config).items() if not {k, k.split(".")[0]} - {"data"} & {*named}}
        for key, value in free.items():
            OmegaConf.update(new, key, value)
        check(new)
        return new, " ".join(f"{key}={value}" for key, value in free.items())
    return given, ""


def command_line() -> None:
    """Run a command that the first argument names, else Hydra's command line."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        import_module(f"leank_train.{COMMANDS[sys.argv[1]]}").main(sys.argv[2:])
        return
    with ending("leank_train"):
        launch(main, "leank_train", "; beside settings there are the words doctor and share, and --help")


if __name__ == "__main__":
    command_line()
