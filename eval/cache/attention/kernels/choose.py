"""A decoding step that chooses what it reads: scores of pages or tokens, the choice among them, attention over it.

Three launches follow each other. Each reads lengths and addresses on the device, so that a captured CUDA graph can be
replayed while the middle grows. Names as in eval.cache.attention.kernels.parts; keys lie token by token.

Scores: a program takes one KV head of one row (X of them) and a share of its pages or tokens. `bound` keeps the bounds
of pages up to date, by which these are ranked.

Choice: a program takes one query head. Of equal scores, the first is chosen. Scores are compared as whole numbers of
the same order. The threshold is searched between bounds, by counting; then what is above it is written in ascending
order. Candidates lie in lines, and a thread holds whole lines: it counts within a line by itself, and threads exchange
one number a line. A choice takes its time for these exchanges and for code that runs once, so both are kept short.

Attention: a program takes one row and KV head, and either a span of its sink and window, with all query heads of the
group, or a share of what one query head has chosen. No other token is read. The last program to finish a (row, KV
head) merges the partial results.

table: [X, FIELDS] int64, with the columns of ranking.Column
base, words: first element of the ring's keys, as a pointer to the cache's numbers and to float32
tail_ptr: [X] int64, tokens of each head's tail
order: the orders of a program's candidates, a tuple of WIDTH tensors [LINES], the first of each line, the second of
    each line and so on
number: [LINES], the number of each line's first candidate
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import ranking
from leank.eval.cache.attention.kernels.parts import gather, merge, real_rows, sink_and_window, store_rows

FIELDS = tl.constexpr(ranking.FIELDS)
(
    PROMPT_K, PROMPT_V, TAIL_K, TAIL_V, PROMPT, CHANNELS, LABELS, BOUNDS, SCORES, STRIDE, BEST, BEST_STRIDE,
    SINK_K, SINK_V, RING_K, RING_V,
) = (tl.constexpr(int(column)) for column in ranking.Column)  # fmt: skip
LEAST = tl.constexpr(-(2**31))  # below every score's order
HIGHEST = tl.constexpr(2**31 - 1)

# fmt: off


@triton.jit
def line(token, prompt, prompt_at, tail_at, width, STEP: tl.constexpr):
    """Where a middle token's line of `width` numbers begins, a multiple of STEP: the prompt's tokens first."""
    at = tl.where(token < prompt, prompt_at + token.to(tl.int64) * width,
                  tail_at + (token - prompt).to(tl.int64) * width)
    return tl.multiple_of(at, STEP)


@triton.jit
def held(entry, tail_ptr, x):
    """Tokens of the prompt's part of a head's middle, and of all of it."""
    prompt = tl.load(entry + PROMPT).to(tl.int32)
    return prompt, prompt + tl.load(tail_ptr + x).to(tl.int32)


@triton.jit
def _share(total, TILE: tl.constexpr):
    """First and last of this program's share of `total`, in whole tiles but for the last."""
    size = tl.cdiv(tl.cdiv(total, tl.num_programs(1)), TILE) * TILE
    first = tl.minimum(tl.program_id(1) * size, total)
    return first, tl.minimum(first + size, total)


@triton.jit(do_not_specialize=["fresh"])
def bound(base, table, tail_ptr, fresh, D: tl.constexpr, PER: tl.constexpr, CHUNK: tl.constexpr):
    """Smallest and largest key of the pages that hold the last `fresh` tokens of a head's middle."""
    x = tl.program_id(0).to(tl.int64)
    entry = table + x * FIELDS
    prompt, tokens = held(entry, tail_ptr, x)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    count = tl.load(entry + CHANNELS).to(tl.int32)
    c = tl.arange(0, D)
    kept = c < count
    first = tl.maximum(tokens - fresh, 0) // PER
    for page in range(first + tl.program_id(1), tl.cdiv(tokens, PER), tl.num_programs(1)):
        low = tl.full([D], float("inf"), tl.float32)
        high = tl.full([D], float("-inf"), tl.float32)
        end = tl.minimum((page + 1) * PER, tokens)
        for at in range(page * PER, end, CHUNK):
            token = at + tl.arange(0, CHUNK)
            there = (token < end)[:, None]
            k = base + line(token, prompt, prompt_k, tail_k, count, 1)[:, None] + c[None, :]
            keys = tl.load(k, mask=there & kept[None, :], other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(there, keys, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there, keys, float("-inf")), 0))
        to = base + tl.load(entry + BOUNDS) + page * (2 * count).to(tl.int64) + c
        tl.store(to, low.to(base.dtype.element_ty), mask=kept)
        tl.store(to + count, high.to(base.dtype.element_ty), mask=kept)


