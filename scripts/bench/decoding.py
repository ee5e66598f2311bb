"""What generate() takes a token, and how many bytes its cache holds: Llama-3.1-8B's shape, random weights, one GPU.

    python -m scripts.bench.decoding generate OUT        # model.generate() and cache.generate()
    python -m scripts.bench.decoding memory OUT          # bytes at the allocator (LeanK, figure 6); no weights needed
    python -m scripts.bench.decoding generate OUT --shape reference --case 1x300 --new 17 --warm-up 1     # a CPU

Caches are filled with random keys and values. Every row is a case; OUT/NAME.csv keeps those of a run that was killed.
`scripts.bench.methods` has the speed of decoding steps alone.

generate    step_ms of a token: the time of a call of --warm-up + --new tokens less that of a call of --warm-up tokens,
            over --new; each is the least of two. first_call_s: the first call, which compiles or captures a step;
            later_call_s: the same call again; captured: whether a captured step of this project's cache is replayed.
            Case after case of one process becomes slower by the clock (docs/lab/generation.md#later-graphs), so
            give each cache and case a process of its own
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import SHAPES

CASES = ("1x32768", "8x16384", "32x8192")
LOOPS = ("model.generate", "cache.generate")


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["generate", "memory"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b", help="generate")
    parser.add_argument("--case", nargs="+", default=CASES, help="generate: ROWSxTOKENS of the prompt")
    parser.add_argument("--new", type=int, default=192, help="generate: tokens that are timed")
    parser.add_argument("--warm-up", type=int, default=16, help="generate: tokens before those that are timed")
    parser.add_argument("--only", nargs="*", help="generate: names of caches; default all")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS, help="generate")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="memory: rows")
    parser.add_argument("--context", type=int, default=32768, help="memory: tokens of a row")
    parser.add_argument("--layers", type=int, help="memory: only the first layers of the mask")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import torch
from torch import Tensor
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel, StaticCache

from leank.eval.cache import CompressedCache, CompressedLayer, Sizes, bytes_per_row, compressed_cache, max_batch
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.generate import generate as cache_generate
from leank.eval.cache.graph import CAPTURE_FOR
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.memory import Memory, measure
from leank.eval.cache.storage.middle import Middle
from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.versions import CACHE
from scripts.bench.common import DIM, DTYPE, LLAMA, MASKS, Record, Table, clear, now, subject

OURS = ("LeanK", "own cache, nothing pruned")
REPEATS = 2  # calls of each length
WEIGHTS = 16.1e9  # bytes of Llama-3.1-8B in bf16


def load_mask(path: Path) -> ChannelMask:
    """A mask of this project, or a published one."""
    return ChannelMask.from_official(path) if path.suffix == ".pth" else ChannelMask.load(path)


# generate


@dataclass(frozen=True)
class Contender:
    """A cache to decode with."""

    name: str  # as it stands in the tables
    make: Callable[[int, int], Cache]  # (rows, tokens of room) -> an empty cache
    attention: str  # the model's attention implementation


def contenders(model: PreTrainedModel, mask: ChannelMask, sizes: Sizes) -> list[Contender]:
    """LeanK, and three dense caches: this project's storage and kernel with nothing pruned, and transformers' two.

    A step on a StaticCache has an attention mask, for which transformers 5.17 copies a layer's K and V once per query
    head (5.23 does not).
    """
    config = model.config

    def compressed(name: str, keep: ChannelMask | Tensor) -> Contender:
        return Contender(name, lambda rows, room: compressed_cache(model, keep, **vars(sizes)), ATTENTION)

    return [
        compressed(OURS[0], mask),
        compressed(OURS[1], torch.ones(*kv_shape(config), dtype=torch.bool)),
        Contender("StaticCache", lambda rows, room: StaticCache(config, max_cache_len=room), "sdpa"),
        Contender("DynamicCache", lambda rows, room: DynamicCache(config=config), "sdpa"),
    ]


def fill(model: PreTrainedModel, cache: Cache, rows: int, tokens: int) -> None:
    """Put random keys and values of `tokens` tokens into every layer, the same in each row."""
    _, heads, dim = kv_shape(model.config)
    for index, layer in enumerate(cache.layers):
        k, v = torch.randn(2, 1, heads, tokens, dim, device=model.device, dtype=model.dtype)
        k, v = (x.expand(rows, -1, -1, -1) for x in (k, v))
        if isinstance(layer, CompressedLayer):
            layer.compress(k, v)
        else:
            cache.update(k, v, index)


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
    if model.device.type == "cuda" and cache.is_compileable:
        options["compile_config"] = CompileConfig(fullgraph=True, dynamic=False)
    begin = now()
    if captured:
        cache_generate(cache, model, **options)
    else:
        model.generate(**{CACHE: cache}, **options)
    return now() - begin


def generate(
    row: Record, model: PreTrainedModel, contender: Contender, rows: int, prompt: int, new: int, warm_up: int,
    captured: bool,
) -> None:  # fmt: skip
    """Fill the row of a case.

    A compiled step belongs to one StaticCache, to its addresses and its length, and a captured step to its cache. So
    all calls share one, or the difference between two calls would hold what their captures differ by.
    """
    if captured and warm_up + new <= CAPTURE_FOR + 1:
        raise ValueError(f"--warm-up and --new are {warm_up + new} tokens, too few to capture: give {CAPTURE_FOR + 2}")
    shared = captured or contender.name == "StaticCache"
    cache = contender.make(rows, prompt + warm_up + new + 1) if shared else None
    first = call(model, contender, rows, prompt, warm_up + new if shared else warm_up, captured, cache)
    replayed = captured and isinstance(cache, CompressedCache) and cache.steps.loop is not None
    if captured and model.device.type == "cuda" and not replayed:
        raise RuntimeError("no step was captured, so the calls that follow would not be replays")
    short, long = (
        min(call(model, contender, rows, prompt, tokens, captured, cache) for _ in range(REPEATS))
        for tokens in (warm_up, warm_up + new)
    )
    row.update(step_ms=(long - short) / new * 1e3, first_tokens_s=short, captured=int(replayed))
    row.update({"first_call_s": first, "later_call_s": long} if shared else {})


def generate_cases(args: argparse.Namespace, table: Table) -> None:
    """Add the rows of every case, cache and loop."""
    model, path, sizes = subject(args.shape)
    for case in args.case:
        rows, prompt = map(int, case.split("x"))
        for contender in contenders(model, load_mask(path), sizes):
            if args.only and contender.name not in args.only:
                continue
            for loop in (one for one in args.loops if contender.name in OURS or one == LOOPS[0]):
                row: Record = {"cache": contender.name, "batch": rows, "prompt": prompt, "loop": loop}
                table.add(row, partial(generate, model=model, contender=contender, rows=rows, prompt=prompt,
                                       new=args.new, warm_up=args.warm_up,
                                       captured=loop == "cache.generate"))  # fmt: skip


# memory


def compressed(keep: Tensor, rows: int, context: int, sizes: Sizes, device: torch.device) -> tuple[Memory, int]:
    """Compress layers of random tokens under masks [L, H, D]; return the tensors' bytes and those at the allocator."""
    clear()
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    layers = [CompressedLayer(Middle(k), sizes, choose_backend("auto")) for k in keep]
    for layer in layers:
        k, v = torch.randn(2, 1, keep.shape[1], context, DIM, device=device, dtype=DTYPE)
        layer.compress(*(x.expand(rows, -1, -1, -1) for x in (k, v)))
    del k, v
    memory = measure(layers, {})
    return memory, torch.cuda.memory_allocated() - before if cuda else memory.total


