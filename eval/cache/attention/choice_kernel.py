"""Which pages or tokens of the middle a query head reads: those of the highest scores, of equals the first.

A program takes one query head. Scores are compared as whole numbers of the same order. The threshold is searched
between bounds, by counting; then what is above it is written in ascending order. Candidates lie in lines, and a thread
holds whole lines: it counts within a line by itself, and threads exchange one number a line. A choice takes its time
for these exchanges and for code that runs once, so both are kept short.

Names as in eval.cache.attention.ranking_kernel. order: the orders of a program's candidates, a tuple of WIDTH tensors
[LINES], the first of each line, the second of each line and so on. number: [LINES], the number of each line's first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention.ranking_kernel import BEST, BEST_STRIDE, FIELDS, SCORES, STRIDE, held

LEAST = tl.constexpr(-(2**31))  # below every score's order
HIGHEST = tl.constexpr(2**31 - 1)

# fmt: off


@triton.jit
def _order(bits, there):
    """The order of scores whose bits are given, int32 that grows with the score; LEAST where nothing is there."""
    return tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def _orders(scores, runs, listed, first, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Orders and numbers of the candidates of LINES lines; what is no candidate has the order LEAST.

    Scores are read in pairs, for there is room behind the last candidate.

    runs: which lines are read, if `listed`; all of them, if not
    first: of these lines, of `lines` in all
    limit: above every candidate's number
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
def _ends_of_lines(order, first, last, low, high, WIDTH: tl.constexpr):
    """The lowest and the highest order of first .. last in each line, if it is below low [LINES] or above high."""
    for i in tl.static_range(WIDTH):
        low = tl.where(order[i] >= first, tl.minimum(low, order[i]), low)
        high = tl.where(order[i] <= last, tl.maximum(high, order[i]), high)
    return low, high


@triton.jit
def _ends(order, first, last, scores, runs, listed, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr,
          LONG: tl.constexpr):
    """The lowest order of a candidate that is at least `first`, and the highest that is at most `last`."""
    low, high = tl.full([LINES], HIGHEST, tl.int32), tl.full([LINES], LEAST, tl.int32)
    low, high = _ends_of_lines(order, first, last, low, high, WIDTH)
    if LONG:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            low, high = _ends_of_lines(more, first, last, low, high, WIDTH)
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
        low, high = _ends(order, low, HIGHEST, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
        found = limit
    else:
        _, high = _ends(order, low, HIGHEST, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
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
            low, high = _ends(order, low, high, scores, runs, listed, lines, limit, LINES, WIDTH, LONG)
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

    low: as for `_least`
    LONG: whether there may be more than LINES lines, which are then read again for each count
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
