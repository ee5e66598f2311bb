"""The schedule's columns and kinds of parts (`eval.cache.attention.schedule`) as constants of kernels in Triton."""

import triton.language as tl

from leank.eval.cache.attention import schedule
from leank.eval.cache.attention.schedule import Split

SINK, WINDOW, TAIL = tl.constexpr(schedule.SINK), tl.constexpr(schedule.WINDOW), tl.constexpr(schedule.TAIL)
FIELDS = tl.constexpr(schedule.FIELDS)
KIND = tl.constexpr(Split.KIND.value)
ROW = tl.constexpr(Split.ROW.value)
HEAD = tl.constexpr(Split.HEAD.value)
FIRST = tl.constexpr(Split.FIRST.value)
LAST = tl.constexpr(Split.LAST.value)
K_START = tl.constexpr(Split.K_START.value)
V_START = tl.constexpr(Split.V_START.value)
CHANNELS = tl.constexpr(Split.CHANNELS.value)
WIDTH = tl.constexpr(Split.WIDTH.value)
FRESH = tl.constexpr(Split.FRESH.value)
PARTIALS = tl.constexpr(Split.PARTIALS.value)
NUMBER = tl.constexpr(Split.NUMBER.value)
FIRST_NUMBER = tl.constexpr(Split.FIRST_NUMBER.value)
NEXT = tl.constexpr(Split.NEXT.value)
WHOLE = tl.constexpr(Split.WHOLE.value)
EIGHT = tl.constexpr(Split.EIGHT.value)
FOUR = tl.constexpr(Split.FOUR.value)
NARROW = tl.constexpr(Split.NARROW.value)
THIRD = tl.constexpr(Split.THIRD.value)
VARIANT = tl.constexpr(Split.VARIANT.value)
