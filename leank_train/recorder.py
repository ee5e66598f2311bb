"""What training leaves behind: the course of the run, checkpoints that are never half-written, W&B's whereabouts."""

from __future__ import annotations

import hashlib
import json
import netrc
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

BINS = 50


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all: a run may be killed at any moment."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the target, then rename."""
        partial = Path(f"{path}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, partial)
        os.replace(partial, path)


class Recorder(L.Callback):
    """Losses and learning rate of every step and a histogram of alpha every `every` steps; kept in checkpoints."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.steps: list[dict[str, float]] = []
        self.histograms: list[tuple[int, list[int]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Keep the step's values."""
        step = trainer.global_step
        values = {k: float(v.detach()) for k, v in outputs.items()}
        self.steps.append({"step": step, **values, "lr": trainer.optimizers[0].param_groups[0]["lr"]})
        if step % self.every == 0 or step == trainer.max_steps:
            alpha = module.alpha.detach().float().cpu()
            self.histograms.append((step, torch.histc(alpha, BINS, 0.0, 1.0).int().tolist()))

    def state_dict(self) -> dict[str, Any]:
        """The record so far."""
        return {"steps": self.steps, "histograms": self.histograms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an earlier record."""
        self.steps, self.histograms = list(state["steps"]), [tuple(h) for h in state["histograms"]]


def config_hash(config: dict[str, Any]) -> str:
    """Twelve hexadecimal digits that change with anything that changes the mask."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, value: Any) -> None:
    """JSON that appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Text that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def wandb_logger(mode: str, **settings: Any) -> Any:
    """Lightning's W&B logger; without a key it writes offline and says how to look at it."""
    from lightning.pytorch.loggers import WandbLogger

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") or _in_netrc() else "offline"
        )
    if mode == "offline":
        where = settings["save_dir"]
        print(f"W&B is offline: look with `wandb leet {where}/wandb`, or `wandb sync` that folder later", flush=True)
    return WandbLogger(offline=mode == "offline", **settings)


def _in_netrc() -> bool:
    """Whether `wandb login` has left a key in ~/.netrc."""
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
