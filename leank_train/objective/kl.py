"""The KL objective: L2 weighs all directions of hidden states alike; the output head W shows which decide a token."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leank.head import LOGITS_AT_ONCE, Head, divergence
from leank_train.forward.plan import to_device
from leank_train.objective.base import Objective, objective
from leank_train.objective.distill import counted


@objective("kl")
class KL(Objective):
    """KL(softmax(W h_full) || softmax(W h_scaled)) with the model's output head W."""

    needs_head = True

    def distance(self, full: Tensor, scaled: Tensor, lengths: Tensor) -> Tensor:
        return kl_loss(Head.of(self.model), full, scaled, lengths, self.reduction)


def kl_loss(
    head: Head, full: Tensor, scaled: Tensor, lengths: Tensor, reduction: str = "official", chunk: int | None = None
) -> Tensor:
    """Return KL(softmax(W h_full) || softmax(W h_scaled)) at the answer tokens, computed in float32 (float64 stays).

    full, scaled, lengths: as in `Objective.distance`; only `scaled` gets a gradient.
    reduction: "official" is the mean over all answer tokens, "paper" their sum over the number of sequences R.
    chunk: answer tokens whose logits are held at a time; LOGITS_AT_ONCE decides by default.
    """
    if chunk is None:
        chunk = max(1, LOGITS_AT_ONCE["cuda" if full.is_cuda else "cpu"] // head.weight.shape[0])
    rows = to_device(counted(lengths, full.shape[1]).flatten().nonzero().squeeze(1), full.device)  # of R * N
    share = 1 / (len(rows) if reduction == "official" else len(lengths))
    return _KL.apply(scaled.flatten(0, 1)[rows], full.flatten(0, 1)[rows], head, chunk) * share


class _KL(torch.autograd.Function):
    """The sum over rows; d logits = softmax(student) - softmax(teacher) is pulled back at once: no logits are kept."""

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, full: Tensor, head: Head, chunk: int) -> Tensor:
        total, gradients = [], []
        for full_rows, scaled_rows in zip(full.split(chunk), scaled.split(chunk), strict=True):
            logits = head.logits(scaled_rows)
            student = logits.log_softmax(-1)
            teacher = head.logits(full_rows).log_softmax(-1)
            total.append(divergence(teacher, student).sum())
            if ctx.needs_input_grad[0]:
                gradients.append(head.pull_back(student.exp_().sub_(teacher.exp_()), logits))
        ctx.dtype = scaled.dtype
        ctx.save_for_backward(*([torch.cat(gradients)] if gradients else []))
        return torch.stack(total).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * d_total).to(ctx.dtype), None, None, None
