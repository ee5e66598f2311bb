"""Settings looked at before any weights are loaded, and the identity of a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data_gen.tasks import task
from leank_train import backbone as backbones
from leank_train.mask import ROUNDINGS

NOT_IN_HASH = ("trainer", "logger", "validation", "resume", "workers", "name", "checkpoint_every")


class BadConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and what to do."""


def check(config: DictConfig) -> None:
    """Look at every setting before weights are loaded. Raises BadConfig."""

    def need(fine: bool, message: str) -> None:
        if not fine:
            raise BadConfig(message)

    mask, data = config.mask, config.data
    need(
        0 <= mask.ratio < 1, f"mask.ratio={mask.ratio} is not in [0, 1): it is the share of channels to prune, e.g. 0.7"
    )
    need(
        mask.sink >= 0 and mask.window >= 1,
        f"mask.sink={mask.sink}, mask.window={mask.window}: use sink >= 0, window >= 1",
    )
    need(mask.rounding in ROUNDINGS, f"mask.rounding={mask.rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
    need(
        mask.sink + mask.window < data.min_length,
        f"mask.sink + mask.window = {mask.sink + mask.window} tokens leave no middle in contexts of "
        f"data.min_length={data.min_length}; lower mask.window or raise data.min_length",
    )
    for name in data.tasks:
        task(name)
    shape_of = backbones.load_config(config.model.name, overrides(config))
    dim = backbones.kv_shape(shape_of)[2]
    need(
        dim % mask.align == 0,
        f"mask.align={mask.align} does not divide head_dim={dim} of {config.model.name}; use a divisor",
    )
    limit = shape_of.max_position_embeddings
    need(
        data.max_length <= limit,
        f"data.max_length={data.max_length} is beyond the {limit} positions of {config.model.name}; lower it, "
        "or extend the model (see conf/experiment/qwen_70pct_yarn.yaml)",
    )
    for stage in (config.stage1, config.stage2):
        need(
            stage.steps >= 0 and stage.lr > 0, f"stage.steps={stage.steps}, stage.lr={stage.lr}: use steps >= 0, lr > 0"
        )


def overrides(config: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(config.model.get("overrides") or OmegaConf.create({}), resolve=True)
    assert isinstance(found, dict)
    return {str(k): v for k, v in found.items()}


def check_folder(out: Path, fingerprint: str, resume: bool) -> None:
    before = out / "config.hash"
    if not (out / "checkpoints").exists() or not before.exists():
        return
    if not resume:
        raise BadConfig(
            f"{out} holds a run already; set hydra.run.dir to a new folder, or resume=true to go on with it"
        )
    if before.read_text().strip() != fingerprint:
        raise BadConfig(
            f"{out} holds checkpoints of another config ({before.read_text().strip()}, this one is {fingerprint}; "
            f"compare {out}/config.yaml): set hydra.run.dir to a new folder, or remove that one"
        )


def fingerprint(config: DictConfig) -> str:
    """Twelve hexadecimal digits that change with anything that changes the mask."""
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    kept = {str(k): v for k, v in resolved.items() if k not in NOT_IN_HASH}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
