"""Which pages or tokens of the middle a query head reads: those of the highest scores, of equals the first.

A program takes one query head. Scores are compared as whole numbers of the same order. The threshold is searched
between bounds, by counting; then what is above it is written in ascending order. Candidates lie in lines, so that the
sums before them are short: code that runs once takes as long to read as to run.

Names as in eval.cache.attention.ranking_kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention.ranking_kernel import BEST, BEST_STRIDE, FIELDS, SCORES, STRIDE, held

LEAST = tl.constexpr(-(2**31))  # below every score's order

# fmt: off


@triton.jit
def _orders(scores, lines_ptr, listed, first, lines, limit, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Order of the candidates of LINES lines, WIDTH each, int32 that grow with their scores, and their numbers.

    What is no candidate has the order LEAST. Whole lines are read, for there is room behind the last candidate.

    lines_ptr: which lines are read, if `listed`; all of them, if not
    first: of these lines, of `lines` in all
    limit: above every candidate's number
    """
    line, column = first + tl.arange(0, LINES), tl.arange(0, WIDTH)
    there = line < lines
    line = tl.where(listed, tl.load(lines_ptr + line, mask=there & listed, other=0), line)
    number = line[:, None] * WIDTH + column[None, :]
    found = tl.load(scores + number, mask=there[:, None] & (column >= 0)[None, :], other=0.0)
    bits = found.to(tl.int32, bitcast=True)
    return tl.where(there[:, None] & (number < limit), bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST), number


@triton.jit
def _count(order, least, scores, runs, listed, lines, limit, LONG: tl.constexpr):
    """How many candidates have at least an order; those of the first lines are in registers."""
    count = tl.sum((order >= least).to(tl.int32))
    if LONG:
        for at in tl.range(order.shape[0], lines, order.shape[0], num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, order.shape[0], order.shape[1])
            count += tl.sum((more >= least).to(tl.int32))
    return count


@triton.jit
def _ends(order, scores, runs, listed, lines, limit, LONG: tl.constexpr):
    """The lowest and the highest order of a candidate."""
    low, high = tl.min(tl.where(order > LEAST, order, 0x7FFFFFFF)), tl.max(order)
    if LONG:
        for at in tl.range(order.shape[0], lines, order.shape[0], num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, order.shape[0], order.shape[1])
            low = tl.minimum(low, tl.min(tl.where(more > LEAST, more, 0x7FFFFFFF)))
            high = tl.maximum(high, tl.max(more))
    return low, high


