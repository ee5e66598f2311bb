"""Early stopping: a stage ends once documents that it does not train on no longer gain from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from leank_train.data import Batch, RetrievalData
from leank_train.objective import steering
from leank_train.stages import Stage, StageConfig

_RISE = 0.2  # share of a stage in which the learning rate rises


def first_look(config: StageConfig) -> int:
    """Return the first step after which a stage may look at held-out documents.

    Before it the scores have yet to fall, or the learning rate to rise: a mask of them says nothing of later ones.
    """
    return math.ceil(config.steps * (steering.FALL if config.lam == steering.AUTO else _RISE))


def best_look(looks: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return step and loss of the look with the smallest loss, the first of equals."""
    return min(looks, key=lambda look: look[1])


class EarlyStop(L.Callback):
    """Every few steps, measures the mask that the scores give on held-out documents, and keeps the best scores.

    The stage ends after `patience` looks in a row that found nothing better. All ranks see the loss of all documents,
    so they stop together. Checkpoints hold the looks and the best scores.

    config: settings of the stage; it has patience.

    looks: (step, loss) of each look.
    best: scores [L, H, D] of the look with the smallest loss; None before the first look.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config, self.first = config, first_look(config)
        self.looks: list[tuple[int, float]] = []
        self.best: Tensor | None = None
        self._batches: list[Batch] = []

    @property
    def over(self) -> bool:
        """Whether the stage is to end."""
        if not self.looks:
            return False
        since = len(self.looks) - 1 - self.looks.index(best_look(self.looks))
        return since >= self.config.patience

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Make the held-out documents; a stage that had ended when it was saved takes no step more."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, RetrievalData)
        # Lightning moves the batches of steps to the device, not these
        self._batches = [batch.to(module.device) for batch in data.held_out(self.config.heldout_documents)]
        if self.over:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Look, if it is time.

        Raises ValueError if the loss is not finite.
        """
        step = trainer.global_step
        if step < self.first or (step % self.config.heldout_every and step != trainer.max_steps):
            return
        assert isinstance(module, Stage)
        loss = module.heldout(self._batches)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of held-out documents is {loss}; set model.dtype=float32")
        self.looks.append((step, loss))
        if best_look(self.looks) == (step, loss):
            self.best = module.alpha.detach().cpu().clone()
        module.log(f"{type(module).__name__.lower()}/heldout", loss)
        if self.over:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, object]:
        """The looks so far, and the best scores."""
        return {"looks": self.looks, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after earlier looks."""
        self.looks, self.best = [(step, loss) for step, loss in state["looks"]], state["best"]

    def restore(self, stage: Stage) -> None:
        """Give the stage its best scores, if there was a look."""
        if self.best is not None:
            with torch.no_grad():
                stage.alpha.copy_(self.best)
