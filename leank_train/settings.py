"""Settings looked at before any weights are loaded, and the identity of a run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data_gen import haystack
from data_gen.tasks import task
from leank_train import backbone as backbones
from leank_train import distill, steering
from leank_train.attention import EMPTY_HEADS
from leank_train.hook import has_rope
from leank_train.mask import ROUNDINGS
from leank_train.objectives import OBJECTIVES
from leank_train.passes import KERNELS
from leank_train.stages import StageConfig

NOT_IN_HASH = (
    "trainer",
    "logger",
    "validation",
    "resume",
    "workers",
    "name",
    "checkpoint_every",
    "requeues",
    "extra_ratios",
)
LEAST = {  # whole numbers, and the smallest that works
    "mask.align": 1, "mask.sink": 0, "mask.window": 1,
    "trainer.sequence_parallel": 1,
    "data.min_length": 1, "data.max_length": 1, "data.questions": 1, "data.documents": 1,
    "stage1.steps": 0, "stage2.steps": 0, "seed": 0, "workers": 0, "checkpoint_every": 1, "requeues": 0,
    "validation.samples": 0, "validation.batch": 1, "validation.calibration": 1,
}  # fmt: skip
CHOICES = {
    "schedule": distill.SCHEDULES, "reduction": distill.REDUCTIONS, "l1": distill.L1_FORMS,
    "straight_through": distill.STRAIGHT_THROUGH, "empty_heads": EMPTY_HEADS, "objective": OBJECTIVES,
}  # fmt: skip


class BadConfig(ValueError):
    """A setting that cannot work; the message names it, its value, and what to do."""


def need(fine: bool, message: str) -> None:
    """Raise BadConfig with the message unless all is fine."""
    if not fine:
        raise BadConfig(message)


def check(config: DictConfig) -> None:
    """Look at every setting before weights are loaded.

    Raises BadConfig, ValueError for an unknown task, FileNotFoundError where the model or the essays are missing.
    """
    for key, least in LEAST.items():
        value = OmegaConf.select(config, key)
        need(
            isinstance(value, int) and _is_number(value) and value >= least,
            f"{key}={value} cannot work: give a whole number from {least} on",
        )
    check_trainer(config)
    mask, data, validation = config.mask, config.data, config.validation
    need(
        _is_number(mask.ratio) and 0 <= mask.ratio < 1,
        f"mask.ratio={mask.ratio} is not in [0, 1): it is the share of channels to prune, e.g. 0.7",
    )
    need(mask.rounding in ROUNDINGS, f"mask.rounding={mask.rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
    for ratio in config.extra_ratios:
        need(
            _is_number(ratio) and 0 <= ratio < 1,
            f"extra_ratios={list(config.extra_ratios)}: {ratio} is not in [0, 1); give shares of channels to prune, "
            "e.g. [0.5,0.9]",
        )
    need(
        config.model.dtype in backbones.DTYPES,
        f"model.dtype={config.model.dtype!r} is unknown; use one of {', '.join(backbones.DTYPES)}",
    )
    for name in ("stage1", "stage2"):
        stage_config(config, name)
    need(
        data.min_length <= data.max_length,
        f"data.min_length={data.min_length} is above data.max_length={data.max_length}; exchange them",
    )
    need(
        any(share > 0 for share in data.tasks.values()) and all(share >= 0 for share in data.tasks.values()),
        f"data.tasks={dict(data.tasks)} has no task to draw: give shares from 0 on, at least one above 0",
    )
    for name in [*data.tasks, *((validation.tasks or []) if validation.samples else [])]:
        task(name)
    if data.essays is not None:
        haystack.sentences(data.essays, "train")
    shortest = {"data.min_length": data.min_length}
    longest = {"data.max_length": data.max_length}
    if validation.samples:
        need(bool(validation.lengths), "validation.lengths is empty: give lengths, or set validation.samples=0")
        shortest["validation.lengths"], longest["validation.lengths"] = min(validation.lengths), max(validation.lengths)
    for key, value in shortest.items():
        need(
            mask.sink + mask.window < value,
            f"mask.sink + mask.window = {mask.sink + mask.window} tokens leave no middle in contexts of "
            f"{key}={value}; lower mask.window={mask.window} or raise {key}",
        )
    check_model(config, longest)


def check_trainer(config: DictConfig) -> None:
    """Look at the settings of several processes, and of the prefill's kernel."""
    trainer = config.trainer
    need(
        isinstance(trainer.shard_weights, bool),
        f"trainer.shard_weights={trainer.shard_weights} cannot work: give true or false",
    )
    for key, alone in (("shard_weights", False), ("sequence_parallel", 1)):
        need(
            trainer[key] == alone or str(trainer.strategy).startswith("ddp"),
            f"trainer.{key}={trainer[key]} needs several processes, but trainer.strategy={trainer.strategy}; "
            "set trainer.strategy=ddp and trainer.devices, or use trainer=fsdp or trainer=sequence_parallel",
        )
    need(
        not (trainer.shard_weights and config.validation.samples),
        f"validation.samples={config.validation.samples}: validation runs in one process, which has only its share of "
        "the weights where trainer.shard_weights=true; set validation.samples=0, and use python -m eval on the mask",
    )
    kernel = trainer.prefill_kernel
    need(kernel in KERNELS, f"trainer.prefill_kernel={kernel!r} is unknown; use one of {', '.join(KERNELS)}")
    need(
        kernel != "flash_attn" or find_spec("flash_attn") is not None,
        "trainer.prefill_kernel='flash_attn', but the package is not installed: pip install flash-attn, or use auto",
    )


