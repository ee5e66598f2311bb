"""Time per token of model.generate(): with transformers' caches, and with the compressed cache, eager and captured.

    python -m scripts.bench.decoding.generate OUT             # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.decoding.generate OUT --shape reference --case 2x600 --new 40 --warm-up 8     # a CPU

Every cache is filled with random keys and values, then generate() decodes greedily from it. A call is timed from its
first decoded token to its last: the time of a call of WARM_UP + NEW tokens less that of a call of WARM_UP tokens, which
takes the call's own start with it, over NEW. Each is the least of REPEATS calls, since a busy host only adds to them.
The loop of `scripts.bench.decoding.generation` stands beside it, over as many tokens. With 192 of them, tokens leave
the window six times in either, and the middle grows once. Prints and keeps OUT/generate.csv, in which a run that was
killed goes on:

    step_ms         of a token, once all is compiled and captured
    first_call_s    the first call of WARM_UP + NEW tokens, where it compiles or captures a step
    later_call_s    the same call again; the difference is what compiling and capturing take
    first_tokens_s  a later call of WARM_UP tokens
    captured        whether the calls that are timed replay a captured step of this project's cache
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, CompileConfig, PreTrainedModel

from leank.data_gen.amount import amount
from leank.eval.cache import CompressedCache
from leank.eval.cache.generate import generate
from leank.eval.cache.graph import CAPTURE_FOR
from leank.eval.methods.channels.leank import LeanK
from scripts.bench.common.caches import Contender, contenders, fill, subject
from scripts.bench.common.table import Record, Table, attempt, complain
from scripts.bench.common.timing import PROFILED, WARM_UP, clear
from scripts.bench.decoding.generation import decode

REPEATS = 2  # calls of each length
CASES = ("1x32768", "8x16384", "32x8192")
LOOPS = ("model.generate", "cache.generate", "benchmark loop")
NAMES = ("cache", "batch", "prompt", "loop")  # that tell rows apart
COLUMNS = ("step_ms", "first_call_s", "later_call_s", "first_tokens_s", "captured", "tokens_per_s", "gb",
           "formula_gb", "error")  # fmt: skip
GENERATED = {"LeanK": True, "own cache, nothing pruned": True, "StaticCache": False, "DynamicCache": False}


@torch.no_grad()
def call(
    model: Any, contender: Contender, rows: int, prompt: int, new: int, captured: bool, cache: Cache | None = None
) -> float:
    """Seconds of one generate() of `new` tokens from a filled cache; None = a new cache."""
    model.set_attn_implementation(contender.attention)
    cache = contender.make(rows, prompt + new + 1) if cache is None else cache
    cache.reset()
    fill(model, cache, rows, prompt)
    ids = torch.ones(rows, prompt + 1, dtype=torch.long, device=model.device)
    options = {"input_ids": ids, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    cuda = model.device.type == "cuda"
    if cuda and cache.is_compileable:
        options["compile_config"] = CompileConfig(fullgraph=True, dynamic=False)
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    if captured:
        generate(cache, model, **options)
    else:
        model.generate(past_key_values=cache, **options)
    if cuda:
        torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    print(f"  {contender.name}: {amount(new, 'token')} in {spent:.1f} s", flush=True)
    return spent


def per_token(
    model: PreTrainedModel, contender: Contender, rows: int, prompt: int, new: int, warm_up: int, captured: bool
) -> Record:
    """Milliseconds of a token once decoding runs, and seconds until it does.

    A compiled step belongs to one StaticCache, to its addresses and its length: another cache compiles anew. A captured
    step belongs to its cache as well. So all calls share one, or the difference between two calls would hold what their
    captures differ by.
    """
    if captured and warm_up + new <= CAPTURE_FOR + 1:
        raise ValueError(f"--warm-up and --new are {warm_up + new} tokens, too few to capture: give {CAPTURE_FOR + 2}")
    shared = captured or contender.name == "StaticCache"
    cache = contender.make(rows, prompt + warm_up + new + 1) if shared else None
    tokens = warm_up + new if shared else warm_up  # a call of few tokens captures nothing
    first = call(model, contender, rows, prompt, tokens, captured, cache)
    replayed = captured and isinstance(cache, CompressedCache) and cache.steps.loop is not None
    if captured and model.device.type == "cuda" and not replayed:
        raise RuntimeError("no step was captured, so the calls that follow would not be replays")
    least = []
    for tokens in (warm_up, warm_up + new):
        spent = []
        for _ in range(REPEATS):
            clear()
            spent.append(call(model, contender, rows, prompt, tokens, captured, cache))
        least.append(min(spent))
    short, long = least
    made = {"first_call_s": first, "later_call_s": long} if shared else {}
    return {
        "batch": rows,
        "step_ms": (long - short) / new * 1e3,
        "first_tokens_s": short,
        "captured": int(replayed),
        **made,
    }


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--case", nargs="+", default=CASES, help="ROWSxTOKENS of the prompt")
    parser.add_argument("--new", type=int, default=192, help="tokens that are timed")
    parser.add_argument("--warm-up", type=int, default=16, help="tokens before them")
    parser.add_argument("--only", nargs="*", help="names of caches; default all")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    args = parser.parse_args(argv)
    model, mask, sizes = subject(args.shape)
    cuda = model.device.type == "cuda"
    table = Table(args.out / "generate.csv", NAMES, COLUMNS)

    def do(contender: Contender, batch: int, prompt: int, loop: str, work: Callable[[], Record]) -> None:
        if loop in args.loops and not table.has(contender.name, batch, prompt, loop):
            row: Record = {"cache": contender.name, "batch": batch, "prompt": prompt, "loop": loop}
            table.add(attempt(row, lambda found: found.update(work())))
            clear()

    for case in args.case:
        batch, prompt = map(int, case.split("x"))
        for contender in contenders(model, LeanK(str(mask)).loaded, sizes):
            if args.only and contender.name not in args.only:
                continue
            ours = GENERATED[contender.name]
            for captured in [False, True] if ours else [False]:
                time_it = partial(per_token, model, contender, batch, prompt, args.new, args.warm_up, captured)
                do(contender, batch, prompt, "cache.generate" if captured else "model.generate", time_it)
            if ours:
                new = args.new + WARM_UP + PROFILED  # of which `decode` leaves out these
                loop = partial(decode, model, contender, batch, prompt, new, sizes.flush, cuda, profile=False)
                do(contender, batch, prompt, "benchmark loop", loop)
    complain(table.rows, "cache")


if __name__ == "__main__":
    main()
