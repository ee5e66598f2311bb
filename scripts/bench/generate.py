"""Time per token of model.generate(): with transformers' caches, and with the compressed cache, eager and captured.

    python -m scripts.bench.generate OUT                       # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.generate OUT --shape reference --case 2x600 --new 40 --warm-up 8      # a CPU, to look at it

Every cache is filled with random keys and values, then generate() decodes greedily from it. A call is timed from its
first decoded token to its last: the time of a call of WARM_UP + NEW tokens less that of a call of WARM_UP tokens, which
takes the call's own start with it, over NEW. Each is the least of REPEATS calls, since a busy host only adds to them; a
first call, which is not timed, compiles and captures. The benchmark loop of `scripts.bench.generation`
stands beside it. Prints and writes OUT/generate.csv.
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

from eval.cache.generate import generate
from eval.methods.channels.leank import LeanK
from scripts.bench.common import Contender, Record, attempt, clear, complain, contenders, fill, subject, write_rows
from scripts.bench.generation import decode

REPEATS = 2  # calls of each length
CASES = ("1x32768", "8x16384", "32x8192")
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
    print(f"  {contender.name}: {new} tokens in {spent:.1f} s", flush=True)
    return spent


def per_token(
    model: PreTrainedModel, contender: Contender, rows: int, prompt: int, new: int, warm_up: int, captured: bool
) -> Record:
    """Milliseconds of a token once decoding runs, and seconds until it does.

    A compiled step belongs to one StaticCache, to its addresses and its length: another cache compiles anew. A captured
    step belongs to its cache as well. So all calls share one, or the difference between two calls would hold what their
    captures differ by.
    """
    shared = captured or contender.name == "StaticCache"
    cache = contender.make(rows, prompt + warm_up + new + 1) if shared else None
    call(model, contender, rows, prompt, warm_up, captured, cache)  # compiles kernels, and captures
    least = []
    for tokens in (warm_up, warm_up + new):
        spent = []
        for _ in range(REPEATS):
            clear()
            spent.append(call(model, contender, rows, prompt, tokens, captured, cache))
        least.append(min(spent))
    short, long = least
    return {"batch": rows, "step_ms": (long - short) / new * 1e3, "first_tokens_s": short}


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--case", nargs="+", default=CASES, help="ROWSxTOKENS of the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that are timed")
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before them")
    parser.add_argument("--only", nargs="*", help="names of caches; default all")
    args = parser.parse_args(argv)
    model, mask, sizes = subject(args.shape)
    cuda = model.device.type == "cuda"
    rows: list[Record] = []
    args.out.mkdir(parents=True, exist_ok=True)

    def do(work: Callable[[], Record], **row: object) -> None:
        rows.append(attempt(row, lambda found: found.update(work())))
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        write_rows(args.out / "generate.csv", rows)
        clear()

    for case in args.case:
        batch, prompt = map(int, case.split("x"))
        for contender in contenders(model, LeanK(str(mask)).loaded, sizes):
            if args.only and contender.name not in args.only:
                continue
            ways = [False, True] if GENERATED[contender.name] else [False]
            for captured in ways:
                do(
                    partial(per_token, model, contender, batch, prompt, args.new, args.warm_up, captured),
                    cache=contender.name, prompt=prompt, loop="cache.generate" if captured else "model.generate",
                )  # fmt: skip
            if GENERATED[contender.name]:
                do(
                    partial(decode, model, contender, batch, prompt, args.new, sizes.flush, cuda),
                    cache=contender.name, prompt=prompt, loop="benchmark loop",
                )  # fmt: skip
    complain(rows, "cache")


if __name__ == "__main__":
    main()
