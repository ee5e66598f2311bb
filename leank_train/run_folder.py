"""The folder of a run: one run at a time writes into it, and its checkpoints belong to one config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from leank_train.common.files import Lock, remove_partial, write_text
from leank_train.running import parallel
from leank_train.settings import RunConfig, fingerprint, need

REQUEUED = 120.0  # seconds that a requeued job waits for the lock of its predecessor


@dataclass(frozen=True)
class Run:
    """A training run that has claimed its folder.

    config: the typed settings.
    resolved: the same settings in built-in types, as config.yaml holds them.
    fingerprint: of the settings.
    out: the run directory.
    first: whether this is the first of the run's processes, which alone writes results.
    alone: whether it is the only one.
    """

    config: RunConfig
    resolved: dict[str, object]
    fingerprint: str
    out: Path
    first: bool
    alone: bool


@contextmanager
def claimed(config: RunConfig, resolved: dict[str, object], out: Path) -> Iterator[Run]:
    """Claim the folder `out` for this run alone, and leave the config and its fingerprint there.

    The first process holds the lock during the run. A requeued Slurm job waits for its predecessor, whose lock a file
    server may keep for a while after its end.
    """
    first, alone = parallel.role(config.trainer)
    current = Run(config, resolved, fingerprint(resolved), out, first, alone)
    if not first:
        check_folder(current)
        yield current
        return
    out.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being written by another training; wait for it, or set hydra.run.dir to a new folder"
    with Lock(out / "run.lock", busy, patience=REQUEUED if "SLURM_RESTART_COUNT" in os.environ else 0):
        check_folder(current)
        remove_partial(out)
        write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
        write_text(out / "config.hash", current.fingerprint + "\n")
        yield current


def check_folder(run: Run) -> None:
    """Raise BadConfig for a folder with checkpoints that this run must not use, or that another config wrote."""
    out = run.out
    if not (out / "checkpoints").exists():
        return
    file = out / "config.hash"
    before = file.read_text().strip() if file.exists() else "unknown"
    need(
        run.config.resume,
        f"resume=false, and {out} holds a run already; set hydra.run.dir to a new folder, or resume=true",
    )
    need(
        before == run.fingerprint,
        f"{out} holds checkpoints of another config ({before}, this one is {run.fingerprint}; "
        f"compare {out}/config.yaml): set hydra.run.dir to a new folder, or remove that one",
    )
