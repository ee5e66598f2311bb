"""Weights & Biases: curves while training, then results, pictures, and the mask with its lineage.

model, config -> training run -> mask -> eval run: artifacts are named after what they hold, so that runs that never
met are joined where they use the same one.
"""

from __future__ import annotations

import hashlib
import json
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from leank_train.common.typed import Checked, OneOf
from leank_train.mask import ChannelMask


@dataclass(frozen=True)
class LoggerConfig(Checked):
    """Where curves and results go, conf/shared/logger; files in the run directory are written in any case.

    kind: "none", or "wandb" for Weights & Biases. A configuration names a kind and no class, so it cannot choose code.
    project, group, name, entity, tags, notes: of the W&B run; name None is the run directory's.
    mode: online, offline, or auto: online where W&B has a key.
    """

    kind: Annotated[str, OneOf("none", "wandb")] = "none"
    project: str = "leank"
    group: str | None = None
    name: str | None = None
    mode: Annotated[str, OneOf("auto", "online", "offline")] = "auto"
    entity: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None


def make_logger(config: LoggerConfig, folder: Path, **more: Any) -> Any:
    """The logger of a run in `folder`, None for kind "none"; more: further arguments of `wandb.init`."""
    if config.kind == "none":
        return None
    given = {key: value for key, value in asdict(config).items() if key != "kind" and value is not None}
    return wandb_logger(**given, save_dir=str(folder), **more)


def wandb_logger(mode: str, save_dir: str, name: str | None = None, **settings: Any) -> Any:
    """Lightning's W&B logger; without a key it writes offline and says how to look at it.

    mode: auto, online or offline. name: of the run, by default its folder's, so that the members of a sweep, which
    share a group, are told apart.
    """
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") or _in_netrc() else "offline"
        )
    if mode == "offline":
        rank_zero_only(print)(
            f"W&B is offline: look with `wandb leet {save_dir}/wandb`, or `wandb sync` that folder later", flush=True
        )
    name = name or Path(save_dir).resolve().name
    logger = WandbLogger(offline=mode == "offline", save_dir=save_dir, name=name, **settings)
    logger._wandb_init.pop("anonymous", None)  # Lightning passes it on in any case; W&B warns that it has no effect
    return logger


def _in_netrc() -> bool:
    """Whether `wandb login` has left a key in ~/.netrc."""
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _artifact(kind: str, name: str, content: Mapping[str, Any]) -> Any:
    """An artifact that holds `content` as JSON; the same content is the same version."""
    import wandb

    made = wandb.Artifact(f"{kind}-{name}", type=kind)
    with made.new_file(f"{kind}.json", mode="w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    return made


def model_artifact(name: str) -> Any:
    """A model by its name (of a folder: the last part); the weights stay where they are."""
    label = Path(name).name
    return _artifact("model", label, {"name": label})


def mask_artifact(path: Path, mask: ChannelMask) -> Any:
    """A mask's file, named after the config that it was learned with (a published one: after its channels).

    Training logs it and an evaluation uses it: the bytes are the same, so on the server it is one artifact.
    """
    import wandb

    name = mask.metadata.get("config") or hashlib.sha256(mask.keep.numpy().tobytes()).hexdigest()[:12]
    about = {"pruning_ratio": mask.pruning_ratio, **{k: mask.metadata.get(k) for k in ("ratio", "alignment", "seed")}}
    made = wandb.Artifact(f"mask-{name}", type="mask", metadata=about)
    made.add_file(str(path), name=f"mask{path.suffix}")
    return made


def use(run: Any, artifact: Any) -> None:
    """Say that the run uses it: by name in its config, and as lineage unless it is offline, where W&B cannot."""
    run.config.update({f"uses/{artifact.type}": artifact.name}, allow_val_change=True)
    if not run.offline:
        run.use_artifact(artifact)


def log_results(
    logger: Any, metrics: dict[str, Any], figures: dict[str, Path], config: dict[str, Any], mask: ChannelMask, out: Path
) -> None:
    """Summary, validation table, plots and artifacts; does nothing for another logger. config: the run's, resolved."""
    experiment = getattr(logger, "experiment", None)
    if experiment is None or not hasattr(experiment, "summary"):
        return
    import wandb

    flat = {k: v for k, v in metrics.items() if not isinstance(v, dict)}
    flat |= {f"seconds/{k}": v for k, v in metrics["seconds"].items()}
    flat |= {f"separation/{k}": v for k, v in metrics["separation"].items()}
    flat |= {f"distillation/{stage}": v for stage, v in metrics["distillation"].items()}
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
    use(experiment, model_artifact(config["model"]["name"]))
    use(experiment, _artifact("config", metrics["config"], config))
    experiment.log_artifact(mask_artifact(out / "mask.safetensors", mask))
    experiment.finish()
