"""The tiles of the paged decode kernel: which tokens they hold, and how a program reads those of one (row, head).

A tile is TILE tokens that begin at a multiple of TILE, so that one lookup in the block table serves it if a page holds
whole tiles, and two or four if a page holds a half or a quarter. Other pages are looked up token by token. Tiles are of
two kinds:

    ends     tiles with a token of the sink or the window: their tokens are told apart one by one
    middle   all others, which lie in one piece: every token is there, and only the kept group is read, without a mask

A tile's pages are looked up while the tile before it is loaded, so that Triton keeps several tiles under way.

Names as in eval.cache.attention.kernels.parts. The page layout and its stripes are those of eval.serving.layout; a
stripe is here a tuple of its first column, its width, its channels, and the first column of the head's V stripe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention.kernels.parts import step

STRIPE = tl.constexpr(16)  # columns: every offset within a page is a multiple of them

# fmt: off


@triton.jit
def stripe_of(stripes, head):
    """The stripe of a head, from the table of its group."""
    at = stripes + head * 5
    return (tl.multiple_of(tl.load(at), STRIPE), tl.multiple_of(tl.load(at + 1), STRIPE), tl.load(at + 2),
            tl.multiple_of(tl.load(at + 3), STRIPE))


@triton.jit
def tiles_of(length, sink_size, window, TILE: tl.constexpr):
    """A row's tiles, how many of them begin in the sink, and how many of those that follow are of the middle."""
    sink = tl.minimum(sink_size, length)
    in_sink = tl.cdiv(sink, TILE)
    return tl.cdiv(length, TILE), in_sink, tl.maximum(tl.maximum(sink, length - 1 - window) // TILE - in_sink, 0)


@triton.jit
def _query(q_row, ok, channels, c, stripe):
    """Query channels [M, C] of the columns c of a stripe; zero where these hold zeros."""
    index = tl.load(channels + c, mask=c < stripe[2], other=0)
    return tl.load(q_row[:, None] + index[None, :], mask=ok[:, None] & (c < stripe[2])[None, :], other=0.0)


@triton.jit
def _look_up(table, tile, newest, t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a tile's quarters; where pages hold no quarters, the page of each token [T] instead.

    newest: the row's last token, behind whose page the table may hold anything
    """
    last = tl.maximum(newest, 0) // BLOCK
    if BLOCK % TILE == 0:
        first = tl.load(table + tile // (BLOCK // TILE))
        return first, first, first, first
    elif BLOCK * 2 == TILE:
        first, third = tl.load(table + tile * 2), tl.load(table + tl.minimum(tile * 2 + 1, last))
        return first, first, third, third
    elif BLOCK * 4 == TILE:
        return (tl.load(table + tile * 4), tl.load(table + tl.minimum(tile * 4 + 1, last)),
                tl.load(table + tl.minimum(tile * 4 + 2, last)), tl.load(table + tl.minimum(tile * 4 + 3, last)))
    else:
        each = tl.load(table + tl.minimum((tile * TILE + t) // BLOCK, last))
        return each, each, each, each


@triton.jit
def _pages_at(pages, page, number, t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointer to the page of a tile, or of each of its tokens [T]."""
    if TILE % BLOCK == 0 and BLOCK * 4 >= TILE and BLOCK < TILE:
        low, high = number[0].to(tl.int64) * page, number[2].to(tl.int64) * page
        if BLOCK * 4 == TILE:
            low = tl.where(t < BLOCK, low, number[1].to(tl.int64) * page)
            high = tl.where(t < 3 * BLOCK, high, number[3].to(tl.int64) * page)
        return pages + tl.multiple_of(tl.where(t < TILE // 2, low, high), STRIPE)
    else:
        return pages + number[0].to(tl.int64) * page


@triton.jit
def _at(pages, page, number, tile, start, width, t, c, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers [T, C] to columns c of a tile's tokens in a stripe."""
    base = _pages_at(pages, page, number, t, TILE, BLOCK) + BLOCK * start
    if BLOCK % TILE == 0:
        return base + tile % (BLOCK // TILE) * TILE * width + (t[:, None] * width + c[None, :])
    else:
        return (base + (tile * TILE + t) % BLOCK * width)[:, None] + c[None, :]


@triton.jit
def _logits(
    s, q, pages, page, number, tile, stripe, t, c, EVEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add q [M, C] times columns c of a K stripe to s [M, T]."""
    at = _at(pages, page, number, tile, stripe[0], stripe[1], t, c, TILE, BLOCK)
    k = tl.load(at) if EVEN else tl.load(at, mask=(c < stripe[1])[None, :], other=0.0)
    return tl.dot(q, tl.trans(k), s)


@triton.jit
def _middle(
    acc, m, z, number, q0, q1, pages, page, table, first, last, newest, stripe, scale,
    C0: tl.constexpr, C1: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Tiles [first, last) of the middle, of which up to C0 + C1 channels are kept. number: the first tile's pages."""
    t, d, c0 = tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, C0)
    for tile in range(first, last):
        ahead = _look_up(table, tl.minimum(tile + 1, last - 1), newest, t, TILE, BLOCK)
        s = tl.zeros([q0.shape[0], TILE], tl.float32)
        s = _logits(s, q0, pages, page, number, tile, stripe, t, c0, EVEN, TILE, BLOCK)
        if C1 > 0:
            c1 = C0 + tl.arange(0, C1)
            s = _logits(s, q1, pages, page, number, tile, stripe, t, c1, EVEN, TILE, BLOCK)
        v = tl.load(_at(pages, page, number, tile, stripe[3], D, t, d, TILE, BLOCK))
        acc, m, z = step(acc, m, z, s * scale, v)
        number = ahead
    return acc, m, z


@triton.jit
def _ends(
    acc, m, z, number, other, q0, q1, r0, r1, pages, page, kept, rest, first, last, in_sink, middle,
    length, sink, window_from, kept_stripe, rest_stripe, scale,
    C0: tl.constexpr, C1: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Tiles number first .. last - 1 of the ends; the tiles of the middle follow those of the sink.

    number, other: the first tile's pages of the kept group and of the rest
    Up to C0 + C1 channels are of the kept group and up to R0 + R1 of the rest; V is of the kept group if it has any.
    """
    t, d = tl.arange(0, TILE), tl.arange(0, D)
    newest = length - 1
    tile = first + tl.where(first < in_sink, 0, middle)
    for at in range(first, last):
        ahead = tl.minimum(at + 1, last - 1)
        ahead += tl.where(ahead < in_sink, 0, middle)
        number_ahead = _look_up(kept, ahead, newest, t, TILE, KEPT_BLOCK)
        other_ahead = _look_up(rest, ahead, newest, t, TILE, REST_BLOCK)
        token = tile * TILE + t
        seen = token < length
        whole = seen & ((token < sink) | (token >= window_from))
        s = tl.zeros([q0.shape[0], TILE], tl.float32)
        if R0 > 0:
            s = _logits(s, r0, pages, page, other, tile, rest_stripe, t, tl.arange(0, R0), EVEN, TILE, REST_BLOCK)
        if R1 > 0:
            s = _logits(s, r1, pages, page, other, tile, rest_stripe, t, R0 + tl.arange(0, R1), EVEN, TILE, REST_BLOCK)
        if C0 > 0:
            s = tl.where(whole[None, :], s, 0.0)  # what the rest does not hold of a token of the middle may be anything
            s = _logits(s, q0, pages, page, number, tile, kept_stripe, t, tl.arange(0, C0), EVEN, TILE, KEPT_BLOCK)
            if C1 > 0:
                c1 = C0 + tl.arange(0, C1)
                s = _logits(s, q1, pages, page, number, tile, kept_stripe, t, c1, EVEN, TILE, KEPT_BLOCK)
            v_at = _at(pages, page, number, tile, kept_stripe[3], D, t, d, TILE, KEPT_BLOCK)
        else:
            seen = whole
            v_at = _at(pages, page, other, tile, rest_stripe[3], D, t, d, TILE, REST_BLOCK)
        v = tl.load(v_at, mask=seen[:, None], other=0.0)
        acc, m, z = step(acc, m, z, tl.where(seen[None, :], s * scale, float("-inf")), v)
        tile, number, other = ahead, number_ahead, other_ahead
    return acc, m, z


@triton.jit
def read(
    acc, m, z, q_row, ok, pages, page, kept, rest, kept_channels, rest_channels, kept_stripe, rest_stripe,
    length, sink_size, window, first, last, middle_first, middle_last, scale,
    C: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Tiles [first, last) of the ends and [middle_first, middle_last) of the middle of a head.

    The head keeps more than C - 32 and up to C channels; 0 = none. EVEN: every count of channels is a multiple of 32.
    """
    R: tl.constexpr = D if C == 0 else D - C if EVEN else D - C + 32
    C0: tl.constexpr = 64 if C == 96 else C
    R0: tl.constexpr = 64 if R == 96 else R
    t = tl.arange(0, TILE)
    newest = length - 1
    tiles, in_sink, middle = tiles_of(length, sink_size, window, TILE)
    last = tl.minimum(last, tiles - middle)
    # the first pages are looked up before the queries are waited for
    tile = tl.where(first < last, first + tl.where(first < in_sink, 0, middle), 0)
    number = _look_up(kept, tile, newest, t, TILE, KEPT_BLOCK)
    other = _look_up(rest, tile, newest, t, TILE, REST_BLOCK)
    of_middle = number
    q0, q1 = ok, ok  # not used where the head keeps no such channel
    if C > 0:
        of_middle = _look_up(kept, tl.where(middle_first < middle_last, middle_first, 0), newest, t, TILE, KEPT_BLOCK)
        q0 = _query(q_row, ok, kept_channels, tl.arange(0, C0), kept_stripe)
    if C > C0:
        q1 = _query(q_row, ok, kept_channels, C0 + tl.arange(0, C - C0), kept_stripe)
    if first < last:
        r0, r1 = ok, ok
        if R > 0:
            r0 = _query(q_row, ok, rest_channels, tl.arange(0, R0), rest_stripe)
        if R > R0:
            r1 = _query(q_row, ok, rest_channels, R0 + tl.arange(0, R - R0), rest_stripe)
        sink = tl.minimum(sink_size, length)
        acc, m, z = _ends(
            acc, m, z, number, other, q0, q1, r0, r1, pages, page, kept, rest, first, last, in_sink, middle,
            length, sink, tl.maximum(sink, length - 1 - window), kept_stripe, rest_stripe, scale,
            C0, C - C0, R0, R - R0, EVEN, TILE, D, KEPT_BLOCK, REST_BLOCK)
    if C > 0:  # noqa: SIM102, known when it is compiled
        if middle_first < middle_last:
            acc, m, z = _middle(acc, m, z, of_middle, q0, q1, pages, page, kept, middle_first, middle_last, newest,
                                kept_stripe, scale, C0, C - C0, EVEN, TILE, D, KEPT_BLOCK)
    return acc, m, z
