"""Kitty: the middle in 2 bits, but for the largest channels of K, which have 4.

"Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision Boost", arXiv 2511.18643.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.cache.storage.codecs import VECTOR_FOLDS, PageCodec, fold, unfold, vector_bytes
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE, Count, round_up
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.bits.kivi import KIVI
from leank.shape import kv_shape
from leank.typed import Positive

FOLDS, WORD = VECTOR_FOLDS[2], 8  # bytes that the codes of a page fill in whole, so that numbers follow


@method("kitty")
@dataclass(frozen=True)
class Kitty(Bits):
    """KIVI's rounding, in which the n = floor(boosted D) channels of K with the largest mean |k| have 4 bits, others 2.

    Every group of tokens chooses its own channels. V has 2 bits. Of a code of 4 bits the lower two lie with all others,
    and the upper two beside them, with the numbers of their channels, a byte each.

    Deviations
    - A group has `group` tokens, or channels of V, where the published code has 128 of both.
    - Sink and window are the cache's; the published code keeps 32 first tokens, and V longer than K.
    - A group of equal numbers has scale 0 and comes back exactly, as in `kivi`.
    - Plain PyTorch reads the numbers: answers and bytes are the method's, time is not.
    """

    boosted: Annotated[float, Ge(0), Le(1)] = 0.125  # share of K's channels that have 4 bits; or 0.25 in the paper
    group: Positive = 32  # numbers that share a scale and a zero point; see `kivi`

    def check_sizes(self, sizes: Sizes) -> None:
        KIVI(2, self.group).check_sizes(sizes)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        Packing(2, self.group).check(kv_shape(config)[-1])

    def of_layer(self, index: int, prefill: Prefill) -> Boosted:
        return Boosted(self.boosted, Packing(2, self.group))

    def sized(self, index: int, held: Held) -> Boosted:
        return Boosted(self.boosted, Packing(2, self.group))


@dataclass(frozen=True)
class Boosted(PageCodec):
    """Kitty's codec: share of the kept channels that have 4 bits, and the codec of V and of the other channels."""

    share: float
    plain: Packing
    bits = 2
    holds = "channels whose width every group of tokens chooses"

    @property
    def group(self) -> int:  # type: ignore[override]
        return self.plain.group

    def number(self, channels: Count) -> Count:
        """How many of so many channels have 4 bits."""
        return channels * round(self.share * 10**6) // 10**6

    def of_values(self, head: int) -> PageCodec:
        return self.plain

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d] and scales [R, n / group, d, 2] of K."""
        groups = x.unflatten(-2, (-1, self.group))
        sizes = groups.abs().mean(-2, dtype=torch.promote_types(x.dtype, torch.float32))
        top = sizes.argsort(dim=-1, descending=True, stable=True)[..., : int(self.number(x.shape[-1]))]
        large = torch.zeros_like(groups[..., 0, :], dtype=torch.bool).scatter(-1, top, True)  # [R, n / group, d]
        (codes, scales), (fine, of_fine) = self.plain.quantise(x), Packing(4, self.group).quantise(x)
        of_tokens = large.repeat_interleave(self.group, -2)
        return torch.where(of_tokens, fine, codes), torch.where(large[..., None], of_fine, scales)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        return self.plain.restore(codes, numbers)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        groups, large = PAGE // self.group, self.number(channels)
        codes = PAGE * (vector_bytes(channels, 2) + vector_bytes(large, 2)) + groups * large
        return (round_up(codes, WORD), groups * 2 * dtype.itemsize * channels), self.plain.pages(head_dim, 0, dtype)[1]

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Lower bits of all channels, upper bits of those with 4, whose codes reach beyond 3, and their numbers."""
        groups = codes.unflatten(-2, (-1, self.group))
        at = groups.amax(-2).topk(int(self.number(codes.shape[-1])), -1).indices  # [..., groups, large]
        upper = (groups >> 2).gather(-1, at[..., None, :].expand(*groups.shape[:-1], -1))
        parts = [fold(pad(x, (0, -x.shape[-1] % 4)), FOLDS).flatten(-3) for x in (groups & 3, upper)]
        found = torch.cat([*parts, at.to(torch.uint8).flatten(-2)], -1)
        return pad(found, (0, -found.shape[-1] % WORD)), numbers.flatten(-3)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, d] and scales [..., 64 / group, d, 2]."""
        groups, large = PAGE // self.group, int(self.number(dim))
        sizes = [PAGE * -(-n // 4) for n in (dim, large)]
        lower, upper, at, _ = codes.split([*sizes, groups * large, codes.shape[-1] - sum(sizes) - groups * large], -1)
        found = unfold(lower.unflatten(-1, (groups, self.group, -1)), FOLDS)[..., :dim]
        if large:
            upper = unfold(upper.unflatten(-1, (groups, self.group, -1)), FOLDS)[..., :large] << 2
            at = at.unflatten(-1, (groups, 1, large)).long().clamp(max=dim - 1)  # room that is not filled has any byte
            found = found | torch.zeros_like(found).scatter(-1, at.expand_as(upper), upper)
        return found.flatten(-3, -2), numbers.unflatten(-1, (groups, dim, 2))
