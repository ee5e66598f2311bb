"""What a stage minimises, by name: one class in one file of this folder, which is found by scanning the folder.

    @objective("cosine")
    class Cosine(Objective):
        def distance(self, full, scaled, lengths):
            ...

in a file of this folder makes `stage1.objective=cosine` a setting.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank.head import FLOAT16_FACTOR, check_head
from leank.registry import import_all


class Objective(ABC):
    """The distance of student and teacher that both stages minimise."""

    needs_head: ClassVar[bool] = False  # whether it needs an output head (`leank.head.check_head`)

    def __init__(self, model: PreTrainedModel, reduction: str) -> None:
        """Take the frozen model and the stage's `reduction`: "official" is a mean over answer tokens, "paper" a sum."""
        self.model, self.reduction = model, reduction
        if self.needs_head:
            check_head(model)

    @abstractmethod
    def distance(self, full: Tensor, scaled: Tensor, lengths: Tensor) -> Tensor:
        """Return the distance at the answer tokens, a scalar in at least float32, with a gradient in `scaled`.

        full, scaled: [R, N, hidden], hidden states of teacher and student after the final norm.
        lengths: [R] on the host, answer tokens of each sequence; rows past them mean nothing.
        """

    @property
    def factor(self) -> float:
        """Factor of the loss in the backward pass, by which the gradient is divided again.

        Most gradients of an official loss, a mean over thousands of units and tokens, lie below 6e-8, the smallest
        number of float16. Those of the paper's loss, a sum, would lie beyond its largest one.
        """
        return FLOAT16_FACTOR if self.model.dtype == torch.float16 and self.reduction == "official" else 1.0


KNOWN: dict[str, type[Objective]] = {}
O = TypeVar("O", bound=type[Objective])  # noqa: E741


def objective(name: str) -> Callable[[O], O]:
    """Register a class as the objective called `name`."""

    def register(kind: O) -> O:
        KNOWN[name] = kind
        return kind

    return register


def objectives() -> dict[str, type[Objective]]:
    """Return every objective by name, from all files of this folder."""
    import_all("leank_train.objective")
    return dict(sorted(KNOWN.items()))
