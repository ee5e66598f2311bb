"""The time that a GPU takes to read so many bytes and do nothing else: the floor of every decode kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.bench.kernels.cases import copies_of, median_us

LAUNCHES = [(block, per_sm) for block in (2048, 4096, 8192) for per_sm in (2, 4, 8)]  # words at a time, programs per SM


@triton.jit
def _largest(words, out, blocks, BLOCK: tl.constexpr):
    """Program p: the largest of the words of its share of the blocks, so that no read can be left out."""
    p, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    largest = tl.full([BLOCK], -(2**31), tl.int32)
    for block in range(p * blocks // programs, (p + 1) * blocks // programs):
        largest = tl.maximum(largest, tl.load(words + block * BLOCK + tl.arange(0, BLOCK)))
    tl.store(out + p, tl.max(largest, 0))


def _read(words: Tensor, out: Tensor, block: int) -> None:
    _largest[(len(out),)](words, out, len(words) // block, BLOCK=block, num_warps=8)


def reading_us(size: int) -> float:
    """Microseconds in which `size` bytes, in one piece and not in the L2 cache, can be read: the best of LAUNCHES."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    length = -(-size // 4 // LAUNCHES[-1][0]) * LAUNCHES[-1][0]
    copies = torch.randint(0, 9, (copies_of(size), length), dtype=torch.int32, device="cuda")

    def calls(block: int, per_sm: int) -> list[Callable[[], object]]:
        out = torch.empty(sms * per_sm, dtype=torch.int32, device="cuda")
        return [partial(_read, words, out, block) for words in copies]

    return min(median_us(calls(*launch), repeats=5) for launch in LAUNCHES)