@triton.jit
def score_pages(
    base, words, q, index, table, tail_ptr, q_b, q_h, index_b,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PER: tl.constexpr,
    STEP: tl.constexpr,
):
    """Quest's bound of every page and query head: sum over channels c of max(q_c min_c, q_c max_c).

    q: [B, Hq, 1, D], by strides. STEP: divides every channel count
    """
    x = tl.program_id(0).to(tl.int64)
    row, head, entry = x // H, x % H, table + x * FIELDS
    _, tokens = held(entry, tail_ptr, x)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    r, c = tl.arange(0, M), tl.arange(0, D)
    ok, kept = r < GROUP, c < count
    q_row = q + row * q_b + (head * GROUP + r) * q_h
    picked = gather(q_row, ok, index + row * index_b + head * D, c, count, False)
    zero = tl.zeros_like(picked)
    up, down = tl.where(picked > 0, picked, zero), tl.where(picked < 0, picked, zero)
    bounds = base + tl.multiple_of(tl.load(entry + BOUNDS), STEP)
    scores = words + tl.load(entry + SCORES) + r * tl.load(entry + STRIDE)
    first, last = _share(tl.cdiv(tokens, PER), TILE)
    for at in range(first, last, TILE):
        page = at + tl.arange(0, TILE)
        there = page < last
        low = bounds + (page.to(tl.int64) * (2 * count))[:, None] + c[None, :]
        mask = there[:, None] & kept[None, :]
        s = tl.dot(up, tl.trans(tl.load(low + count, mask=mask, other=0.0)))
        s = tl.dot(down, tl.trans(tl.load(low, mask=mask, other=0.0)), s)
        tl.store(scores[:, None] + page[None, :], s, mask=ok[:, None] & there[None, :])


@triton.jit
def _rounded(k, kept, BITS: tl.constexpr):
    """Labels [T, C] rounded to BITS with a scale and a zero point per token, over the channels kept."""
    low = tl.min(tl.where(kept[None, :], k, float("inf")), 1)[:, None]
    high = tl.max(tl.where(kept[None, :], k, float("-inf")), 1)[:, None]
    scale = tl.div_rn(high - low, tl.full([k.shape[0], 1], 2**BITS - 1, tl.float32))
    code = tl.div_rn(k - low, tl.where(scale > 0, scale, 1.0))
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: what float32 adds there is rounded to even
    return tl.where(kept[None, :], code * scale + low, 0.0)


