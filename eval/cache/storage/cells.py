"""KIVI's arithmetic (section 3): numbers to codes of 2, 4 or 8 bits, and back.

A *cell* is `group` numbers that share a scale and a zero point: tokens of one channel in K, channels of one token in V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leank.eval.cache.storage.segment import PAGE


@dataclass(frozen=True)
class Cells:
    """How numbers join into cells.

    bits: of a number, 2, 4 or 8
    group: numbers in a cell, a divisor of 64 that fills whole bytes

    Raises ValueError for other numbers.
    """

    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits} must be 2, 4 or 8")
        if self.group < 1 or PAGE % self.group or self.group * self.bits % 8:
            raise ValueError(f"group={self.group} must divide {PAGE} and be at least {8 // self.bits}; KIVI uses 32")

    def check(self, head_dim: int) -> None:
        """Raise ValueError unless whole groups fill a token's channels."""
        if head_dim % self.group:
            raise ValueError(f"group={self.group} does not divide head_dim={head_dim}; choose a smaller group")

    def cell(self, dtype: torch.dtype) -> int:
        """Bytes of a cell: group * bits / 8 of codes, then scale and zero point."""
        return self.group * self.bits // 8 + 2 * dtype.itemsize

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [..., A, N] and scales [..., A / group, N, 2] of x [..., A, N], whose cells lie along A.

        code = round((x - zero) / scale), with zero = min and scale = (max - min) / (2^bits - 1). The scale of a cell of
        equal numbers is 0.
        """
        x, top = x.unflatten(-2, (-1, self.group)), 2**self.bits - 1
        low, high = torch.aminmax(x, dim=-2, keepdim=True)
        wide = torch.promote_types(x.dtype, torch.float32)
        of_top = low.new_full((), top, dtype=wide)  # CUDA divides by a Python number inexactly
        scale = ((high.to(wide) - low.to(wide)) / of_top).to(x.dtype)
        step = torch.where(scale == 0, 1, scale).to(wide)
        codes = ((x.to(wide) - low.to(wide)) / step).round().clamp(max=top).to(torch.uint8)
        return codes.flatten(-3, -2), torch.stack([scale.squeeze(-2), low.squeeze(-2)], -1)

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers x̂ = code * scale + zero, rounded once, of codes and scales from `quantise`."""
        scale, zero = scales.to(torch.promote_types(scales.dtype, torch.float32)).unsqueeze(-3).unbind(-1)
        return (codes.unflatten(-2, (-1, self.group)) * scale + zero).to(scales.dtype).flatten(-3, -2)
