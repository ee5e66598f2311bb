"""First token, time a token and bytes held of every method, at several lengths and batches, in one run.

    python -m scripts.bench.decoding.methods OUT --lengths 4096 32768 131072 --batches 1 largest     # 8B shape, one GPU
    KIVI="--window 128 --methods dense papers/kivi4 papers/kivi4_think papers/kivi4_iap"
    python -m scripts.bench.decoding.methods OUT $KIVI --lengths 160 --new 338 --batches 300    # ThinK's tables 10, 11
    python -m scripts.bench.decoding.methods OUT $KIVI --lengths 4097 --new 128 --batches 15    # IAP's table 6
    python -m scripts.bench.decoding.methods OUT --shape reference --lengths 600 --new 4      # a CPU, to look at it

Every method of conf/method builds its cache from a pass over one random prompt and decodes forced tokens.
Methods without a pass of their own share one, and all batches of a length do. A batch repeats the prompt's cache in all
its rows. "largest" is the most rows that fit: it begins at what the bytes at the end of all steps allow, and takes a
twentieth less wherever that does not fit.

Prints and keeps OUT/methods.csv, with one row per method, length and batch. It is written anew after each row, and
a row that is there already is not measured again, so a run that was killed goes on where it stopped. A method that
fails costs its row. One that loses the GPU ends the run with status 75; started again, it goes on behind that row:

    rows, batch   what was asked for (1, 64, largest), and how many rows that was
    ttft_s        of one prompt: prefill_s (to the first token's logits, the least of `passes`) + cache_s (choosing and
                  storing)
    gb            held after the prompt, of which formula_gb by the method's formula (empty where data decide), the rest
                  being tables and spare room; peak_gb: the allocator's peak while decoding, weights included
    read_gb       K, V, bounds and labels that attention reads in a step; a query head reads what it chose by itself
    token_ms      of a decoding step, by `loop`: a captured CUDA graph, or Python; why_eager says why no graph. A graph
                  is timed over whole periods in which tokens leave the window, after one that compiles what moves them
    median_ms     of the same steps as the GPU sees them; worst_ms: the longest of them
    tokens_per_s  of all rows
    gpu_ms        of a step in kernels alone, of which attention_ms, products_ms, other_ms; kernels: launches per step.
                  Attention in plain PyTorch counts among products and others. It is what to compare: after three
                  rows of a process, later ones take 0.4 us more per kernel by the clock. --no-profile leaves these
                  columns out
    layer         above which a pass dropped tokens, where it looks for the layer itself; -1 = it found none
    seconds       that the row took
    error         of what failed, whose row ends there. What begins with "does not fit", "too slow" (--limit) or
                  "the GPU was lost" is not tried again until its row is deleted; other errors are

The longest kernels of each are in OUT/kernels.csv; OUT/bytes.png is time a token against bytes, OUT/first_token.png
first token against length. "dense" decodes in this project's own storage with nothing pruned, so that a graph can be
captured; it costs no cache_s, because a dense cache goes on in the buffer of its pass.

Weights are random, so attention is nearly uniform. Where shapes alone decide the cost, that does not matter: all
choices of channels and bits, fixed budgets of tokens, pages that are read. It does where the cost follows the data. ASL
looks for the layer at which ranks settle, and Lethe decides from the scores how many tokens stay and when they leave:
their rows say what random weights cost. DuoAttention's and LeanK's heads are those of their files. PyramidInfer's
counts are shares of the length, whatever the data. Calibration looks at few samples, because speed does not depend on
which channels it chooses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from leank.conf.eval import method_options
from leank.data_gen.amount import amount
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import Prefill
from leank.eval.methods import Method
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from scripts.bench.common.caches import subject
from scripts.bench.common.one_method import NAMES, Aside, Bench, configured, kind_of, now
from scripts.bench.common.table import (
    LOST,
    NO_ROOM,
    Record,
    Table,
    attempt,
    complain,
    gpu_lost,
    noted,
    read_table,
    within,
    write_rows,
)
from scripts.bench.common.timing import clear
from scripts.bench.decoding.methods_plot import draw

LEFT_OUT = {"by_length"}  # two masks, of which each prompt uses one: it costs what leank does
METHODS = ("dense", *sorted({*method_options()} - LEFT_OUT - {"dense"}))
COLUMNS = ("batch", "ttft_s", "prefill_s", "passes", "cache_s", "gb", "formula_gb", "read_gb", "peak_gb", "token_ms",
           "median_ms", "worst_ms", "tokens_per_s", "loop", "gpu_ms", "attention_ms", "products_ms", "other_ms",
           "kernels", "layer", "seconds", "why_eager", "error")  # fmt: skip
LONG = 6.0  # seconds of a pass that is not run twice
AGAIN = 75  # exit status where a row lost the GPU to this process, and another one can go on


def measure(
    bench: Bench, table: Table, methods: Sequence[Method], length: int, batches: Sequence[int | str], limit: float
) -> None:
    """The rows of methods that share a pass, at one length: every batch of all methods before the next batch.

    limit: seconds that the pass may take, and each row; 0 = no limit.
    Raises SystemExit if a row loses the GPU; that row is in the table.
    """
    left = [(method, asked) for asked in batches for method in methods if not table.has(method.label, length, asked)]
    if not left:
        return
    passed, error, begin = None, "", now()
    sharing = list({method.label: method for method, _ in left}.values())
    try:
        with within(limit):
            passed = passed_over(bench, sharing, length, any(asked == 1 for _, asked in left))
    except Exception as failure:
        error = noted(failure)
    print(f"pass of {', '.join(method.label for method in sharing)}: {now() - begin:.1f} s", flush=True)
    for number, (method, asked) in enumerate(left, 1):
        row: Record = {"method": method.label, "length": length, "rows": asked}
        begin = time.perf_counter()
        if passed is None:
            row["error"] = error
        else:
            last = number == len(left)
            attempt(row, partial(one, bench=bench, method=method, passed=passed, limit=limit, last=last))
        lost = bool(row.get("error")) and gpu_lost()
        if lost:
            row["error"] = f"{LOST}: {row['error']}"
        else:
            clear()
        row["seconds"] = time.perf_counter() - begin
        table.add(row)
        if bench.launches:
            write_rows(kernels_of(table), bench.launches)
        if lost:
            print(f"{method.label} lost the GPU: start again to go on behind it", flush=True)
            raise SystemExit(AGAIN)


@dataclass(frozen=True)
class Passed:
    """A pass over a prompt, the least seconds of as many as were run, and how it makes place for a batch."""

    prompt: Prefill
    seconds: float
    passes: int
    aside: Aside


def passed_over(bench: Bench, methods: Sequence[Method], length: int, timed: bool) -> Passed:
    """A pass that these methods share.

    timed: whether anyone asks for the seconds.

    The first of a length takes about a second more than the others: it meets shapes that nothing was prepared for.
    """
    queries = max(method.obs_queries for method in methods)
    prompt, first = bench.prefill(methods[0], length, queries, timed)
    if first > LONG or not timed:
        return Passed(prompt, first, 1, Aside(prompt))
    del prompt
    clear()
    prompt, second = bench.prefill(methods[0], length, queries)
    return Passed(prompt, min(first, second), 2, Aside(prompt))


def kernels_of(table: Table) -> Path:
    """The file of the longest kernels."""
    return table.path.with_name("kernels.csv")


def one(row: Record, bench: Bench, method: Method, passed: Passed, limit: float, last: bool = False) -> None:
    """Fill one row. last: whether nothing needs the pass afterwards."""
    rows, prompt = row["rows"], passed.prompt
    assert isinstance(rows, int | str)
    if prompt.selected_at:
        row["layer"] = prompt.selected_at[0]
    with within(limit):
        if rows == 1:
            cache, cache_s = bench.cache(method, prompt)
            row.update(prefill_s=passed.seconds, passes=passed.passes, cache_s=cache_s, ttft_s=passed.seconds + cache_s)
            bench.decode_one(row, method, prompt, cache)
        else:
            bench.decode(row, method, prompt, passed.aside, rows, last)


def kinds(methods: Sequence[Method]) -> Iterator[list[Method]]:
    """Methods that can share a pass, in the order of the first of each kind."""
    found: dict[tuple[object, bool], list[Method]] = {}
    for method in methods:
        found.setdefault(kind_of(method), []).append(method)
    yield from found.values()


def batch(text: str) -> int | str:
    """A number of rows, or "largest"."""
    return text if text == "largest" else int(text)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="prompt tokens")
    parser.add_argument("--batches", type=batch, nargs="+", default=[1], help="rows, or the word largest")
    parser.add_argument("--new", type=int, default=32, help="tokens that are timed; 32 = one flush of the window")
    parser.add_argument("--window", type=int, help="tokens at the end that stay whole, in methods that name no window")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="of conf/method; papers/NAME for a preset")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True,
                        help="look where a step's time goes")  # fmt: skip
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a row is given up; 0 = never")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    model, mask, sizes = subject(args.shape)
    sizes = sizes if args.window is None else replace(sizes, window=args.window)
    tokenizer = load_config(ModelConfig())[1]  # of the shipped model: calibration's ids are in any vocabulary
    bench, table = (
        Bench(Replay(model, tokenizer, Settings()), args.new, args.profile),
        Table(args.out / "methods.csv", NAMES, COLUMNS),
    )
    if kernels_of(table).is_file():
        bench.launches = read_table(kernels_of(table))
    ready: list[Method] = []
    for name in args.methods:

        def prepare(row: Record) -> None:
            found = configured(str(row["method"]), args.shape, mask, sizes, model.config, tokenizer)
            bench.replay.calibrate(found)
            ready.extend(found)

        failed = attempt({"method": name}, prepare)
        if "error" in failed:
            for length, asked in product(args.lengths, args.batches):
                if not table.has(name, length, asked):
                    table.add({**failed, "length": length, "rows": asked})
    print(f"{amount(len(ready), 'method')} made ready in {time.perf_counter() - begin:.1f} s", flush=True)
    for length in args.lengths:
        for methods in kinds(ready):
            measure(bench, table, methods, length, args.batches, args.limit)
            clear()
        draw(table.rows, args.out)
    complain((row for row in table.rows if not str(row.get("error")).startswith(NO_ROOM)), "method")


if __name__ == "__main__":
    main()
