"""Where a prompt that comes in chunks is collected, until it is whole and compressed."""

from torch import Tensor


class PromptRoom:
    """K and V of a prompt that comes in chunks, in buffers that are made once."""

    def __init__(self, k: Tensor, v: Tensor, columns: int) -> None:
        """Make room for `columns` tokens of the batch, heads and dtypes of k and v [B, H, n, D]."""
        self.k, self.v = (x.new_empty(*x.shape[:2], columns, x.shape[3]) for x in (k, v))

    def put(self, k: Tensor, v: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, n, D] from column `at` on; returns K and V up to their end."""
        end = at + k.shape[2]
        self.k[:, :, at:end], self.v[:, :, at:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]
