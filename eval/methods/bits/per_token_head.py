"""Four bits with one grid for each token and head, as servers store them: vLLM's int4_per_token_head, and SAW-INT4.

"SAW-INT4: System-Aware 4-Bit KV-Cache Quantization for Real-World LLM Serving", arXiv 2604.19157.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from leank.eval.cache.storage.codecs import BandCodec, OfHeads, PageCodec, vector_bytes
from leank.eval.cache.storage.segment import PAGE, Count
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.common.hadamard import hadamard
from leank.typed import OneOf, Positive

BITS = 4
LEVELS = 2**BITS - 1
WORD = 4  # bytes beside a vector's codes: a scale in float32, whose four lowest bits are the zero point


@method("per_token_head")
@dataclass(frozen=True)
class PerTokenHead(Bits):
    """A vector x of a token's K or V in one head is turned and stored in 4 bits a number, on a grid of its own.

      y = x diag(signs) H,   s = (max y - min y) / 15,   z = round(-min y / s) in 0 .. 15
      code = round(y / s + z) in 0 .. 15,   x̂ = (code - z) s H^T diag(signs)

    H is block-diagonal, of Hadamard matrices. vLLM's `int4_per_token_head` turns K and V by whole heads, with signs
    that are drawn once; SAW-INT4 turns K alone, without signs. A vector takes 4 bytes beside its codes: s in float32,
    with z in the lowest bits of its mantissa.

    Deviations
    - vLLM draws its signs from another generator; sink and window are stored in 4 bits there, too.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.
    """

    turns: Annotated[str, OneOf("none", "keys", "both")] = "both"  # what H turns
    block: Positive = 128  # largest size of H's blocks
    signs: bool = True  # whether random signs stand before H

    def sized(self, index: int, held: Held) -> BandCodec:
        return ShortGrid()

    def of_layer(self, index: int, prefill: Prefill) -> BandCodec:
        turned, plain = ShortGrid(self.block, self.signs), ShortGrid(1, False)
        return OfHeads(((plain if self.turns == "none" else turned, turned if self.turns == "both" else plain),))


@dataclass(frozen=True)
class ShortGrid(PageCodec):
    """A vector's numbers in 4 bits, with a scale and a zero point of 4 bits in one word of 32 bits."""

    block: int = 128  # largest size of the Hadamard matrices that turn it; 1 turns nothing
    signs: bool = True  # whether random signs stand before them
    bits = BITS
    holds = "one grid per vector"

    def basis(self, dim: int) -> Tensor:
        """diag(signs) H, [dim, dim], float64."""
        turn = hadamard(dim, self.block)
        if not self.signs:
            return turn
        drawn = torch.rand(dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
        return torch.where(drawn < 0.5, -1.0, 1.0)[:, None] * turn

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., d], and the words, as numbers of x's dtype [..., 1 or 2]."""
        y = x.float()
        y = y @ self.basis(x.shape[-1]).to(y)
        low, high = torch.aminmax(y, dim=-1, keepdim=True)
        scale = ((high - low) / LEVELS).clamp(min=1e-6)
        zero = (-low / scale).round().clamp(0, LEVELS)
        codes = (y / scale + zero).round().clamp(0, LEVELS).to(torch.uint8)
        word = scale.view(torch.int32) & -(LEVELS + 1) | zero.to(torch.int32)
        return codes, _as_numbers(word.view(torch.float32), x.dtype)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., d], rounded once."""
        word = _as_words(numbers)
        zero = (word.view(torch.int32) & LEVELS).float()
        y = (codes.float() - zero) * word
        return (y @ self.basis(codes.shape[-1]).to(y).mT).to(numbers.dtype)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, int], tuple[int, int]]:
        word = max(WORD, dtype.itemsize) * PAGE
        return (vector_bytes(channels, BITS) * PAGE, word), (vector_bytes(head_dim, BITS) * PAGE, word)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return super().pack(codes, numbers, keys)[0], numbers.flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        return super().unpack(codes, numbers.unflatten(-1, (PAGE, -1)), dim, keys)


def _as_numbers(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words in float32 [..., 1] as numbers of another dtype, whose bits they are if it is narrower."""
    return words.view(dtype) if dtype.itemsize < WORD else words.to(dtype)


def _as_words(numbers: Tensor) -> Tensor:
    """The words [..., 1] of which `_as_numbers` made numbers."""
    return numbers.contiguous().view(torch.float32) if numbers.dtype.itemsize < WORD else numbers.float()
