"""The time that a GPU takes to read so many bytes and do nothing else: the floor of every decode kernel."""

import triton
import triton.language as tl
from torch import Tensor

LAUNCHES = [(block, per_sm) for block in (2048, 4096, 8192) for per_sm in (2, 4, 8)]  # words at a time, programs per SM


@triton.jit
def _largest(words, out, blocks, BLOCK: tl.constexpr):
    """Program p: the largest of the words of its share of the blocks, so that no read can be left out."""
    p, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    largest = tl.full([BLOCK], -(2**31), tl.int32)
    for block in range(p * blocks // programs, (p + 1) * blocks // programs):
        largest = tl.maximum(largest, tl.load(words + block * BLOCK + tl.arange(0, BLOCK)))
    tl.store(out + p, tl.max(largest, 0))


def read(words: Tensor, out: Tensor, block: int) -> None:
    """Read int32 words [n], `block` at a time, with a program for each entry of `out`, which gets its largest word."""
    _largest[(len(out),)](words, out, len(words) // block, BLOCK=block, num_warps=8)
