"""Which tokens of a middle stay: the largest of ranks, by their bits, in one launch.

A rank is turned into a whole number of the same order, and the smallest that stays is found bit by bit, by counting.
Of equal ranks the later tokens stay. The slow form is eval.cache.storage.eviction.largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # most tokens that a program looks at together

# fmt: off


@triton.jit
def keys_of(x):
    """Numbers of uint32 in the order of the float32 numbers x, of which -0 is 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def numbers_of(key):
    """The float32 numbers whose `keys_of` are key."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def _count(ranked, tokens, key, BLOCK: tl.constexpr):
    """How many of ranked[0 : tokens] are at least `key`."""
    count = tl.zeros([BLOCK], tl.int32)
    for at in range(0, tokens, BLOCK):
        t = at + tl.arange(0, BLOCK)
        count += ((keys_of(tl.load(ranked + t, mask=t < tokens, other=0.0)) >= key) & (t < tokens)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def least(ranked, tokens, count, BLOCK: tl.constexpr):
    """The key of the count-th largest of ranked[0 : tokens], 0 if there are fewer."""
    key = tl.full([], 0, tl.uint32)
    for i in range(32):
        more = key | (tl.full([], 1, tl.uint32) << (31 - i))
        key = tl.where(_count(ranked, tokens, more, BLOCK) >= count, more, key)
    return key


@triton.jit
def surplus(ranked, tokens, count, key, BLOCK: tl.constexpr):
    """How many tokens of rank `key`, which `least` found for `count`, leave; the first of them do."""
    return tl.maximum(_count(ranked, tokens, key, BLOCK) - count, 0)


@triton.jit
def among(rank_key, there, key, leave, passed):
    """Which of a block of keys stay, and how many of rank `key` have passed with it."""
    same = ((rank_key == key) & there).to(tl.int32)
    order = passed + tl.cumsum(same, 0) - same
    return there & ((rank_key > key) | ((same != 0) & (order >= leave))), passed + tl.sum(same, 0)


@triton.jit
def _heaviest(ranked, stay, length_ptr, ranked_b, ranked_h, heavy, most, H: tl.constexpr, BLOCK: tl.constexpr):
    """Program b * H + h: mark the `heavy` tokens of a middle that rank highest in ranked [B, H, >= most]."""
    place = tl.program_id(0).to(tl.int64)
    tokens = tl.load(length_ptr + place).to(tl.int32)
    ranked += place // H * ranked_b + place % H * ranked_h
    key = least(ranked, tokens, heavy, BLOCK)
    leave = surplus(ranked, tokens, heavy, key, BLOCK)
    passed = tl.full([], 0, tl.int32)
    for at in range(0, tokens, BLOCK):
        t = at + tl.arange(0, BLOCK)
        there = t < tokens
        chosen, passed = among(keys_of(tl.load(ranked + t, mask=there, other=0.0)), there, key, leave, passed)
        tl.store(stay + place * most + t, chosen.to(tl.uint8), mask=there)


# fmt: on


def block(tokens: int) -> int:
    """How many of a head's tokens are looked at together."""
    return min(BLOCK, max(64, triton.next_power_of_2(tokens)))


def heaviest(ranked: Tensor, length: Tensor, count: int) -> Tensor:
    """The `count` highest-ranked tokens of each head, bool [B, H, n], undefined past `length` [B, H]; see `largest`."""
    stay = torch.empty(ranked.shape, dtype=torch.bool, device=ranked.device)
    _heaviest[(length.numel(),)](
        *(ranked, stay.view(torch.uint8), length, ranked.stride(0), ranked.stride(1), count, ranked.shape[-1]),
        H=ranked.shape[1],
        BLOCK=block(ranked.shape[-1]),
    )
    return stay
