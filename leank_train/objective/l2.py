"""The L2 objective, the paper's: the squared distance of hidden states at the answer tokens."""

import torch
from torch import Tensor

from leank_train.forward.plan import to_device
from leank_train.objective.base import Objective, objective
from leank_train.objective.distill import counted


@objective("l2")
class L2(Objective):
    """||H_full - H_scaled||_2^2 (section 3.1), computed in float32 (float64 stays).

    "official" is the mean over hidden units and all answer tokens of the batch; "paper" is the sum over both, averaged
    over the R sequences.
    """

    def distance(self, full: Tensor, scaled: Tensor, lengths: Tensor) -> Tensor:
        dtype = torch.promote_types(full.dtype, torch.float32)
        counts = to_device(counted(lengths, full.shape[1]), full.device)
        # Padding is replaced, not multiplied by 0: a NaN in it must not reach the loss or the gradient.
        squares = torch.where(counts[..., None], full.to(dtype) - scaled.to(dtype), 0.0).square()
        return squares.mean(-1).sum() / counts.sum() if self.reduction == "official" else squares.sum() / len(lengths)
