"""Weights & Biases: curves while training, then results, pictures and the mask as an artifact."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Any


def wandb_logger(mode: str, **settings: Any) -> Any:
    """Lightning's W&B logger; without a key it writes offline and says how to look at it."""
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") or _in_netrc() else "offline"
        )
    if mode == "offline":
        where = settings["save_dir"]
        rank_zero_only(print)(
            f"W&B is offline: look with `wandb leet {where}/wandb`, or `wandb sync` that folder later", flush=True
        )
    return WandbLogger(offline=mode == "offline", **settings)


def _in_netrc() -> bool:
    """Whether `wandb login` has left a key in ~/.netrc."""
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def log_results(logger: Any, metrics: dict[str, Any], figures: dict[str, Path], out: Path) -> None:
    """Summary, validation table, plots and the mask; does nothing for another logger."""
    experiment = getattr(logger, "experiment", None)
    if experiment is None or not hasattr(experiment, "summary"):
        return
    import wandb

    flat = {k: v for k, v in metrics.items() if not isinstance(v, dict)}
    for method, row in metrics.get("validation", {}).get("recall", {}).items():
        flat[f"recall/{method}"] = row["average"]
    experiment.summary.update(flat)
    experiment.log({f"plots/{k}": wandb.Image(str(p)) for k, p in figures.items()})
    if "validation" in metrics:
        rows = metrics["validation"]["recall"]
        tasks = list(next(iter(rows.values())))
        experiment.log(
            {"validation": wandb.Table(columns=["method", *tasks], data=[[m, *r.values()] for m, r in rows.items()])}
        )
    artifact = wandb.Artifact("mask", type="mask", metadata={"config": metrics["config"]})
    artifact.add_file(str(out / "mask.safetensors"))
    experiment.log_artifact(artifact)
    experiment.finish()