def check_model(config: DictConfig, longest: dict[str, int]) -> None:
    """Look at the model's own config: positions, shape. longest: setting -> tokens of its longest sequence."""
    name = config.model.name
    model = backbones.load_config(name, overrides(config))
    kind = f"model.name={name} ({model.model_type})"
    need(has_rope(model), f"{kind} has no rotary positions (RoPE); choose a RoPE decoder such as Llama")
    missing = [k for k in ("num_hidden_layers", "num_key_value_heads", "hidden_size") if not hasattr(model, k)]
    need(not missing, f"{kind} is no plain decoder: its config has no {', '.join(missing)}; choose a text model")
    dim = backbones.kv_shape(model)[2]
    need(
        dim % config.mask.align == 0, f"mask.align={config.mask.align} does not divide head_dim={dim} of {kind}; "
        "use a divisor such as 16",
    )  # fmt: skip
    limit = getattr(model, "max_position_embeddings", None)
    window = getattr(model, "sliding_window", None)
    if "sliding_attention" not in (getattr(model, "layer_types", None) or ["sliding_attention"]):
        window = None
    for key, value in longest.items():
        need(
            limit is None or value <= limit,
            f"{key}={value} is beyond the {limit} positions of {kind}; lower it, or extend the model with "
            "model.overrides (see conf/experiment/qwen_70pct_yarn.yaml)",
        )
        need(
            window is None or value <= window,
            f"{key}={value} is beyond the sliding_window={window} of {kind}, and such layers have no middle to prune; "
            "lower it, or choose a model without sliding_window",
        )
    rope = getattr(model, "rope_parameters", None) or {}
    need(
        config.trainer.sequence_parallel == 1 or rope.get("rope_type") not in ("dynamic", "longrope"),
        f"trainer.sequence_parallel={config.trainer.sequence_parallel}: the RoPE of {kind} (rope_type="
        f"{rope.get('rope_type')}) depends on the longest position that a process has; set it to 1",
    )
    partial = rope.get("partial_rotary_factor", 1.0)
    need(
        partial == 1.0 or not config.validation.samples,
        f"validation.samples={config.validation.samples}: {kind} rotates only part of a head "
        f"(partial_rotary_factor={partial}), so there is no lowest-frequency mask to compare with; "
        "set validation.samples=0",
    )


def stage_config(config: DictConfig, name: str) -> StageConfig:
    """The settings of "stage1" or "stage2". Raises BadConfig for an unknown key, name or number."""
    found = OmegaConf.to_container(config[name], resolve=True)
    assert isinstance(found, dict)
    given = {str(k): v for k, v in found.items()}
    known = [f.name for f in fields(StageConfig)]
    for key, value in given.items():
        need(key in known, f"{name}.{key}={value} is no setting of a stage; choose among {', '.join(known)}")
    stage = StageConfig(**given)
    for key, choices in CHOICES.items():
        value = getattr(stage, key)
        need(value in choices, f"{name}.{key}={value!r} is unknown; use one of {', '.join(choices)}")
    need(
        stage.lr == steering.AUTO or (_is_number(stage.lr) and float(stage.lr) > 0),
        f"{name}.lr={stage.lr} must be a number above 0, or auto; the paper has 0.02",
    )
    need(
        (stage.lam == steering.AUTO and name == "stage1") or (_is_number(stage.lam) and float(stage.lam) >= 0),
        f"{name}.lam={stage.lam} must be a number from 0 on, e.g. 0.06; stage1.lam can be auto",
    )
    return stage


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def overrides(config: DictConfig) -> dict[str, Any]:
    """Values to change in the model's own config."""
    found = OmegaConf.to_container(config.model.get("overrides") or OmegaConf.create({}), resolve=True)
    assert isinstance(found, dict)
    return {str(k): v for k, v in found.items()}


def check_folder(out: Path, fingerprint: str, resume: bool) -> None:
    """Raise BadConfig for a run directory whose checkpoints are not to be used, or are another config's."""
    if not (out / "checkpoints").exists():
        return
    file = out / "config.hash"
    before = file.read_text().strip() if file.exists() else "unknown"
    need(resume, f"resume=false, and {out} holds a run already; set hydra.run.dir to a new folder, or resume=true")
    need(
        before == fingerprint,
        f"{out} holds checkpoints of another config ({before}, this one is {fingerprint}; "
        f"compare {out}/config.yaml): set hydra.run.dir to a new folder, or remove that one",
    )


def fingerprint(config: DictConfig) -> str:
    """Twelve hexadecimal digits that change with anything that changes the mask."""
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    kept = {str(k): v for k, v in resolved.items() if k not in NOT_IN_HASH}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
