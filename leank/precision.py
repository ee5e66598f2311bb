"""A layout of bits: in how many bits each channel of K, and each head's V, lies in the middle of a cache.

A mask is the case of 0 and 16 bits. The channels of a head with 16, 8 and 4 bits are a *band* each, those with 3 and 2
share one. A band of fewer than 16 bits is stored as KIVI stores numbers (`eval.cache.storage.quantised`):
`GROUP` tokens of a channel of K, or as many channels of a token of V, share a scale and a zero point in the model's
dtype. So a number costs half a bit beside its own. KIVI's groups of 32 cost a whole one; on SmolLM2 they make the
squared error of K and V 0.70 times as large, and half a bit more of code makes it half. *Packed*, the scale and the
zero point of a group are one word of 16 bits, and a number costs a quarter of a bit. A band of 16 bits holds the
numbers as they are. A band has room for a multiple of `ROOM` channels, and so has the third bit of those that have one:
a GPU reads whole words.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Numbers = TypeVar("Numbers", int, np.ndarray, Tensor)

KEY_BITS = (0, 2, 3, 4, 8, 16)  # 0 = pruned
VALUE_BITS = (2, 3, 4, 8, 16)
BANDS = ((16,), (8,), (4,), (3, 2))  # widths of K that are stored together, the widest first
COUNTED = (*BANDS, (3,))  # widths whose channels decide a page's bytes: a third bit has a plane of its own
WHOLE = 16  # bits of a number in the model's dtype, whatever that is
PAGE = 64  # tokens of a page of the middle
GROUP = 64  # numbers that share a scale and a zero point: tokens of a channel of K, channels of a token of V
PACKED = 2  # bytes of a scale and a zero point, packed
ROOM = 16  # a band has room for a multiple of so many channels of K


class Precision:
    """Bits of every channel of K and of every head's V; it owns its tensors.

    key_bits: uint8 [L, H, D] of `KEY_BITS`.
    value_bits: uint8 [L, H] of `VALUE_BITS`; that of a head whose key_bits are all 0 has no meaning, since such a head
        keeps no middle.
    packed: whether a scale and a zero point are one word of 16 bits, not two numbers in the model's dtype
    """

    def __init__(self, key_bits: Tensor, value_bits: Tensor, *, packed: bool = False) -> None:
        """Raise ValueError that names the tensor which is of another type, shape or range."""
        for name, bits, dim, allowed in (
            ("key_bits", key_bits, 3, KEY_BITS),
            ("value_bits", value_bits, 2, VALUE_BITS),
        ):
            shape = f"[{', '.join(['layers', 'kv_heads', 'head_dim'][:dim])}]"
            if bits.dtype != torch.uint8 or bits.dim() != dim or bits.numel() == 0:
                raise ValueError(f"{name} is {bits.dtype} {list(bits.shape)}; give uint8 {shape}")
            if others := set(bits.unique().tolist()) - set(allowed):
                raise ValueError(f"{name} holds {min(others)}; a number has {', '.join(map(str, allowed))} bits")
        if value_bits.shape != key_bits.shape[:2]:
            raise ValueError(f"value_bits {list(value_bits.shape)} is not of the heads of {list(key_bits.shape)}")
        self.packed = packed
        self.key_bits, self.value_bits = (
            bits.detach().cpu().clone(memory_format=torch.contiguous_format) for bits in (key_bits, value_bits)
        )

    @property
    def keep(self) -> Tensor:
        """Channels of K that are not pruned, bool [L, H, D]."""
        return self.key_bits > 0

    def token_bytes(self, itemsize: int = 2, group: int | None = None) -> tuple[Tensor, Tensor]:
        """Bytes of a middle token's K and V in every head, scales and room counted, float64 [L, H] each.

        group: numbers that share a scale, KIVI's; None = those of a layout
        """
        k = key_bytes(counts(self.key_bits).unbind(-1), itemsize, group or GROUP, self.packed)
        v = value_bytes(self.value_bits.long(), self.key_bits.shape[-1], itemsize, group, self.packed)
        v = v * self.keep.any(-1)
        return k.double() / PAGE, v.double() / PAGE

    @property
    def middle_bytes(self) -> float:
        """Bytes of a middle token over those of a dense one, K and V of 16 bits: what a budget bounds."""
        return self.share()

    def share(self, group: int | None = None) -> float:
        """Return `middle_bytes`, where `group` numbers share a scale as in `token_bytes`."""
        return float(sum(x.sum() for x in self.token_bytes(group=group)) / (4 * self.key_bits.numel()))


def value_group(head_dim: int) -> int:
    """Channels of V that share a scale: GROUP, or as many as divide head_dim and GROUP."""
    return math.gcd(head_dim, GROUP)


def counts(key_bits: Tensor) -> Tensor:
    """Channels of each of `COUNTED`, int64 [..., len(COUNTED)]: in 16, 8 and 4 bits, in 3 or 2, and in 3 bits.

    key_bits: [..., D]
    """
    return torch.stack([torch.isin(key_bits, torch.tensor(own).to(key_bits)).sum(-1) for own in COUNTED], -1)


# The bytes of a page, PAGE tokens of one head, of which the constants of the kernels are made.


def scale_bytes(itemsize: int = 2, packed: bool = False) -> int:
    """Bytes of a group's scale and zero point."""
    return PACKED if packed else 2 * itemsize


def key_bytes(channels: Sequence[Numbers], itemsize: int = 2, group: int = GROUP, packed: bool = False) -> Numbers:
    """Bytes of a page of K; channels: five numbers, arrays or tensors, as `counts` has them."""
    whole, eight, four, narrow, third = (-(-n // ROOM) * ROOM for n in channels)
    scales = PAGE // group * scale_bytes(itemsize, packed)
    coded = eight * (PAGE + scales) + four * (PAGE // 2 + scales) + narrow * (PAGE // 4 + scales)
    return whole * (PAGE * itemsize) + coded + third * (PAGE // 8)


def value_bytes(
    bits: Numbers, head_dim: int, itemsize: int = 2, group: int | None = None, packed: bool = False
) -> Numbers:
    """Bytes of a page of V in so many bits, a number, array or tensor; group: None = that of `value_group`."""
    scales = head_dim // (group or value_group(head_dim)) * scale_bytes(itemsize, packed)
    coded = PAGE * head_dim * bits // 8 + PAGE * scales
    return coded + (bits == WHOLE) * (PAGE * head_dim * itemsize - coded)


def channel_bytes(bits: int, itemsize: int = 2, group: int = GROUP, packed: bool = False) -> int:
    """Bytes that a channel of K in so many bits takes of a page, where no room is spare."""
    return key_bytes([ROOM * (bits in own) for own in COUNTED], itemsize, group, packed) // ROOM
