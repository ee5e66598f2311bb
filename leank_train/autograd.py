"""The context of this package's own autograd functions, which torch leaves without a type."""

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """What torch hands to `forward` and `backward`; a function's own protocol adds the attributes that it sets.

    needs_input_grad: for each argument after the context, whether its gradient is needed.
    saved_tensors: what `save_for_backward` was given; an entry that was None is None.
    """

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""
