"""What programs of the decode kernel do while the launch ahead of theirs still runs: they ask for their first bytes.

A launch ends when its last program has merged partial results, and for microseconds most programs have nothing to read.
Programs of the next launch take their places (programmatic dependent launch, compute capability 9.0), look up where
their share begins, and have the memory bring it to L2. They wait for the end of the launch ahead before they read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention import work

FIRST = tl.constexpr(int(work.Column.FIRST))
LAST = tl.constexpr(int(work.Column.LAST))
K_START = tl.constexpr(int(work.Column.K_START))
V_START = tl.constexpr(int(work.Column.V_START))
CHANNELS = tl.constexpr(int(work.Column.CHANNELS))
WIDTH = tl.constexpr(int(work.Column.WIDTH))

# fmt: off


@triton.jit
def shares(start, size, WARPS: tl.constexpr):
    """What each thread asks for of `size` elements from the address `start` on: a byte's address, and bytes.

    One thread of each warp has a share, and the others have none. A request begins and ends at a multiple of 16 bytes.
    """
    thread = tl.arange(0, WARPS * 32)
    warp = (thread // 32).to(tl.int64)
    begin = (start + warp * size // WARPS).to(tl.int64, bitcast=True) // 16 * 16
    end = (start + (warp + 1) * size // WARPS).to(tl.int64, bitcast=True) // 16 * 16
    return begin, tl.where(thread % 32 == 0, end - begin, 0).to(tl.int32)


@triton.jit
def _to_l2(start, size, WARPS: tl.constexpr):
    """Ask L2 for `size` elements from the address `start` on."""
    begin, share = shares(start, size, WARPS)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [begin, share], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_ahead(base, table, line, FIELDS: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr):
    """Ask L2 for the first AHEAD tokens of a line of the work table, K and V.

    base: first element of the ring's keys
    """
    entry = table + line * FIELDS
    first, last = tl.load(entry + FIRST), tl.load(entry + LAST)
    count, width = tl.load(entry + CHANNELS), tl.load(entry + WIDTH)
    k_at, v_at = tl.load(entry + K_START), tl.load(entry + V_START)
    tokens = tl.minimum(last - first, AHEAD)
    _to_l2(base + k_at + first * count, tokens * count, WARPS)
    _to_l2(base + v_at + first * width, tokens * width, WARPS)
