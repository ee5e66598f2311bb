"""The slow, obvious form of `leank_train.objective.kl.kl_loss`."""

import torch.nn.functional as F
from torch import Tensor

from leank.head import Head
from leank_train.objective.kl import _rows


def kl_loss_reference(
    head: Head, full: Tensor, scaled: Tensor, lengths: Tensor, reduction: str = "official", chunk: int | None = None
) -> Tensor:
    """Compute `kl_loss` with all logits at once and by autograd; `chunk` has no effect."""
    rows, share = _rows(full, lengths, reduction)
    teacher, student = (head.logits(x.flatten(0, 1)[rows]).log_softmax(-1) for x in (full.detach(), scaled))
    return F.kl_div(student, teacher, reduction="sum", log_target=True) * share
