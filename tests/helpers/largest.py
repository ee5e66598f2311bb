"""The size of what a computation makes on the way."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation makes; an expanded one has those that lie in memory."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                in_memory = x.untyped_storage().nbytes() // x.element_size()
                self.numbers = max(self.numbers, min(x.numel(), in_memory))
        return made