@triton.jit
def score_tokens(
    base, words, q, index, table, tail_ptr, q_b, q_h, index_b,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
    C: tl.constexpr, STEP: tl.constexpr, LABEL_STEP: tl.constexpr, BITS: tl.constexpr,
):
    """Product over the label channels of every token and query head, and the best of each RUN tokens.

    q: [B, Hq, 1, D], by strides. C: at least the label channels of any head. STEP: as in `score_pages`
    LABEL_STEP: divides the channels that are read as labels, which are more than the labels if these are no multiple of
        it; it divides every channel count, too
    """
    x = tl.program_id(0).to(tl.int64)
    row, head, entry = x // H, x % H, table + x * FIELDS
    prompt, tokens = held(entry, tail_ptr, x)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    labels = tl.load(entry + LABELS).to(tl.int32)
    near = tl.multiple_of(tl.cdiv(labels, LABEL_STEP) * LABEL_STEP, LABEL_STEP)
    r, c = tl.arange(0, M), tl.arange(0, C)
    ok, kept = r < GROUP, c < labels
    q_row = q + row * q_b + (head * GROUP + r) * q_h
    picked = gather(q_row, ok, index + row * index_b + head * D, c, labels, False)
    scores = words + tl.load(entry + SCORES) + r * tl.load(entry + STRIDE)
    best = words + tl.load(entry + BEST) + r * tl.load(entry + BEST_STRIDE)
    first, last = _share(tokens, TILE)
    for at in range(first, last, TILE):
        token = at + tl.arange(0, TILE)
        there = token < last
        k = base + line(token, prompt, prompt_k, tail_k, count, STEP)[:, None] + c[None, :]
        keys = tl.load(k, mask=there[:, None] & (c < near)[None, :], other=0.0)
        if LABEL_STEP == 8:
            keys = tl.where(kept[None, :], keys, 0.0)
        if BITS < 16:
            s = tl.dot(picked.to(tl.float32), tl.trans(_rounded(keys.to(tl.float32), kept, BITS)),
                       input_precision="ieee")
        else:
            s = tl.dot(picked, tl.trans(keys))
        s = tl.where(there[None, :], s, float("-inf"))
        tl.store(scores[:, None] + token[None, :], s, mask=ok[:, None] & there[None, :])
        run = at // RUN + tl.arange(0, TILE // RUN)
        of_run = tl.max(tl.reshape(s, [M, TILE // RUN, RUN]), 2)
        tl.store(best[:, None] + run[None, :], of_run, mask=ok[:, None] & (run * RUN < last)[None, :])


@triton.jit
def _order(bits, there):
    """The order of scores whose bits are given, int32 that grows with the score; LEAST where nothing is there."""
    return tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def _orders(scores, runs, listed, first, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Orders and numbers of the candidates of LINES lines; what is no candidate has the order LEAST.

    Scores are read in pairs, for there is room behind the last candidate.
    runs: which lines are read, if `listed`; all of them, if not
    first: of these lines, of `lines` in all; limit: above every candidate's number
    """
    line = first + tl.arange(0, LINES)
    there = line < lines
    line = tl.where(listed, tl.load(runs + line, mask=there & listed, other=0), line)
    number = line * WIDTH
    pairs = scores.to(tl.pointer_type(tl.int64), bitcast=True) + line * (WIDTH // 2)
    found = tl.tuple([])
    for i in tl.static_range(WIDTH // 2):
        found += (tl.load(pairs + i, mask=there & (number + 2 * i < limit), other=0),)
    order = tl.tuple([])
    for i in tl.static_range(WIDTH // 2):
        order += (_order(found[i].to(tl.int32), there & (number + 2 * i < limit)),)
        order += (_order((found[i] >> 32).to(tl.int32), there & (number + (2 * i + 1) < limit)),)
    return order, number


@triton.jit
def _count(order, least, scores, runs, listed, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr,
           LONG: tl.constexpr):
    """How many candidates have at least an order; those of the first lines are in registers."""
    count = tl.zeros([LINES], tl.int32)
    for i in tl.static_range(WIDTH):
        count += (order[i] >= least).to(tl.int32)
    if LONG:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            for i in tl.static_range(WIDTH):
                count += (more[i] >= least).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _extremes_of_lines(order, first, last, low, high, WIDTH: tl.constexpr):
    """The lowest and the highest order of first .. last in each line, if it is below low [LINES] or above high."""
    for i in tl.static_range(WIDTH):
        low = tl.where(order[i] >= first, tl.minimum(low, order[i]), low)
        high = tl.where(order[i] <= last, tl.maximum(high, order[i]), high)
    return low, high


@triton.jit
def _extremes(order, first, last, scores, runs, listed, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr,
          LONG: tl.constexpr):
    """The lowest order of a candidate that is at least `first`, and the highest that is at most `last`."""
    low, high = tl.full([LINES], HIGHEST, tl.int32), tl.full([LINES], LEAST, tl.int32)
    low, high = _extremes_of_lines(order, first, last, low, high, WIDTH)
    if LONG:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            low, high = _extremes_of_lines(more, first, last, low, high, WIDTH)
    return tl.min(low), tl.max(high)


@triton.jit
def _least(
    order, low, most, cap, scores, runs, listed, lines, limit,
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr, LONG: tl.constexpr,
):
    """The order of the last candidate to be taken, if at least `most` and at most `cap` of them shall be.

    Returns that order, how many candidates have at least it, more than `cap` if too many are equal, and how many more
    than it, which counts only then.
    low: an order that at least `most` candidates have, LEAST + 1 if none is known, and then all below limit are
        candidates
    GUESS: whether orders between the bounds are guessed from counts. That takes half as many rounds as halving where
        many of the candidates are taken, and more where they are few of many
    """
    if low == LEAST + 1:
        low, high = _extremes(order, low, HIGHEST, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
        found = limit
    else:
        _, high = _extremes(order, low, HIGHEST, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
        found = _count(order, low, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
    span = (high - low).to(tl.uint32, bitcast=True) + 1  # no candidate has low + span
    above, turn = found * 0, found * 0
    while (span > 1) & (found > cap):
        step = span >> 1
        if GUESS:  # two of three times, as if orders were spread evenly; halving bounds the number of rounds
            share = (found - (most + cap) // 2).to(tl.float32) / (found - above).to(tl.float32)
            guess = tl.minimum((span.to(tl.float32) * share).to(tl.uint32), span - 1)
            step = tl.where(turn == 2, step, tl.maximum(guess, 1))
            turn = tl.where(turn == 2, 0, turn + 1)
        middle = low + step.to(tl.int32, bitcast=True)
        count = _count(order, middle, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
        enough, nothing = count >= most, (count == found) | (count == above)
        low, span = tl.where(enough, middle, low), tl.where(enough, span - step, step)
        found, above = tl.where(enough, count, found), tl.where(enough, above, count)
        if nothing:  # lay on one side: many are equal or nearly so, far from the rest, and the bounds move up to them
            high = low + (span - 1).to(tl.int32, bitcast=True)
            low, high = _extremes(order, low, high, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
            span = (high - low).to(tl.uint32, bitcast=True) + 1
    return low, found, above


@triton.jit
def _write(order, number, least, room, out, taken, equal, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Write the numbers of those above `least`, and of the first `room` of it, in ascending order.

    taken, equal: candidates before these that are above `least`, and that are of it. Returns both with these counted.
    """
    of_line = tl.zeros([LINES], tl.int32)
    for i in tl.static_range(WIDTH):  # both counts in one number
        of_line += (order[i] > least).to(tl.int32) + ((order[i] == least).to(tl.int32) << 16)
    before = tl.cumsum(of_line, 0) - of_line
    equals = equal + (before >> 16)
    place = taken + (before & 0xFFFF) + tl.minimum(equals, room)
    for i in tl.static_range(WIDTH):
        same = order[i] == least
        written = (order[i] > least) | (same & (equals < room))
        tl.store(out + place, number + i, mask=written)
        place += written.to(tl.int32)
        equals += same.to(tl.int32)
    of_all = tl.sum(of_line)
    return taken + (of_all & 0xFFFF), equal + (of_all >> 16)


@triton.jit
def _choose(
    scores, runs, listed, lines, limit, low, most, cap, out,
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr, LONG: tl.constexpr,
):
    """Write the numbers of the highest candidates to out, in ascending order; of equals the first.

    They are at least `most` if there are so many, and at most `cap`. Returns how many, and the lowest one's order.
    low: as for `_least`. LONG: whether there may be more than LINES lines, which are then read again for each count
    """
    order, number = _orders(scores, runs, listed, 0, lines, limit, LINES, WIDTH)
    least, found, above = _least(order, low, most, cap, scores, runs, listed, lines, limit, LINES, WIDTH, GUESS, LONG)
    room = tl.where(found > cap, cap - above, cap)
    taken, equal = _write(order, number, least, room, out, 0, 0, LINES, WIDTH)
    if LONG:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            order, number = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            taken, equal = _write(order, number, least, room, out, taken, equal, LINES, WIDTH)
    return tl.minimum(found, cap), least


@triton.jit
def _choose_any(
    scores, runs, listed, lines, limit, low, most, cap, out,
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr,
):
    """What `_choose` does, with code of its own for the usual case that a program holds all lines."""
    if lines <= LINES:
        taken, least = _choose(scores, runs, listed, lines, limit, low, most, cap, out, LINES, WIDTH, GUESS, False)
    else:
        taken, least = _choose(scores, runs, listed, lines, limit, low, most, cap, out, LINES, WIDTH, GUESS, True)
    return taken, least


@triton.jit(do_not_specialize=["most"])
def choose(
    words, chosen, table, tail_ptr, most,
    GROUP: tl.constexpr, PER: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
    CAP: tl.constexpr, LAST: tl.constexpr,
):
    """Program n: the `most` highest pages or tokens of query head n, all of them if there are no more.

    Of single tokens, the highest runs are chosen first, `most` to CAP of them: the highest tokens are among theirs,
    because outside of them every token is at most the best of each.

    chosen: [B * Hq, most] int32, and behind them scratch, [B * Hq, CAP]
    CAP: at least `most`; 0 = no runs are chosen
    RUN: tokens of a run, which are then a line. WIDTH: pages or runs of a line, an even number
    LINES, LAST: lines that a program holds in registers, of pages or runs, and then of tokens
    """
    n = tl.program_id(0).to(tl.int64)
    x, g = n // GROUP, n % GROUP
    entry = table + x * FIELDS
    _, tokens = held(entry, tail_ptr, x)
    total = tl.cdiv(tokens, PER)
    scores = words + tl.multiple_of(tl.load(entry + SCORES) + g * tl.load(entry + STRIDE), 4)
    wanted, out = tl.minimum(most, total), chosen + n * most
    if wanted > 0:
        if CAP == 0:
            lines = tl.cdiv(total, WIDTH)
            _choose_any(scores, out, False, lines, total, LEAST + 1, wanted, wanted, out, LINES, WIDTH, False)
        else:
            number = tl.cdiv(total, RUN)
            runs = chosen + (tl.num_programs(0).to(tl.int64) * most + n * CAP)
            best = words + tl.multiple_of(tl.load(entry + BEST) + g * tl.load(entry + BEST_STRIDE), 4)
            taken, low = _choose_any(best, runs, False, tl.cdiv(number, WIDTH), number, LEAST + 1,
                                     tl.minimum(most, number), CAP, runs, LINES, WIDTH, True)
            tl.debug_barrier()  # every thread has written its runs before one of them reads them
            low = tl.where(number >= most, low, LEAST + 1)  # otherwise tokens below every run's best are chosen, too
            if CAP <= LAST:
                _choose(scores, runs, True, taken, total, low, wanted, wanted, out, LAST, RUN, True, False)
            else:
                _choose_any(scores, runs, True, taken, total, low, wanted, wanted, out, LAST, RUN, True)


@triton.jit
def _chosen(
    layer, q_row, index, entry, chosen, x, most, share, shares, scale,
    C: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """A share of what one query head has chosen, pages of PER tokens: numerator [D], maximum and denominator.

    One query has no use for tensor cores, so keys and values go from memory to registers.
    """
    prompt, tokens = held(entry, layer.tail, x)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    prompt_v, tail_v = tl.load(entry + PROMPT_V), tl.load(entry + TAIL_V)
    total = tl.minimum(most, tl.cdiv(tokens, PER)) * PER
    size = tl.cdiv(tl.cdiv(total, shares), TILE) * TILE
    first, last = share * size, tl.minimum((share + 1) * size, total)
    c, d = tl.arange(0, C), tl.arange(0, D)
    kept = c < count
    channel = tl.load(index + c, mask=kept, other=0)
    query = tl.load(q_row + channel, mask=kept, other=0.0).to(tl.float32) * scale
    acc = tl.zeros([TILE, D], tl.float32)
    z = tl.zeros([TILE], tl.float32)
    m = tl.max(tl.full([TILE], float("-inf"), tl.float32), 0)
    for at in tl.range(first, last, TILE, num_stages=1):
        slot = at + tl.arange(0, TILE)
        token = tl.load(chosen + slot // PER, mask=slot < last, other=0) * PER + slot % PER
        there = (slot < last) & (token < tokens)
        k = layer.base + line(token, prompt, prompt_k, tail_k, count, STEP)[:, None] + c[None, :]
        keys = tl.load(k, mask=there[:, None] & kept[None, :], other=0.0)
        v = layer.base + line(token, prompt, prompt_v, tail_v, D, 16)[:, None] + d[None, :]
        values = tl.load(v, mask=there[:, None], other=0.0)
        s = tl.where(there, tl.sum(keys.to(tl.float32) * query[None, :], 1), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp2(m - safe), tl.exp2(s - safe)
        acc = acc * alpha + p[:, None] * values.to(tl.float32)
        z = z * alpha + p
        m = m_new
    return tl.sum(acc, 0), m, tl.sum(z, 0)


@triton.jit
def _ends(
    layer, queries, q_row, ok, entry, row, p, SPAN: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):
    """Span p of the sink, or of the window behind the sink's spans: numerators [M, D], maxima and denominators [M]."""
    seen = tl.load(layer.seen + row).to(tl.int32)
    of_sink = tl.cdiv(layer.sink, SPAN)  # spans
    ring = p >= of_sink
    start = tl.where(ring, tl.load(layer.start + row), 0).to(tl.int32)
    position = tl.load(queries.position + row).to(tl.int32) + tl.zeros([M], tl.int32)
    k_at = tl.where(ring, tl.load(entry + RING_K), tl.load(entry + SINK_K))
    v_at = tl.where(ring, tl.load(entry + RING_V), tl.load(entry + SINK_V))
    first = tl.where(ring, p - of_sink, p) * SPAN
    last = tl.minimum(tl.minimum(first + SPAN, tl.where(ring, layer.slots, layer.sink)), seen)
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, SPAN], tl.float32)
    acc, m, z = sink_and_window(
        acc, m, z, q_row, ok, position, layer.base + tl.multiple_of(k_at, 16), layer.base + tl.multiple_of(v_at, 16),
        first, last, seen, start, layer.slots, ring, queries.scale, q_row, SPAN, D, False)
    return acc, m, tl.sum(z, 1)


@triton.jit(do_not_specialize=["most", "ends", "shares"])
def attend(
    layer, table, queries, results, chosen, most, ends, shares,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, MERGE_LINES: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """Program (x, p): span p of the sink and window for p < ends, else a share of what one query head has chosen.

    layer, queries, results: of `parts`, queries of one token a row; a (row, KV head) has ends + shares results
    chosen: [B * Hq, most] int32, pages of PER tokens
    ends, shares: programs for sink and window, and for what one query head has chosen
    C: at least the channels of any head
    """
    x, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head, entry = x // H, x % H, table + x * FIELDS
    partials, d = ends + shares, tl.arange(0, D)
    q_head = queries.q + row * queries.q_b + head * GROUP * queries.q_h
    if p < ends:
        r = tl.arange(0, M)
        ok = r < GROUP
        acc, m, z = _ends(layer, queries, q_head + r * queries.q_h, ok, entry, row, p, SPAN, M, D)
        at = (x * partials + p) * ROWS + r
        tl.store(results.partial + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
        tl.store(results.stat + 2 * at, m, mask=ok)
        tl.store(results.stat + 2 * at + 1, z, mask=ok)
    else:
        g, share = (p - ends) // shares, (p - ends) % shares
        index = layer.index + row * layer.index_b + head * D
        one, m_one, z_one = _chosen(layer, q_head + g * queries.q_h, index, entry, chosen + (x * GROUP + g) * most, x,
                                    most, share, shares, queries.scale, C, TILE, D, PER, STEP)
        at_one = (x * partials + ends + share) * ROWS + g
        tl.store(results.partial + at_one * D + d, one)
        tl.store(results.stat + 2 * at_one, m_one)
        tl.store(results.stat + 2 * at_one + 1, z_one)
    real = real_rows(row, queries.position, 1, 0, ROWS, GROUP, GROUP)
    tl.debug_barrier()  # all of it is written before the ticket says so
    if tl.atomic_add(results.done + x, 1, sem="acq_rel") == ends + GROUP * shares - 1:
        merged, _, _ = merge(results.partial, results.stat, x * partials, partials, ROWS, MERGE_LINES, D)
        store_rows(results.out, merged, real, row, head, 1, 0, ROWS, GROUP, GROUP, H, D)
        tl.store(results.done + x, 0)
