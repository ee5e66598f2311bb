"""Decoding end to end: tokens per second with the compressed cache and with dense ones, in one loop (LeanK, table 8).

    python -m scripts.bench.decoding.generation OUT               # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.decoding.generation OUT --shape reference --prompt 600 --new 8 --batch 2      # a CPU

Every cache is filled with `prompt` random tokens. Then `new` tokens are forced on every row, as a captured CUDA graph
where the cache allows one, else in an eager loop. A cache with a graph runs eagerly, too, for the first of --new.
Prefill is timed apart. Batches are --batch rows and, as a graph, the most rows that fit each cache. The timed steps
are whole periods of the cache's flush.

Prints and writes OUT/generation.csv: tokens per second, and of one step the milliseconds on the clock and on the GPU,
in attention, in matrix products and in other kernels. A case that fails is printed and noted in its row, and costs the
others nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from leank.data_gen.amount import amount
from leank.eval.cache import CompressedCache, Sizes
from leank.eval.cache.storage.quantised import Packing
from leank.eval.methods.channels.leank import LeanK
from scripts.bench.common.caches import ROOM, WORK_SPACE, Contender, Decoding, contenders, fill, subject
from scripts.bench.common.table import Record, attempt, complain, said, write_rows
from scripts.bench.common.timing import PROFILED, WARM_UP, clear, profiled, seconds, where

PACKINGS = (Packing(8), Packing(4), Packing(2))


def timed(new: int, flush: int) -> int:
    """Steps of `new` that are timed: whole periods of the flush, so that they bear their share of moving tokens."""
    return max(0, new - WARM_UP - PROFILED) // flush * flush or new


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    contender: Contender,
    rows: int,
    prompt: int,
    new: int,
    flush: int,
    graph: bool,
    profile: bool = True,
) -> Record:
    """Tokens per second of one contender, and where the time of a step goes.

    rows: of the batch. prompt: tokens in the cache before decoding. new: tokens decoded per row.
    flush: tokens that leave the window at once. graph: whether the step is a captured CUDA graph.
    profile: whether to look where the time goes; see `profiled`.
    """
    cuda = model.device.type == "cuda"
    model.set_attn_implementation(contender.attention)
    before = flush if cuda else WARM_UP  # steps; the first tokens that leave the window compile what moves them
    cache = contender.make(rows, prompt + before + new + ROOM)
    fill(model, cache, rows, prompt)
    decoding = Decoding(model, cache, torch.full((rows, 1), prompt, device=model.device))
    step = decoding.graphed() if graph else decoding.step
    for _ in range(before):
        step()
    spent = seconds(step, timed(new, flush), cuda)
    held = cache.memory().total / 1e9 if isinstance(cache, CompressedCache) else float("nan")
    row = {"batch": rows, "tokens_per_s": rows / spent, "step_ms": spent * 1e3, "gb": held}
    row["formula_gb"] = rows * contender.bytes(prompt + before + timed(new, flush)) / 1e9
    return {**row, **(where(profiled(step)) if cuda and profile else {})}


def largest(model: PreTrainedModel, contender: Contender, prompt: int, new: int, flush: int) -> Record:
    """`decode` as a graph at the most rows that fit.

    The search begins at what the bytes allow and takes 3% less wherever that does not fit.
    Raises MemoryError if not one row fits.
    """
    free, _ = torch.cuda.mem_get_info()
    rows = int((free - WORK_SPACE) / contender.bytes(prompt + flush + new + ROOM))
    while rows:
        try:
            return decode(model, contender, rows, prompt, new, flush, True)
        except RuntimeError as error:  # of PyTorch, of a graph, of Triton: each has a class of its own
            if "out of memory" not in str(error).lower():
                raise
            print(f"{contender.name}: no room for {amount(rows, 'row')}", flush=True)
            rows = int(rows * 0.97)
        clear()
    raise MemoryError(f"not one row of {prompt} tokens fits")


@torch.no_grad()
def prefill_ms(model: PreTrainedModel, contender: Contender, rows: int, prompt: int) -> Record:
    """Milliseconds from prompt to first token, cache included."""
    model.set_attn_implementation(contender.attention)
    ids = torch.ones(rows, prompt, dtype=torch.long, device=model.device)

    def run() -> None:
        model(input_ids=ids, past_key_values=contender.make(rows, prompt + ROOM), use_cache=True, logits_to_keep=1)

    run()
    return {"batch": rows, "step_ms": seconds(run, 1, model.device.type == "cuda") * 1e3}


def fuse(model: PreTrainedModel) -> None:
    """Let torch.compile fuse what lies between products and attention, norms and activations: alike for every cache."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile()


def cases(
    model: PreTrainedModel, contender: Contender, sizes: Sizes, args: argparse.Namespace
) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """What is measured of one contender: the row's first columns, and the call that measures the others."""
    named = {"cache": contender.name, "prompt": args.prompt}
    if args.prefill_rows:
        yield {**named, "loop": "prefill"}, partial(prefill_ms, model, contender, args.prefill_rows, args.prompt)
    graphs = model.device.type == "cuda" and contender.graph
    for new in args.new:
        for batch in args.batch:
            one = partial(decode, model, contender, batch, args.prompt, new, sizes.flush)
            asked = {**named, "new": new, "batch": batch}
            if not graphs or (new == args.new[0] and not args.graph_only):
                yield {**asked, "loop": "eager"}, partial(one, False)
            if graphs:
                yield {**asked, "loop": "graph"}, partial(one, True)
        if graphs and args.largest:
            most = partial(largest, model, contender, args.prompt, new, sizes.flush)
            yield {**named, "loop": "graph", "new": new, "largest": True}, most


def add(measure: Callable[[], Record], row: Record) -> None:
    """Add what is measured to the row."""
    row.update(measure())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens in the cache before decoding")
    parser.add_argument("--new", type=int, nargs="+", default=[128, 1024], help="tokens decoded")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="rows")
    parser.add_argument("--only", nargs="*", help="names of caches; default all")
    parser.add_argument("--prefill-rows", type=int, default=8, help="rows of the prefill that is timed; 0 = none")
    parser.add_argument("--largest", action=argparse.BooleanOptionalAction, default=True,
                        help="also at the most rows that fit (a GPU, caches with a graph)")  # fmt: skip
    parser.add_argument("--graph-only", action="store_true", help="no eager loop where there is a graph")
    parser.add_argument("--fuse", action="store_true", help="norms and MLPs through torch.compile, for every cache")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    model, mask, sizes = subject(args.shape)
    if args.fuse:
        fuse(model)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Record] = []
    for contender in contenders(model, LeanK(str(mask)).loaded, sizes, PACKINGS):
        if args.only and contender.name not in args.only:
            continue
        for row, measure in cases(model, contender, sizes, args):
            rows.append(attempt(row, partial(add, measure)))
            print(said(row, 2), flush=True)
            write_rows(args.out / "generation.csv", rows)
            clear()
    complain(rows, "cache")


if __name__ == "__main__":
    main()