@triton.jit
def _least(order, start, most, cap, scores, runs, listed, lines, limit, GUESS: tl.constexpr, LONG: tl.constexpr):
    """The order of the last candidate to be taken, if at least `most` and at most `cap` of them shall be.

    Returns that order, how many candidates have at least it, more than `cap` if too many are equal, and how many more.

    start: an order that at least `most` candidates have, LEAST if none is known
    GUESS: whether orders between the bounds are guessed from counts. That takes half as many rounds as halving where
        many of the candidates are taken, and more where they are few of many
    """
    low, high = _ends(order, scores, runs, listed, lines, limit, LONG)
    low = tl.maximum(low, start)
    span = (high - low).to(tl.uint32, bitcast=True) + 1  # no candidate has low + span
    found = _count(order, low, scores, runs, listed, lines, limit, LONG)
    above, turn = found * 0, found * 0
    while (span > 1) & (found > cap):
        step = span >> 1
        if GUESS:  # two of three times, as if orders were spread evenly; halving bounds the number of rounds
            share = (found - (most + cap) // 2).to(tl.float32) / (found - above).to(tl.float32)
            guess = tl.minimum((span.to(tl.float32) * share).to(tl.uint32), span - 1)
            step = tl.where(turn == 2, step, tl.maximum(guess, 1))
            turn = tl.where(turn == 2, 0, turn + 1)
        middle = low + step.to(tl.int32, bitcast=True)
        count = _count(order, middle, scores, runs, listed, lines, limit, LONG)
        enough = count >= most
        low, span = tl.where(enough, middle, low), tl.where(enough, span - step, step)
        found, above = tl.where(enough, count, found), tl.where(enough, above, count)
    return low, found, above


@triton.jit
def _cut(order, number, least, room, scores, runs, listed, lines, limit, LONG: tl.constexpr):
    """The number below which `room` candidates of the order `least` are."""
    low, high = room * 0, limit
    while high - low > 1:
        middle = (low + high) >> 1
        count = tl.sum(((order == least) & (number < middle)).to(tl.int32))
        if LONG:
            for at in tl.range(order.shape[0], lines, order.shape[0], num_stages=1):
                more, numbers = _orders(scores, runs, listed, at, lines, limit, order.shape[0], order.shape[1])
                count += tl.sum(((more == least) & (numbers < middle)).to(tl.int32))
        low, high = tl.where(count < room, middle, low), tl.where(count < room, high, middle)
    return high


@triton.jit
def _write(order, number, least, cut, out):
    """Write the numbers of those above `least`, or of it and below `cut`, in ascending order; returns how many."""
    taken = ((order > least) | ((order == least) & (number < cut))).to(tl.int32)
    of_line = tl.sum(taken, 1)
    before = tl.cumsum(of_line, 0) - of_line
    tl.store(out + (before[:, None] + tl.cumsum(taken, 1) - taken), number, mask=taken != 0)
    return tl.sum(of_line, 0)


@triton.jit
def _choose(
    scores, runs, listed, lines, limit, start, most, cap, out,
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr, LONG: tl.constexpr,
):
    """Write the numbers of the highest candidates to out, in ascending order; of equals the first.

    They are at least `most` if there are so many, and at most `cap`. Returns how many, and the lowest one's order.

    LONG: whether there may be more than LINES lines, which are then read again for each count
    """
    order, number = _orders(scores, runs, listed, 0, lines, limit, LINES, WIDTH)
    least, found, above = _least(order, start, most, cap, scores, runs, listed, lines, limit, GUESS, LONG)
    cut = limit
    if found > cap:
        cut = _cut(order, number, least, cap - above, scores, runs, listed, lines, limit, LONG)
    written = _write(order, number, least, cut, out)
    if LONG:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            order, number = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            written += _write(order, number, least, cut, out + written)
    return tl.minimum(found, cap), least


@triton.jit
def _choose_any(
    scores, runs, listed, lines, limit, start, most, cap, out,
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr,
):
    """What `_choose` does, with code of its own for the usual case that a program holds all lines."""
    if lines <= LINES:
        taken, least = _choose(scores, runs, listed, lines, limit, start, most, cap, out, LINES, WIDTH, GUESS, False)
    else:
        taken, least = _choose(scores, runs, listed, lines, limit, start, most, cap, out, LINES, WIDTH, GUESS, True)
    return taken, least


@triton.jit(do_not_specialize=["most"])
def choose(
    words, chosen, table, tail_ptr, most,
    GROUP: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, CAP: tl.constexpr,
):
    """Program n: the `most` highest pages or tokens of query head n, all of them if there are no more.

    Of single tokens, the highest runs are chosen first, `most` to CAP of them: the highest tokens are among theirs,
    because outside of them every token is at most the best of each. The loop over both makes one code of them, which
    is half as long.

    chosen: [B * Hq, most] int32, and behind them scratch, [B * Hq, CAP]
    CAP: at least `most`; 0 = no runs are chosen
    WIDTH, LINES: candidates of a line, the tokens of a run; lines that a program holds in registers
    """
    n = tl.program_id(0).to(tl.int64)
    x, g = n // GROUP, n % GROUP
    entry = table + x * FIELDS
    _, tokens = held(entry, tail_ptr, x)
    total = tl.cdiv(tokens, PER)
    at = tl.load(entry + SCORES) + g * tl.load(entry + STRIDE)
    number, wanted, out = tl.cdiv(total, WIDTH), tl.minimum(most, total), n * most
    if wanted > 0:
        if CAP == 0:
            _choose_any(words + tl.multiple_of(at, 4), chosen, False, number, total, LEAST, wanted, wanted,
                        chosen + out, LINES, WIDTH, False)
        else:
            runs = tl.num_programs(0).to(tl.int64) * most + n * CAP
            best = tl.load(entry + BEST) + g * tl.load(entry + BEST_STRIDE)
            lines, start, few = tl.cdiv(number, WIDTH), LEAST, tl.minimum(most, number)
            for stage in tl.range(0, 2, num_stages=1):
                last = stage == 1
                scores = words + tl.multiple_of(tl.where(last, at, best), 4)
                limit, cap = tl.where(last, total, number), tl.where(last, wanted, CAP)
                taken, least = _choose_any(
                    scores, chosen + runs, last, lines, limit, start, tl.where(last, wanted, few), cap,
                    chosen + tl.where(last, out, runs), LINES, WIDTH, True)
                lines, start = taken, tl.where(number >= most, least, LEAST)
                tl.debug_barrier()  # every thread has written its runs before one of them reads them
