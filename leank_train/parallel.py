"""How the processes of a run share the work: documents, one context's tokens, the weights; settings in conf/trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from leank_train.preempt import environments

OURS = ("sequence_parallel", "shard_weights", "prefill_kernel")


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


def settings(config: DictConfig) -> Parallel:
    """The share of conf/trainer that is ours."""
    return Parallel(**{key: config.trainer[key] for key in OURS})


def trainer(config: DictConfig, **more: Any) -> L.Trainer:
    """A Trainer of conf/trainer and further settings. Raises ValueError where its processes cannot be grouped."""
    given = OmegaConf.to_container(config.trainer, resolve=True)
    assert isinstance(given, dict)
    plugins = [*more.pop("plugins", []), *environments()]
    made = L.Trainer(**{str(k): v for k, v in given.items() if k not in OURS}, **more, plugins=plugins)
    ranks = config.trainer.sequence_parallel
    if made.world_size % ranks:
        raise ValueError(
            f"trainer.sequence_parallel={ranks} does not divide the {made.world_size} processes of trainer.devices="
            f"{config.trainer.devices}, trainer.num_nodes={config.trainer.num_nodes}; set trainer.devices={ranks}, or "
            "a multiple of it"
        )
    return made


def device(config: DictConfig) -> torch.device:
    """Where this process computes: with several GPUs, each its own."""
    return trainer(config, logger=False).strategy.root_device


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
