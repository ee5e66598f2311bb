"""Random choices of what a decoding step reads, and how near kernels come to the plain form of them."""

import torch

from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from tests.helpers.kernels import ON_GPU

DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # in the interpreter what is chosen shall not depend on rounding
CLOSE = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-5}


def random_reads(kind, budget, heads, dim, page=16, seed=0):
    """Quest, or Double Sparsity with an eighth of the channels as labels, whole or in 4 bits."""
    if kind is None:
        return None
    if kind == "quest":
        return Quest(budget, page, 0)
    order = torch.rand(heads, dim, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return Labels(order < dim // 8, budget, 4 if kind == "four bits" else 16)