def memory_cases(args: argparse.Namespace, table: Table) -> None:
    """Add a row for each batch; print the shares of K and V that are saved; draw OUT/memory.png."""
    from matplotlib.figure import Figure

    keep, sizes = load_mask(MASKS / LLAMA).keep[: args.layers], Sizes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (pruned, at), (whole, at_whole) = (
        compressed(mask, args.batch[0], args.context, sizes, device) for mask in (keep, torch.ones_like(keep))
    )
    k, v = 1 - pruned.middle_k / whole.middle_k, 1 - pruned.middle_v / whole.middle_v
    both = (at_whole - at) / (whole.middle_k + whole.middle_v)
    ratio, empty = 1 - keep.float().mean().item(), 1 - keep.any(-1).float().mean().item()
    print(f"beyond sink and window: K saved {k:.2%}, the mask prunes {ratio:.2%}; V saved {v:.2%}, heads without "
          f"channels {empty:.2%}; both as allocated {both:.2%}, expected {(ratio + empty) / 2:.2%}")  # fmt: skip
    rows = []
    for batch in args.batch:
        found, held = compressed(keep, batch, args.context, sizes, device)
        dense = 2 * keep.numel() * args.context * batch * DTYPE.itemsize
        formula = bytes_per_row(keep, args.context, DTYPE, sizes) * batch
        rows.append({"batch": batch, "context": args.context, "dense_gb": dense / 1e9, "leank_gb": held / 1e9,
                     "formula_gb": formula / 1e9, "slack_gb": found.slack / 1e9, "smaller": dense / held})  # fmt: skip
        table.add(dict(rows[-1]))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for name, label in (("dense_gb", "dense K and V"), ("leank_gb", "LeanK, at the allocator")):
        axis.plot([r["batch"] for r in rows], [r[name] for r in rows], marker=".", label=label)
    axis.set(xlabel="batch", ylabel="GB of cache", title=f"{args.context} tokens per row")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(args.out / "memory.png", dpi=150)
    if device.type == "cuda" and args.layers is None:
        free = int(torch.cuda.mem_get_info()[1] - WEIGHTS - 3e9)
        print(f"largest batch of {args.context} tokens: dense {free // (2 * keep.numel() * args.context * 2)}, LeanK "
              f"{max_batch(keep, args.context, free, DTYPE, sizes)}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parsed(argv)
    keys = ("cache", "batch", "prompt", "loop") if args.action == "generate" else ("batch", "context")
    table = Table(args.out / f"{args.action}.csv", keys)
    (generate_cases if args.action == "generate" else memory_cases)(args, table)
    table.check()


if __name__ == "__main__":
    main()
