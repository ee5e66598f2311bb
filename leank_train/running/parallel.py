"""How the processes of a run share the work: documents, one context's tokens, the weights.

The settings are those of conf/train/trainer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Annotated, Any

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from leank_train.common.typed import BadConfig, Checked, OneOf, Positive
from leank_train.forward.passes import KERNELS
from leank_train.running.preempt import environments

OURS = ("sequence_parallel", "shard_weights", "prefill_kernel")
NOT_OURS = r"`isinstance\(treespec, LeafSpec\)` is deprecated"  # Lightning's own use of torch, at every start


@dataclass(frozen=True)
class TrainerConfig(Checked):
    """Settings of the processes, conf/train/trainer.

    accelerator, devices, num_nodes, strategy, precision, deterministic, benchmark, detect_anomaly, profiler: of
    lightning.Trainer.
    sequence_parallel: ranks per context; each has a share of its tokens.
    shard_weights: each rank holds a share of the weights (FSDP).
    prefill_kernel: one of `passes.KERNELS`.
    """

    accelerator: str = "auto"
    devices: int | str | Sequence[int] = 1
    num_nodes: Positive = 1
    strategy: str = "auto"
    precision: str | int | None = None
    deterministic: bool | Annotated[str, OneOf("warn")] | None = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: Annotated[str, OneOf("simple", "advanced", "pytorch")] | None = None
    sequence_parallel: Positive = 1
    shard_weights: bool = False
    prefill_kernel: Annotated[str, OneOf(*KERNELS)] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, alone in (("shard_weights", False), ("sequence_parallel", 1)):
            value = getattr(self, key)
            if value != alone and not self.strategy.startswith("ddp"):
                raise BadConfig(
                    f"{key}={value} needs several processes, but trainer.strategy={self.strategy}; "
                    "set trainer.strategy=ddp and trainer.devices, or use trainer=fsdp or trainer=sequence_parallel"
                )
        if self.prefill_kernel == "flash_attn" and find_spec("flash_attn") is None:
            raise BadConfig(
                "prefill_kernel='flash_attn', but the package is not installed: pip install flash-attn, or use auto"
            )


@dataclass(frozen=True)
class Parallel:
    """sequence_parallel: ranks a context; shard_weights: each rank holds a share; prefill_kernel: `passes.KERNELS`."""

    sequence_parallel: int = 1
    shard_weights: bool = False
    prefill_kernel: str = "auto"

    @property
    def in_step(self) -> bool:
        """Whether ranks meet in every layer, and so must run the same passes."""
        return self.shard_weights or self.sequence_parallel > 1

    def context_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's contexts, neighbours; None where it has its own. Every rank must ask."""
        return dist.new_subgroups(self.sequence_parallel)[0] if self.sequence_parallel > 1 else None


def settings(config: TrainerConfig) -> Parallel:
    """What the stages need to know of the processes."""
    return Parallel(**{key: getattr(config, key) for key in OURS})


def trainer(config: TrainerConfig, **more: Any) -> L.Trainer:
    """A Trainer of these and further settings. Raises ValueError where its processes cannot be grouped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its notes on hardware and products
    warnings.filterwarnings("ignore", NOT_OURS, FutureWarning)
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OURS}
    plugins = [*more.pop("plugins", []), *environments()]
    made = L.Trainer(**given, **more, plugins=plugins)
    ranks = config.sequence_parallel
    if made.world_size % ranks:
        raise ValueError(
            f"trainer.sequence_parallel={ranks} does not divide the {made.world_size} processes of trainer.devices="
            f"{config.devices}, trainer.num_nodes={config.num_nodes}; set trainer.devices={ranks}, or "
            "a multiple of it"
        )
    return made


def device(config: TrainerConfig) -> torch.device:
    """Where this process computes: with several GPUs, each its own."""
    return trainer(config, logger=False).strategy.root_device


def is_first(config: TrainerConfig) -> bool:
    """Whether this process is the first of the run's; before they have met."""
    return trainer(config, logger=False).is_global_zero


def shard(model: PreTrainedModel, place: torch.device, head: bool = False) -> None:
    """Leave each rank a share of every layer's weights at `place`; a layer is whole while it runs. Does so once.

    The model must be on the CPU, where its weights are pages of the file that all processes of a node share: one layer
    after the other goes to `place`. The head stays where it is, as hidden states do not need it; head=True brings it
    whole to `place` (2.1 GB of the 70B model).
    """
    if head:
        model.get_output_embeddings().to(place)
    if isinstance(model.base_model, FSDPModule):
        return
    mesh = dist.init_device_mesh(place.type, (dist.get_world_size(),))
    layers: Iterable[torch.nn.Module] = model.base_model.layers  # type: ignore[assignment]
    for block in (*layers, model.base_model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
