"""How the processes of a run share the work: documents, the tokens of a context, and the weights.

conf/train/trainer has the settings.
"""

import logging
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, Self

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from leank.data_gen.amount import amount
from leank.errors import in_one_line
from leank.kernels import KERNELS
from leank.typed import BadConfig, Checked, OneOf, Positive, shown
from leank_train.running.preempt import Signals, environments

OWN_SETTINGS = ("sequence_parallel", "shard_weights", "prefill_kernel")  # settings that lightning.Trainer does not take
WHOLE = (None, 32, "32", "32-true", 64, "64", "64-true")  # precisions of Lightning that round nothing to half
GONE = ("Connection closed by peer", "Connection reset by peer")  # of gloo; NCCL waits, until a launcher ends it
LIGHTNING_NOTES = (  # what Lightning says at every start, of its own use of torch and of Slurm
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The `srun` command is available on your system but is not used",
)


@dataclass(frozen=True)
class TrainerConfig(Checked):
    """Settings of the processes, conf/train/trainer."""

    accelerator: str = "auto"  # up to `deterministic`, these are arguments of lightning.Trainer
    devices: int | str | Sequence[int] = 1
    num_nodes: Positive = 1
    strategy: str = "auto"
    precision: str | int | None = None
    deterministic: bool | Annotated[str, OneOf("warn")] | None = False
    sequence_parallel: Positive = 1  # ranks per context; each of them holds a share of its tokens
    shard_weights: bool = False  # whether each rank holds a share of the weights (FSDP)
    prefill_kernel: Annotated[str, OneOf(*KERNELS)] = "auto"  # attention kernel of the prefill

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, alone in (("shard_weights", False), ("sequence_parallel", 1)):
            value = getattr(self, key)
            if value != alone and not self.strategy.startswith("ddp"):
                raise BadConfig(
                    f"{key}={value} needs several processes, but trainer.strategy={self.strategy}; "
                    "set trainer.strategy=ddp and trainer.devices, or use trainer=fsdp or trainer=sequence_parallel"
                )
        if self.precision not in WHOLE:
            raise BadConfig(
                f"precision={shown(self.precision)} rounds the scores or the logits of the loss; leave "
                "trainer.precision=null, and choose the type of the weights with model.dtype"
            )
        if self.prefill_kernel == "flash_attn" and find_spec("flash_attn") is None:
            raise BadConfig(
                "prefill_kernel='flash_attn', but the package is not installed: pip install flash-attn, or use auto"
            )

    def context_ranks(self) -> dist.ProcessGroup | None:
        """The neighbouring ranks that share this one's contexts; None if it has its own. Every rank must call it."""
        return _neighbours(self.sequence_parallel, dist.group.WORLD) if self.sequence_parallel > 1 else None


@cache
def _neighbours(size: int, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of `size` neighbouring ranks; one for all phases, since each has connections and buffers of its own."""
    return dist.new_subgroups(size)[0]


@dataclass(frozen=True)
class Division:
    """How the processes of a run divide documents that they read outside of its steps.

    A rank, or the ranks that share contexts together, takes one document of each round. All take part in every round,
    because they may need each other's weights; one that is left without a document repeats the last, which counts once.
    """

    number: int = 0  # of this rank's document in a round
    width: int = 1  # documents of a round
    ranks: dist.ProcessGroup | None = None  # processes with a share of this rank's document; None: this has all
    first: bool = True  # whether this is the run's first process

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """Return that of the processes that have met (`met`). Every rank must call it."""
        if not dist.is_initialized():
            return cls()
        rank, together = dist.get_rank(), config.sequence_parallel
        return cls(rank // together, dist.get_world_size() // together, config.context_ranks(), rank == 0)

    @property
    def leads(self) -> bool:
        """Whether this process counts what all processes with a share of its document know."""
        return self.ranks is None or dist.get_rank(self.ranks) == 0

    def rounds(self, count: int, done: int = 0) -> Iterator[tuple[int, bool, int]]:
        """Yield for each round the number of this rank's document, whether it counts, and how many are then done.

        count: documents in all; done: those that need not be read again.
        """
        for start in range(done, count, self.width):
            mine = start + self.number
            yield min(mine, count - 1), mine < count, min(start + self.width, count)

    def sum_(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if dist.is_initialized():
            for one in tensors:
                dist.all_reduce(one)

    def leave_together(self, signals: Signals | None, device: torch.device) -> None:
        """Raise SystemExit in every process if a signal has come to any of them; all call it between rounds."""
        if signals is None or not dist.is_initialized():
            return
        received = torch.tensor(signals.received, device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        if received:
            signals.received = int(received)
            signals.leave(first=self.first)


def trainer(config: TrainerConfig, **more: Any) -> L.Trainer:
    """Make a Trainer. Raises ValueError if sequence_parallel does not divide the number of processes."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # its notes on hardware and products
    for words in LIGHTNING_NOTES:
        warnings.filterwarnings("ignore", words)
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OWN_SETTINGS}
    plugins = [*more.pop("plugins", []), *environments()]
    try:
        made = L.Trainer(**given, **more, plugins=plugins)
    except Exception as error:  # Lightning raises many kinds for settings that it does not understand
        told = ", ".join(f"trainer.{name}={shown(value)}" for name, value in given.items() if value is not None)
        raise BadConfig(f"{told} cannot work: {in_one_line(str(error))}") from error
    ranks = config.sequence_parallel
    if made.world_size % ranks:
        raise ValueError(
            f"trainer.sequence_parallel={ranks} does not divide the {amount(made.world_size, 'process')} of "
            f"trainer.devices={config.devices}, trainer.num_nodes={config.num_nodes}; set trainer.devices={ranks}, or "
            "a multiple of it"
        )
    return made


def device(config: TrainerConfig) -> torch.device:
    """The device of this process; each process has its own GPU."""
    return trainer(config, logger=False).strategy.root_device


@contextmanager
def met(config: TrainerConfig) -> Iterator[None]:
    """Start the other processes, unless `srun` or `torchrun` has, and wait for all; they call this, too.

    An error within it in the first process ends those that it has started, which would wait for it. Raises
    ChildProcessError, in place of what a collective says, where another process has ended.
    """
    made = trainer(config, logger=False)
    launcher = made.strategy.launcher
    if launcher is not None:
        launcher.launch(made.strategy.setup_environment)
    try:
        yield
    except SystemExit:  # all leave together
        raise
    except BaseException as error:
        if launcher is not None:
            launcher.kill(signal.SIGKILL)
        if dist.is_initialized() and any(words in str(error) for words in GONE):
            raise ChildProcessError("another process of this run has ended; what it has said says why") from error
        raise


def role(config: TrainerConfig) -> tuple[bool, int]:
    """Whether this process is the run's first, and how many there are; the processes need not be connected."""
    made = trainer(config, logger=False)
    return made.is_global_zero, made.world_size


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Leave each rank a share of every layer's weights; a layer is gathered while it runs.

    model: on the CPU, where all processes of a node share the pages of its file. Its layers move one after the other.
        The head, which hidden states do not need, moves to `device` as a whole (2.1 GB of the 70B model).
    """
    if (head := model.get_output_embeddings()) is not None:
        head.to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    layers: Iterable[torch.nn.Module] = model.base_model.layers  # type: ignore[assignment]
    for block in (*layers, model.base_model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
