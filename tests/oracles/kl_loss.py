"""The slow, obvious form of `leank_train.objective.kl.kl_loss`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leank.head import Head


def kl_loss_reference(
    head: Head, full: Tensor, scaled: Tensor, lengths: Tensor, reduction: str = "official", chunk: int | None = None
) -> Tensor:
    """Compute `kl_loss` with all logits at once and by autograd; `chunk` has no effect."""
    rows = [torch.cat([x[r, :n] for r, n in enumerate(lengths.tolist())]) for x in (full.detach(), scaled)]
    teacher, student = (head.logits(x).log_softmax(-1) for x in rows)
    total = F.kl_div(student, teacher, reduction="sum", log_target=True)
    return total / (lengths.sum() if reduction == "official" else len(lengths))
