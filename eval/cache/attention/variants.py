"""Variants of the kernel in Triton that reads a middle in bits: for which heads it is compiled, and what each costs.

A variant is the capacity of every band for channels of K, in steps that a GPU multiplies, and the bits of V. It reads
heads that need no more, so that a layout of many heads has few of them. The kernel in CUDA has one for all heads.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from leank.eval.cache.storage.quantised import Head
from leank.precision import BANDS, GROUP, ROOM, key_bytes, value_bytes

LEAST_LINES = 32  # lines of codes that a product takes, a byte each; a line of the narrow band has four channels
MOST = 4  # variants where V has not more widths: each takes some ten seconds to compile
PAGE_BYTES = 26_000  # with four such pages on its way, a program leaves a GPU's multiprocessor memory for another
Variant = tuple[int, ...]  # capacity of each band for channels, then the bits of V


@functools.lru_cache
def variants(heads: tuple[Head, ...], head_dim: int) -> tuple[Variant, ...]:
    """Variants that read all `heads`, at most MOST where V has no more widths.

    Beginning with what each head needs, two with the same V are made one, those first that cost the least `effort`, and
    that stay within PAGE_BYTES, because the largest variant decides what memory a program takes.
    """
    found = Counter(map(needed, heads))

    def cost(pair: tuple[Variant, Variant]) -> tuple[bool, int]:
        joint = _joint(pair)
        wasted = sum(found[one] * (effort(joint, head_dim) - effort(one, head_dim)) for one in pair)
        return page_bytes(joint, head_dim, 2) > PAGE_BYTES, wasted

    while len(found) > MOST and (pairs := [(a, b) for a, b in combinations(sorted(found), 2) if a[-1] == b[-1]]):
        pair = min(pairs, key=cost)
        number = sum(found.pop(one) for one in pair)
        found[_joint(pair)] += number
    return tuple(sorted(found, key=sum))


def numbers(found: tuple[Variant, ...], heads: np.ndarray) -> np.ndarray:
    """The number of the first variant that reads each of `heads` [..., 6]: [...]."""
    kinds, which = np.unique(heads.reshape(-1, heads.shape[-1]), axis=0, return_inverse=True)
    own = map(needed, kinds.tolist())
    # an empty head is not read
    of_each = [next((i for i, one in enumerate(found) if _reads(one, least)), 0) for least in own]
    return np.array(of_each)[which.reshape(heads.shape[:-1])]


def effort(variant: Variant, head_dim: int) -> int:
    """Instructions of a warp for a page, about: what bounds its speed where the bytes do not.

    Counted in what Triton makes for sm_90: for every 16 channels in 16 bits, 32 in 8 or 4, 128 narrow ones, and V.
    """
    whole, eight, four, narrow, values = variant
    of_keys = 30 * whole // 16 + 120 * (eight + four) // 32 + 600 * narrow // 128
    return 350 + of_keys + {16: 150, 8: 400, 4: 420, 3: 570, 2: 420}[values] * head_dim // 128


def page_bytes(variant: Variant, head_dim: int, itemsize: int, group: int = GROUP, packed: bool = False) -> int:
    """Bytes of a page of K and V for which a variant has room."""
    *bands, values = variant
    of_keys = key_bytes([*bands, bands[-1]], itemsize, group, packed)
    return of_keys + value_bytes(values, head_dim, itemsize, group, packed)


def needed(head: Sequence[int]) -> Variant:
    """The smallest variant that reads a head."""
    steps = (ROOM, LEAST_LINES, LEAST_LINES, 4 * LEAST_LINES)
    return *(-(-n // step) * step for n, step in zip(head[: len(BANDS)], steps, strict=True)), head[-1]


def _joint(pair: Iterable[Variant]) -> Variant:
    return tuple(map(max, *pair))


def _reads(variant: Variant, least: Variant) -> bool:
    return variant[-1] == least[-1] and all(capacity >= own for capacity, own in zip(variant, least, strict=True))
