"""What a stage writes while it runs: a record of its steps, and checkpoints that appear whole."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.types import STEP_OUTPUT
from pydantic import TypeAdapter, with_config
from torch.serialization import MAP_LOCATION
from typing_extensions import TypedDict

from leank.errors import in_one_line, out_of_memory
from leank.files import write_bytes
from leank.tensor_files import DamagedFile, read_checkpoint, write_checkpoint
from leank.typed import STRICT, BadConfig

BINS = 50  # of the histograms of alpha
PREVIOUS = "previous.ckpt"
PARTS = ("state_dict", "loops", "callbacks", "optimizer_states")  # Lightning begins at step 0 without "loops"


def check_origin(state: object, of: list[str], path: str | Path, cure: str) -> None:
    """Raise BadConfig for a checkpoint that another stage or config (`of`) has written, and a user may have copied."""
    if not isinstance(state, dict) or state.get("of") != of:
        raise BadConfig(f"{path} is of another stage or of another config; {cure}")


def cure_of(path: str | Path) -> str:
    """Return what to do about a damaged checkpoint of a stage under way."""
    cure = "remove it to start the stage anew"
    if (previous := Path(path).with_name(PREVIOUS)).exists():
        cure = f"copy {previous} over it to go on from the checkpoint before, or {cure}"
    return cure


@contextmanager
def restoring(path: str | Path, cure: str, within: str = "") -> Iterator[None]:
    """Raise DamagedFile for a checkpoint with other parts than a stage leaves now, as another version may have left.

    Parts that lack, or are of another type or shape, raise what is caught here. Assertions, a full disk and a lack of
    memory pass.

    within: the end of a module's name, outside of which errors have other causes.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
        mine = isinstance(error, DamagedFile | BadConfig) or out_of_memory(error)
        if mine or not any(module.endswith(within) for module in modules):
            raise
        said = f"{type(error).__name__}: {in_one_line(str(error))[:200]}"
        raise DamagedFile(path, f"it holds what no stage leaves ({said})", cure) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all, and name stage and config (`of`); `PREVIOUS` is an older one."""

    def __init__(self, of: Sequence[str]) -> None:
        super().__init__()
        self.of = list(of)

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: str | Path, storage_options: object = None
    ) -> None:
        """Make the checkpoint in memory, where it is small (alpha and two moments), and write it at once."""
        last = Path(path)
        if last.exists():
            write_bytes(last.with_name(PREVIOUS), last.read_bytes())
        write_checkpoint(last, {**checkpoint, "of": self.of})

    def load_checkpoint(
        self, path: str | Path, map_location: MAP_LOCATION = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint without unpickling anything, whatever `weights_only` says.

        Raises DamagedFile, or BadConfig for one of another stage or config.
        """
        cure = cure_of(path)
        found = read_checkpoint(path, cure, map_location)
        check_origin(found, self.of, path, cure)
        if not all(found.get(part) for part in PARTS):
            raise DamagedFile(path, f"it lacks one of {', '.join(PARTS)}", cure)
        return found


@with_config({**STRICT, "extra": "allow"})
class Step(TypedDict):
    """What is read of a step's record."""

    step: int
    distillation: float
    penalty: float
    alpha_mean: float
    lam: NotRequired[float]


@with_config(STRICT)
class Course(TypedDict):
    """What checkpoints hold of a `Recorder`."""

    steps: list[Step]
    histograms: list[tuple[int, list[int]]]
    times: list[float]
    seconds: float
    peak_bytes: int


class Recorder(L.Callback):
    """The course of a stage. Checkpoints hold it, so a run that was stopped and continued has all of it."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)  # steps between two histograms of alpha
        self.steps: list[dict[str, float]] = []  # losses and learning rate of each step
        self.histograms: list[tuple[int, list[int]]] = []  # (step, channels per bin of alpha)
        self.times: list[float] = []  # seconds of each step, with the wait for its data; the first with the set-up
        self.seconds = 0.0  # their sum
        self.peak_bytes = 0  # most memory that tensors of this process took on its GPU; 0 on a CPU

    def on_train_start(self, trainer: L.Trainer, *_: object) -> None:
        self._last = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, index: int
    ) -> None:
        assert isinstance(outputs, Mapping)  # as `Stage.training_step` returns them
        values = {k: float(v.detach()) for k, v in outputs.items() if k != "loss"}  # tensors of this process
        now = time.monotonic()  # reading the values has waited for the GPU
        self.times.append(now - self._last)
        self.seconds, self._last = self.seconds + self.times[-1], now
        if module.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(module.device))
        step = trainer.global_step
        self.steps.append({"step": step, **values, "lr": trainer.optimizers[0].param_groups[0]["lr"]})
        if step % self.every == 0 or step == trainer.max_steps:
            alpha = module.get_parameter("alpha").detach().float().cpu()
            self.histograms.append((step, torch.histc(alpha, BINS, 0.0, 1.0).int().tolist()))

    def state_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in Course.__annotations__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(TypeAdapter(Course).validate_python(state))
