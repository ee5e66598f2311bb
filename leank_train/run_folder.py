"""The folder of a run: one run at a time writes into it, and its checkpoints belong to one config and its inputs."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from omegaconf import OmegaConf

from leank.backbone import Backbone
from leank.data_gen import source_code
from leank.data_gen.haystack import known_by
from leank.data_gen.reading import digest, read_bytes
from leank.files import Lock, folder_digest, remove_partial, write_json, write_text
from leank.shape import architecture
from leank.shipped import NAMED
from leank.typed import BadConfig
from leank_train.running import parallel
from leank_train.settings import RunConfig, fingerprint, need

INPUTS, CONFIG, LOCK = "inputs.json", "config.yaml", "run.lock"
REQUEUED = 120.0  # seconds that a requeued job waits for the lock of its predecessor


@dataclass(frozen=True)
class Run:
    """A training run that has claimed its folder."""

    config: RunConfig  # the typed settings
    resolved: dict[str, object]  # the same settings in built-in types, as config.yaml holds them
    fingerprint: str  # of the settings
    out: Path  # the run directory
    first: bool  # whether this is the first of the run's processes, which alone writes results
    alone: bool  # whether it is the only one

    def origin(self, backbone: Backbone) -> dict[str, object]:
        """Return what the run's masks tell of their origin."""
        config, pruning, data = self.config, self.config.pruning, self.config.data
        return {
            "model": config.model.name, "architecture": architecture(backbone.model.config),
            "config": self.fingerprint, "sink": pruning.sink, "window": pruning.window, "seed": config.seed,
            "lengths": [data.min_length, data.max_length], "steps": config.steps,
            "versions": {"torch": torch.__version__, "lightning": L.__version__},
        }  # fmt: skip


@contextmanager
def claimed(config: RunConfig, resolved: dict[str, object], out: Path) -> Iterator[Run]:
    """Claim the folder `out` for this run alone, and leave the config and its inputs there unless it is refused.

    The first process holds the lock during the run. A requeued Slurm job waits for its predecessor, whose lock a file
    server may keep for a while after its end.
    """
    first, processes = parallel.role(config.trainer)
    current = Run(config, resolved, fingerprint(resolved), out, first, processes == 1)
    given = {"config": current.fingerprint, **inputs(config, processes)}
    if not first:
        check_folder(current, given)
        yield current
        return
    out.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being written by another training; wait for it, or set hydra.run.dir to a new folder"
    with Lock(out / LOCK, busy, patience=REQUEUED if "SLURM_RESTART_COUNT" in os.environ else 0):
        check_folder(current, given)
        remove_partial(out)
        if not (out / "checkpoints").exists():
            write_json(out / INPUTS, given)
        write_text(out / CONFIG, OmegaConf.to_yaml(OmegaConf.create(resolved)))
        try:
            yield current
        except (ValueError, FileNotFoundError):
            if not (out / "checkpoints").exists():  # refused before its first step
                for name in (INPUTS, CONFIG, LOCK):
                    (out / name).unlink(missing_ok=True)
            raise


def inputs(config: RunConfig, processes: int) -> dict[str, object]:
    """Return as JSON what a mask depends on and the fingerprint does not hold.

    That is the contents of files, the order in which tasks are drawn, and how many documents a step has in all.
    """
    data, model = config.data, config.model.name
    return {
        "tasks": [name for name, share in data.tasks.items() if share],
        "essays": known_by(data.essays),
        "text": known_by(data.text),
        "code": digest("\n".join(source_code.modules(None, "all"))) if data.tasks.get("code") else None,
        "prompts": None if data.prompts is None else digest(read_bytes(Path(data.prompts))),
        "model": folder_digest(Path(model)) if model not in NAMED and os.path.isdir(model) else None,
        "documents_per_step": data.documents * processes // config.trainer.sequence_parallel,
    }


def check_folder(run: Run, given: dict[str, object]) -> None:
    """Raise BadConfig for a folder with checkpoints that this run must not use, or that began with other inputs."""
    out = run.out
    if not (out / "checkpoints").exists():
        return
    need(
        run.config.resume,
        f"resume=false, and {out} holds a run already; set hydra.run.dir to a new folder, or resume=true",
    )
    try:
        earlier = dict(json.loads((out / INPUTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        raise BadConfig(f"{out / INPUTS} is missing or damaged; set hydra.run.dir to a new folder") from None
    trained = (out / "checkpoints" / "stage2" / "done.ckpt").exists()  # and so takes no more documents
    for name, now in given.items():
        then = earlier.get(name)
        need(
            then == now or (trained and name == "documents_per_step"),
            f"{out} was begun with {name}={then}, and this run has {name}={now}: set hydra.run.dir to a new folder, "
            f"or take back what has changed since; {out / CONFIG} has the settings",
        )
