"""Weights & Biases: curves while training, then results, pictures, and the mask with its lineage.

The lineage is model, config -> training run -> mask -> eval run. Artifacts are named after their content, so W&B joins
runs that use the same mask, even if they were logged on different machines.
"""

from __future__ import annotations

import hashlib
import json
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from leank.extras import require
from leank.files import name_of
from leank.mask import ChannelMask, mask_file
from leank.typed import Checked, OneOf

if TYPE_CHECKING:  # W&B and Lightning take seconds to import
    import wandb
    from lightning.pytorch.loggers import Logger, WandbLogger


@dataclass(frozen=True)
class LoggerConfig(Checked):
    """Where curves and results are logged, conf/shared/logger; the run directory gets its files in any case.

    kind: "none", or "wandb" for Weights & Biases. A configuration names a kind and no class, so it cannot choose code.
    project, group, entity, tags, notes: of the W&B run.
    name: of the W&B run; None takes the name of the run directory, which tells the members of a sweep apart.
    mode: online, offline, or auto, which is online if W&B has a key.
    """

    kind: Annotated[str, OneOf("none", "wandb")] = "none"
    project: str = "leank"
    group: str | None = None
    name: str | None = None
    mode: Annotated[str, OneOf("auto", "online", "offline")] = "auto"
    entity: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None


def make_logger(config: LoggerConfig, folder: Path, job_type: str | None = None) -> WandbLogger | None:
    """Lightning's logger of a run in `folder`, None for kind "none"; job_type: W&B's kind of the run."""
    if config.kind == "none":
        return None
    require("logger=wandb", "train", "wandb", "lightning")
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    mode = config.mode
    if mode == "auto":
        key = os.environ.get("WANDB_API_KEY") or _in_netrc()
        mode = os.environ.get("WANDB_MODE") or ("online" if key else "offline")
    if mode == "offline":
        rank_zero_only(print)(
            f"W&B is offline: look with `wandb leet {folder}/wandb`, or `wandb sync` that folder later", flush=True
        )
    given = {**asdict(config), "job_type": job_type, "name": config.name or folder.resolve().name}
    given = {key: value for key, value in given.items() if key not in ("kind", "mode") and value is not None}
    logger = WandbLogger(offline=mode == "offline", save_dir=str(folder), **given)
    logger._wandb_init.pop("anonymous", None)  # Lightning passes it on in any case; W&B warns that it has no effect
    return logger


def _in_netrc() -> bool:
    """Whether `wandb login` has left a key in ~/.netrc."""
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _artifact(kind: str, name: str, content: Mapping[str, object]) -> wandb.Artifact:
    """An artifact that holds `content` as JSON; W&B gives equal content the same version."""
    import wandb

    made = wandb.Artifact(f"{kind}-{name_of(name)}", type=kind)
    with made.new_file(f"{kind}.json", mode="w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    return made


def model_artifact(name: str) -> wandb.Artifact:
    """An artifact that names a model (a folder by its last part); it does not hold the weights."""
    label = Path(name).name
    return _artifact("model", label, {"name": label})


def mask_artifact(path: Path, mask: ChannelMask) -> wandb.Artifact:
    """An artifact with the file of a mask, named after its training config or its channels: equal bytes are one."""
    import wandb

    path = mask_file(path)
    name = mask.metadata.get("config") or hashlib.sha256(mask.keep.numpy().tobytes()).hexdigest()[:12]
    about = {"pruning_ratio": mask.pruning_ratio, **{k: mask.metadata.get(k) for k in ("ratio", "alignment", "seed")}}
    made = wandb.Artifact(f"mask-{name_of(str(name))}", type="mask", metadata=about)
    made.add_file(str(path), name=f"mask{path.suffix}")
    return made


def use(run: wandb.Run, artifact: wandb.Artifact) -> None:
    """Record that a run uses an artifact: by name in its config, and as lineage unless the run is offline."""
    run.config.update({f"uses/{artifact.type}": artifact.name}, allow_val_change=True)
    if not run.offline:
        run.use_artifact(artifact)


def log_results(
    logger: Logger | None,
    metrics: Mapping[str, Any],
    figures: dict[str, Path],
    model: str,
    config: Mapping[str, object],
    mask: ChannelMask,
    out: Path,
) -> None:
    """Log a finished training run, and end its W&B run; does nothing for another logger.

    metrics: those of metrics.json; figures: name -> PNG; config: of the run, resolved.
    mask: the learned one, stored in `out` as mask.safetensors.
    """
    experiment = getattr(logger, "experiment", None)
    if experiment is None or not hasattr(experiment, "summary"):
        return
    import wandb

    flat = {k: v for k, v in metrics.items() if not isinstance(v, dict)}
    for part in ("seconds", "separation", "distillation"):
        flat |= {f"{part}/{k}": v for k, v in metrics[part].items()}
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
    use(experiment, model_artifact(model))
    use(experiment, _artifact("config", metrics["config"], config))
    experiment.log_artifact(mask_artifact(out / "mask.safetensors", mask))
    experiment.finish()
