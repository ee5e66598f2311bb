"""Middle K and V in 2 or 4 bits (KIVI, section 3): the packed form of eval.cache.storage.pages.

A *cell* is `group` numbers that share a scale and a zero point: tokens of one channel in K, channels of one token in V.
It is stored as its codes, the first in the lowest bits, then scale and zero point in the model's dtype. Cells lie where
their numbers lie in a Segment. KIVI keeps a residual of recent tokens whole until they fill a group. Here the window is
that residual: tokens are quantised once, when they leave it, `flush` at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.channels import KeptChannels
from eval.cache.storage.pages import PAGE, Segment, lines, round_up, spread
from eval.cache.storage.upload import update, upload

CHUNK = 1 << 22  # numbers packed at once; the limit bounds the index tensors of a long prompt


@dataclass(frozen=True)
class Packing:
    """How numbers are packed into cells.

    bits: of a number, 2 or 4
    group: numbers in a cell, a divisor of 64 that fills whole bytes

    Raises ValueError for other numbers.
    """

    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits={self.bits} must be 2 or 4")
        if self.group < 1 or PAGE % self.group or self.group * self.bits % 8:
            raise ValueError(f"group={self.group} must divide {PAGE} and be at least {8 // self.bits}; KIVI uses 32")

    def segment(
        self,
        channels: KeptChannels,
        capacity: np.ndarray,
        head_dim: int,
        dtype: torch.dtype,
        values: KeptChannels | None = None,
    ) -> QuantisedSegment:
        """An empty packed segment; the parameters are those of `Segment`, and V keeps all its channels."""
        self.check(head_dim)
        assert values is None
        return QuantisedSegment(channels, capacity, head_dim, dtype, self)

    def check(self, head_dim: int) -> None:
        """Raise ValueError unless whole groups fill a token's channels."""
        if head_dim % self.group:
            raise ValueError(f"group={self.group} does not divide head_dim={head_dim}; choose a smaller group")

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it, or None."""
        return None if self.group >= 16 else f"the kernel reads groups of 16, 32 or 64 numbers, not {self.group}"

    def cell(self, dtype: torch.dtype) -> int:
        """Bytes of a cell: group * bits / 8 of codes, then scale and zero point."""
        return self.group * self.bits // 8 + 2 * dtype.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """Cells [..., bytes] of x [..., group].

        code = round((x - zero) / scale), with zero = min and scale = (max - min) / (2^bits - 1). The scale of a cell of
        equal numbers is 0.
        """
        top = 2**self.bits - 1
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = ((high.to(wide) - low.to(wide)) / top).to(x.dtype)
        step = torch.where(scale == 0, 1, scale).to(wide)
        code = ((x.to(wide) - low.to(wide)) / step).round().clamp(max=top).to(torch.uint8)
        shift = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=x.device)
        codes = (code.unflatten(-1, (-1, len(shift))) << shift).sum(-1, dtype=torch.uint8)
        return torch.cat([codes, torch.cat([scale, low], -1).view(torch.uint8)], -1)

    def unpack(self, cells: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers x̂ [..., group] = code * scale + zero of cells [..., bytes], rounded once, to dtype."""
        codes, ends = cells.split([self.group * self.bits // 8, 2 * dtype.itemsize], -1)
        ends = ends.clone(memory_format=torch.contiguous_format).view(dtype)  # a copy begins at a whole number
        scale, zero = ends.to(torch.promote_types(dtype, torch.float32)).split(1, -1)
        shift = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=cells.device)
        code = ((codes[..., None] >> shift) & (2**self.bits - 1)).flatten(-2)
        return (code * scale + zero).to(dtype)


class QuantisedSegment(Segment):
    """A Segment whose k and v are packed cells, uint8; appended tokens begin at a whole group in every head."""

    def __init__(
        self, channels: KeptChannels, capacity: np.ndarray, head_dim: int, dtype: torch.dtype, packing: Packing
    ) -> None:
        self.packing = packing
        super().__init__(channels, capacity, head_dim, dtype)

    def fresh(self, channels: KeptChannels, capacity: np.ndarray, values: KeptChannels | None) -> QuantisedSegment:
        """An empty segment of the same form."""
        return QuantisedSegment(channels, capacity, self.head_dim, self.dtype, self.packing)

    def _form(self) -> tuple[torch.dtype, int, int]:
        return torch.uint8, self.packing.cell(self.dtype), self.packing.group

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens; the parameters are those of `Segment.append`.

        A prompt's last group may be short of tokens; later tokens must then go to another segment.

        Raises ValueError if a head that takes tokens does not hold whole groups.
        """
        room = np.zeros_like(self.capacity)
        room[rows] = k.shape[2] if count is None else count
        plain = Segment(self.channels, np.where(self.capacity > 0, room, 0), self.head_dim, k.dtype)
        plain.append(rows, k, v, count)
        new, group = plain.length, self.packing.group
        if (self.length % group)[new > 0].any():
            raise ValueError(f"tokens must follow whole groups of {group}; set flush to a multiple of it")
        self._pack_keys(plain)
        self._pack_values(plain)
        self.length += new
        update(self.length_dev, self.length)

    def _pack_keys(self, plain: Segment) -> None:
        """Quantise plain's keys and put them behind those held: per head group by group, channel by channel."""
        group, device = self.packing.group, self.k.device
        per_page = PAGE // group
        sizes = round_up(plain.length, group) // group * self.channels.count  # cells of each head
        rank = spread(np.zeros_like(sizes), sizes, device)
        head = torch.repeat_interleave(upload(sizes.reshape(-1), device), output_size=len(rank))

        def each(of_head: np.ndarray) -> Tensor:
            return upload(of_head.reshape(-1), device)[head]

        channels = each(self.channels.count)
        number, channel = rank // channels, rank % channels
        left = each(plain.length) - number * group  # tokens from this group on

        def cells(start: np.ndarray, number: Tensor) -> Tensor:
            return each(start) + (number // per_page * channels + channel) * per_page + number % per_page

        width, token = self.packing.cell(self.dtype), torch.arange(group, device=device)
        source = cells(plain.k_start // group, number)
        target = cells(self.k_start // width, number + each(self.length // group))
        for some in torch.arange(len(rank), device=device).split(CHUNK // group):
            x = lines(plain.k, group)[source[some]]
            x = x.gather(1, torch.minimum(token, left[some, None] - 1))  # a short group repeats its last token
            lines(self.k, width)[target[some]] = self.packing.pack(x)

    def _pack_values(self, plain: Segment) -> None:
        """Quantise plain's values and put them behind those held, token by token."""
        dim, (_, width) = self.head_dim, self._sizes()[1]
        source = spread(plain.v_start // dim, plain.length, self.v.device)
        target = spread(self.v_start // width + self.length, plain.length, self.v.device)
        step = max(1, CHUNK // dim)
        for some, to in zip(source.split(step), target.split(step), strict=True):
            x = lines(plain.v, dim)[some].unflatten(-1, (-1, self.packing.group))
            lines(self.v, width)[to] = self.packing.pack(x).flatten(-2)

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's room dequantised, a copy: K [pages, channels, 64], V [capacity, D]."""
        width = self.packing.cell(self.dtype)
        cap, count = int(self.capacity[row, head]), int(self.channels.count[row, head])
        numbers = []
        for flat, start, size, _ in self.flats():
            first, last = int(start[row, head]), int(start[row, head] + size[row, head])
            numbers.append(self.packing.unpack(flat[first:last].view(-1, width), self.dtype))
        return numbers[0].view(cap // PAGE, count, PAGE), numbers[1].view(cap, self.head_dim)

    def held(self) -> tuple[int, int]:
        """Bytes of K and of V of the tokens held; a short group counts as a whole one."""
        group, width = self.packing.group, self.packing.cell(self.dtype)
        k = round_up(self.length, group) // group * self.channels.count
        return int(k.sum()) * width, int(self.length.sum()) * (self.head_dim // group) * width
