"""Which pages or tokens of the middle a query head reads: bounds of pages, scores, and the choice of the highest.

Every launch reads lengths and addresses on the device, so that a captured CUDA graph can be replayed while the middle
grows. A program takes one KV head of one row (X of them) and a share of its pages or tokens; the choice takes one query
head. Names as in eval.cache.attention.kernel; keys lie token by token.

table: [X, FIELDS] int64, with the columns of places.Column
base, words: first element of the ring's keys, as a pointer to the cache's numbers and to float32
tail_ptr: [X] int64, tokens of each head's tail
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention import places
from eval.cache.attention.kernel_middle import gather

FIELDS = tl.constexpr(places.FIELDS)
PROMPT_K, TAIL_K = tl.constexpr(int(places.Column.PROMPT_K)), tl.constexpr(int(places.Column.TAIL_K))
PROMPT, CHANNELS = tl.constexpr(int(places.Column.PROMPT)), tl.constexpr(int(places.Column.CHANNELS))
LABELS, BOUNDS = tl.constexpr(int(places.Column.LABELS)), tl.constexpr(int(places.Column.BOUNDS))
SCORES, STRIDE = tl.constexpr(int(places.Column.SCORES)), tl.constexpr(int(places.Column.STRIDE))
BEST, BEST_STRIDE = tl.constexpr(int(places.Column.BEST)), tl.constexpr(int(places.Column.BEST_STRIDE))
LEAST = tl.constexpr(-(2**31))  # below every score's order

# fmt: off


@triton.jit
def line(token, prompt, prompt_at, tail_at, width, STEP: tl.constexpr):
    """Where a middle token's line of `width` numbers begins: the prompt's tokens first, then the tail's.

    STEP: divides every line's beginning
    """
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

    q: [B, Hq, 1, D], by strides
    STEP: divides every channel count
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

    q: [B, Hq, 1, D], by strides
    C: at least the label channels of any head. STEP: as in `score_pages`
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
def _count(order, least, scores, runs, listed, lines, limit):
    """How many candidates have at least an order; those of the first lines are in registers."""
    count = tl.sum((order >= least).to(tl.int32))
    if lines > order.shape[0]:
        for at in tl.range(order.shape[0], lines, order.shape[0], num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, order.shape[0], order.shape[1])
            count += tl.sum((more >= least).to(tl.int32))
    return count


@triton.jit
def _ends(order, scores, runs, listed, lines, limit):
    """The lowest and the highest order of a candidate."""
    low, high = tl.min(tl.where(order > LEAST, order, 0x7FFFFFFF)), tl.max(order)
    if lines > order.shape[0]:
        for at in tl.range(order.shape[0], lines, order.shape[0], num_stages=1):
            more, _ = _orders(scores, runs, listed, at, lines, limit, order.shape[0], order.shape[1])
            low = tl.minimum(low, tl.min(tl.where(more > LEAST, more, 0x7FFFFFFF)))
            high = tl.maximum(high, tl.max(more))
    return low, high


@triton.jit
def _number(order):
    """The float32 number of an order."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _guess(low, high, found, above, wanted):
    """An order between two, where `wanted` candidates would be at least as high if their number fell exponentially.

    found, above: candidates that have at least `low`, at least `high`
    """
    most, least = tl.log2(found.to(tl.float32)), tl.log2(tl.maximum(above.to(tl.float32), 0.5))
    share = (most - tl.log2(wanted.to(tl.float32))) / (most - least)
    start = _number(low)
    bits = (start + (_number(high) - start) * share).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _least(order, start, most, cap, scores, runs, listed, lines, limit, GUESS: tl.constexpr):
    """The order of the last candidate to be taken, if at least `most` and at most `cap` of them shall be.

    Returns that order, how many candidates have at least it, more than `cap` if too many are equal, and how many more.

    start: an order that at least `most` candidates have, LEAST if none is known
    """
    low, high = _ends(order, scores, runs, listed, lines, limit)
    low, high = tl.maximum(low, start).to(tl.int64), high.to(tl.int64) + 1  # `high` is above all
    found = _count(order, low.to(tl.int32), scores, runs, listed, lines, limit)
    above, turn = found * 0, found * 0
    while (high - low > 1) & (found > cap):
        middle = (low + high) >> 1
        if GUESS:  # two of three times; halving bounds their number
            guess = tl.minimum(tl.maximum(_guess(low, high, found, above, (most + cap) // 2), low + 1), high - 1)
            middle = tl.where(turn == 2, middle, guess)
            turn = tl.where(turn == 2, 0, turn + 1)
        count = _count(order, middle.to(tl.int32), scores, runs, listed, lines, limit)
        enough = count >= most
        low, found = tl.where(enough, middle, low), tl.where(enough, count, found)
        high, above = tl.where(enough, high, middle), tl.where(enough, above, count)
    return low.to(tl.int32), found, above


@triton.jit
def _cut(order, number, least, room, scores, runs, listed, lines, limit):
    """The number below which `room` candidates of the order `least` are."""
    low, high = room * 0, limit
    while high - low > 1:
        middle = (low + high) >> 1
        count = tl.sum(((order == least) & (number < middle)).to(tl.int32))
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
    LINES: tl.constexpr, WIDTH: tl.constexpr, GUESS: tl.constexpr,
):
    """Write the numbers of the highest candidates to out, in ascending order; of equals the first.

    They are at least `most` if there are so many, and at most `cap`. Returns how many, and the lowest one's order.
    """
    order, number = _orders(scores, runs, listed, 0, lines, limit, LINES, WIDTH)
    least, found, above = _least(order, start, most, cap, scores, runs, listed, lines, limit, GUESS)
    cut = limit
    if found > cap:
        cut = _cut(order, number, least, cap - above, scores, runs, listed, lines, limit)
    written = _write(order, number, least, cut, out)
    if lines > LINES:
        for at in tl.range(LINES, lines, LINES, num_stages=1):
            order, number = _orders(scores, runs, listed, at, lines, limit, LINES, WIDTH)
            written += _write(order, number, least, cut, out + written)
    return tl.minimum(found, cap), least


@triton.jit(do_not_specialize=["most"])
def choose(
    words, chosen, table, tail_ptr, most,
    GROUP: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, CAP: tl.constexpr,
    GUESS: tl.constexpr,
):
    """Program n: the `most` highest pages or tokens of query head n, all of them if there are no more.

    Of single tokens, the highest runs are chosen first, `most` to CAP of them: the highest tokens are among theirs,
    because outside of them every token is at most the best of each. The loop over both makes one code of them: a
    program waits for instructions that it executes for the first time, and they were most of its time.

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
            _choose(words + tl.multiple_of(at, 4), chosen, False, number, total, LEAST, wanted, wanted, chosen + out,
                    LINES, WIDTH, GUESS)
        else:
            runs = tl.num_programs(0).to(tl.int64) * most + n * CAP
            best = tl.load(entry + BEST) + g * tl.load(entry + BEST_STRIDE)
            lines, start, few = tl.cdiv(number, WIDTH), LEAST, tl.minimum(most, number)
            for stage in tl.range(0, 2, num_stages=1):
                last = stage == 1
                scores = words + tl.multiple_of(tl.where(last, at, best), 4)
                limit, cap = tl.where(last, total, number), tl.where(last, wanted, CAP)
                taken, least = _choose(
                    scores, chosen + runs, last, lines, limit, start, tl.where(last, wanted, few), cap,
                    chosen + tl.where(last, out, runs), LINES, WIDTH, GUESS)
                lines, start = taken, tl.where(number >= most, least, LEAST)
                tl.debug_barrier()  # every thread has written its runs before one of them reads them
