"""OScaR: KIVI's groups over turned vectors, of which K's have their lengths taken off first.

"OScaR: The Occam's Razor for Extreme KV Cache Quantization in LLMs and Beyond", arXiv 2605.19660.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import wide
from leank.eval.cache.storage.codecs import BandCodec, OfHeads, PageCodec
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE, Count
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.common.hadamard import hadamard
from leank.shape import kv_shape
from leank.typed import OneOf, Positive


@method("omni_scaled")
@dataclass(frozen=True)
class OmniScaled(Bits):
    """OScaR, Omni-Scaled Canalized Rotation: `kivi` over vectors that a Hadamard matrix H has turned.

      y = x H,   K: code of (y / ||y||) per channel along tokens, beside ||y|| of every token;   V: code of y per token

    A group of K spans tokens, so the longest of them widens the grid of all; without their lengths tokens share one.

    Deviations
    - A token has a length in every head, 16 bits each; in the authors' code it has one over all heads of a layer.
    - Groups have 32 numbers, whose scales make 3 bits a number, as in the paper's bytes; the authors' kernel has 128.
    - Sink and window are the cache's; the authors keep no sink, and the newest 128 to 256 tokens.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.
    """

    bits: Annotated[int, OneOf(2, 4, 8)] = 2  # of every number of K and V
    group: Positive = 32  # numbers that share scale and zero point; see `kivi`

    def check_sizes(self, sizes: Sizes) -> None:
        KIVI(self.bits, self.group).check_sizes(sizes)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        Packing(self.bits, self.group).check(kv_shape(config)[-1])

    def sized(self, index: int, held: Held) -> BandCodec:
        return self._codec()

    def of_layer(self, index: int, prefill: Prefill) -> BandCodec:
        return self._codec()

    def _codec(self) -> BandCodec:
        plain = Packing(self.bits, self.group)
        return OfHeads(((ScaledKeys(plain), TurnedValues(plain)),))


def _turned(x: Tensor) -> Tensor:
    """The product x H, at least in float32."""
    return x.to(wide(x)) @ hadamard(x.shape[-1]).to(x.device, wide(x))


def _turned_back(y: Tensor, dtype: torch.dtype) -> Tensor:
    return (y @ hadamard(y.shape[-1]).to(y).mT).to(dtype)


@dataclass(frozen=True)
class TurnedValues(PageCodec):
    """Values in another basis, stored as `plain` stores them."""

    plain: Packing
    holds = "turned vectors"

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.plain.bits

    @property
    def group(self) -> int:  # type: ignore[override]
        return self.plain.group

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, D] and scales [R, n, D / group, 2] of x H."""
        return self.plain.encode(_turned(x).to(x.dtype), keys)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        y = self.plain.decode(codes, numbers.to(wide(numbers)), keys)
        return _turned_back(y, numbers.dtype)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        return self.plain.pages(head_dim, channels, dtype)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return self.plain.pack(codes, numbers, keys)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        return self.plain.unpack(codes, numbers, dim, keys)


@dataclass(frozen=True)
class ScaledKeys(TurnedValues):
    """Directions of keys in another basis, stored as `plain` stores keys, and a length for every token.

    Numbers [R, n / group, 2 d + group]: scale and zero point of a group's channels, then the lengths of its tokens.
    """

    holds = "turned vectors and their lengths"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d] of y / ||y||, and numbers; a vector of zeros has length 0."""
        y = _turned(x)
        length = y.norm(dim=-1, keepdim=True)
        codes, scales = self.plain.encode((y / torch.where(length > 0, length, 1)).to(x.dtype), keys)
        of_tokens = length.to(x.dtype).flatten(-2).unflatten(-1, (-1, self.group))
        return codes, torch.cat([scales.flatten(-2), of_tokens], -1)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        scales, length = numbers.to(wide(numbers)).split([2 * codes.shape[-1], self.group], -1)
        y = self.plain.decode(codes, scales.unflatten(-1, (-1, 2)), keys)
        return _turned_back(y * length.flatten(-2)[..., None], numbers.dtype)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        (codes, numbers), of_values = self.plain.pages(head_dim, channels, dtype)
        return (codes, numbers + PAGE * dtype.itemsize), of_values

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        scales, length = numbers.split([2 * codes.shape[-1], self.group], -1)
        found = self._band(codes.shape[-1]).pack(codes, scales.unflatten(-1, (-1, 2)), keys)
        return found[0], torch.cat([found[1], length.flatten(-2)], -1)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        numbers, length = numbers.split([numbers.shape[-1] - PAGE, PAGE], -1)
        found, scales = self._band(dim).unpack(codes, numbers, dim, keys)
        return found, torch.cat([scales.flatten(-2), length.unflatten(-1, (-1, self.group))], -1)

    def _band(self, channels: int) -> PageCodec:
        return self.plain.bands(0, channels)[0][0]
