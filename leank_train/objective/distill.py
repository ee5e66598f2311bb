"""What both stages do beside their objective: rows to compare, L1 on alpha, straight-through masks, learning rates.

Stage 1 minimises distance + lambda * l1_penalty(alpha); stage 2 minimises the distance with straight_through(alpha,
beta) in place of alpha. Where the paper and its published code differ, both forms are here by name.
"""

import torch
from torch import Tensor

from leank_train.forward.plan import to_device

REDUCTIONS = ("official", "paper")
L1_FORMS = ("mean", "sum")
SCHEDULES = ("official", "constant")
STRAIGHT_THROUGH = ("binary", "alpha_beta")


def answer_rows(hidden: Tensor, question_lengths: Tensor, answer_tokens: int) -> Tensor:
    """Return the teacher's rows of the answer, [R, N, hidden]; rows past the last one repeat it.

    hidden: [R, T, hidden], rows of question and answer; question_lengths: [R]; answer_tokens: N, of the longest.
    """
    index = question_lengths[:, None] + torch.arange(answer_tokens, device=question_lengths.device)  # [R, N]
    index = to_device(index.clamp(max=hidden.shape[1] - 1), hidden.device)
    return hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))


def counted(lengths: Tensor, longest: int) -> Tensor:
    """Mark which of `longest` rows are answer tokens: bool [R, longest], on the device of lengths [R]."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def l1_penalty(alpha: Tensor, form: str) -> Tensor:
    """Return ||alpha||_1 (form "sum", the paper), or its mean over channels ("mean", the published code)."""
    return alpha.abs().mean() if form == "mean" else alpha.abs().sum()


def lr_factor(step: int, steps: int, schedule: str) -> float:
    """Return the factor of the learning rate at `step` (from 0) of `steps`.

    schedule: "official" rises in the first fifth, falls in the last fifth, and is never below 0.1; "constant" is 1.
    """
    if schedule == "constant":
        return 1.0
    fifth = steps / 5
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def straight_through(alpha: Tensor, beta: Tensor, variant: str) -> Tensor:
    """Return the mask with the gradient of alpha: all channels, pruned ones included, receive the whole gradient.

    alpha: [L, H, D], scores; beta: bool [L, H, D], the mask.
    variant: "binary" has the value beta (the paper), "alpha_beta" the value alpha * beta (its published code).
    """
    value = beta.to(alpha.dtype) if variant == "binary" else (alpha * beta).detach()
    return value + (alpha - alpha.detach())


def backward(loss: Tensor, of_all: Tensor | None = None) -> None:
    """Run loss.backward() in the calling thread: autograd's thread has a cuBLAS workspace of its own (32 MiB).

    Raises ValueError on every rank, after the backward pass, which this waits for, if the loss of all ranks (`of_all`,
    by default `loss`) is not finite: none of them may go on to a checkpoint.
    """
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    found = loss if of_all is None else of_all
    if not torch.isfinite(found):
        raise ValueError(
            f"the distillation loss is {found.item()}; lower the learning rate (stage1.lr, stage2.lr), "
            "or set model.dtype=float32"
        )
