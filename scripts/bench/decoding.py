"""Speed and bytes of a whole model that decodes: Llama-3.1-8B's shape with random weights, on one GPU.

    python -m scripts.bench.decoding generate OUT        # model.generate() and cache.generate()
    python -m scripts.bench.decoding generation OUT      # tokens per second in the replay's loop (LeanK, table 8)
    python -m scripts.bench.decoding reads OUT           # Quest and Double Sparsity beside dense and LeanK
    python -m scripts.bench.decoding replies OUT --whole # throughput of long replies (Lethe, tables 2 and 3)
    python -m scripts.bench.decoding memory OUT          # bytes at the allocator (LeanK, figure 6); no weights needed
    python -m scripts.bench.decoding generation OUT --shape reference --prompt 300 --new 3 --batch 2     # a CPU

Caches are filled with random keys and values. Every row is a case; OUT/NAME.csv keeps those of a run that was killed.

generate    step_ms of a token: the time of a call of --warm-up + --new tokens less that of a call of --warm-up tokens,
            over --new; each is the least of two. first_call_s: the first call, which compiles or captures a step;
            later_call_s: the same call again; captured: whether a captured step of this project's cache is replayed.
            The loop of `generation` stands beside it. Case after case of one process becomes slower by the clock
            (docs/results/generation.md#later-graphs), so give each cache and case a process of its own
generation  --batch rows, and as a captured graph the most rows that fit; timed steps are whole flushes of the window
reads       graph_ms by the clock; read_gb: K, V, bounds and labels that attention reads a token
replies     dense, and methods that evict: --whole decodes every token of the replies, else --steps of them behind each
            length of --at. Random weights attend almost evenly, so --limit bounds what a layer of Lethe holds
Of a step: gpu_ms in kernels, of which attention_ms (ranking and choice included), products_ms, other_ms; kernels:
launches. gb: held by the cache; formula_gb: what its formula says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CompileConfig, PreTrainedModel

from leank.eval.cache import CompressedCache, CompressedLayer, Sizes, bytes_per_row, compressed_cache, max_batch
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.generate import generate as cache_generate
from leank.eval.cache.graph import CAPTURE_FOR, capturable
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.memory import Memory, measure
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.mask import ChannelMask
from scripts.bench.common import (
    DIM,
    DTYPE,
    LLAMA,
    MASKS,
    PROFILED,
    ROOM,
    SHAPES,
    WARM_UP,
    WORK_SPACE,
    Contender,
    Decoding,
    Record,
    Table,
    by_kind,
    bytes_read,
    clear,
    contenders,
    fill,
    now,
    out_of_memory,
    profiled,
    seconds,
    subject,
)

CASES = ("1x32768", "8x16384", "32x8192")
LOOPS = ("model.generate", "cache.generate", "benchmark loop")
OURS = ("LeanK", "own cache, nothing pruned")
REPEATS = 2  # calls of each length
PACKINGS = (Packing(8), Packing(4), Packing(2))
WEIGHTS = 16.1e9  # bytes of Llama-3.1-8B in bf16
SMALL, USUAL, DENSE_LAYERS = Sizes(16, 64, 32), Sizes(), 2  # of methods that choose reads; Quest's dense layers
READS = {  # method -> whether it keeps LeanK's channels, what it reads by, tokens that a query head reads, sizes
    "dense": (False, None, 0, USUAL), "leank": (True, None, 0, USUAL), "quest": (False, "quest", 1024, SMALL),
    "quest_leank": (True, "quest", 2048, USUAL), "double_sparsity": (False, "labels", 1024, SMALL),
    "double_sparsity_leank": (True, "labels", 2048, USUAL),
}  # fmt: skip


def load_mask(path: Path) -> ChannelMask:
    """A mask of this project, or a published one."""
    return ChannelMask.from_official(path) if path.suffix == ".pth" else ChannelMask.load(path)


# generate


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
        model.generate(past_key_values=cache, **options)
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
            own = contender.name in OURS
            new, graph = args.new[0] + WARM_UP + PROFILED, model.device.type == "cuda"
            for loop in args.loops if own else [loop for loop in args.loops if loop == "model.generate"]:
                row: Record = {"cache": contender.name, "batch": rows, "prompt": prompt, "loop": loop}
                if loop == "benchmark loop":
                    table.add(row, partial(decode, model=model, contender=contender, rows=rows, prompt=prompt, new=new,
                                           flush=sizes.flush, graph=graph, profile=False))  # fmt: skip
                else:
                    table.add(row, partial(generate, model=model, contender=contender, rows=rows, prompt=prompt,
                                           new=args.new[0], warm_up=args.warm_up,
                                           captured=loop == "cache.generate"))  # fmt: skip


# generation


def timed_steps(new: int, flush: int) -> int:
    """Steps of `new` that are timed: whole periods of the flush, so that they bear their share of moving tokens."""
    return max(0, new - WARM_UP - PROFILED) // flush * flush or new


@torch.no_grad()
def decode(
    row: Record, model: PreTrainedModel, contender: Contender, rows: int, prompt: int, new: int, flush: int,
    graph: bool, profile: bool = True,
) -> None:  # fmt: skip
    """Fill a row with tokens per second of one contender, and where the time of a step goes.

    rows: of the batch. prompt: tokens in the cache before decoding. new: tokens decoded per row.
    flush: tokens that leave the window at once. graph: whether the step is a captured CUDA graph.
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
    steps = timed_steps(new, flush)
    spent = seconds(step, steps)
    row.update(batch=rows, tokens_per_s=rows / spent, step_ms=spent * 1e3)
    if isinstance(cache, CompressedCache):
        row["gb"] = cache.memory().total / 1e9
    row["formula_gb"] = rows * contender.bytes(prompt + before + steps) / 1e9
    if cuda and profile:
        row.update(by_kind(profiled(step)))


def largest(row: Record, model: PreTrainedModel, contender: Contender, prompt: int, new: int, flush: int) -> None:
    """`decode` as a graph at the most rows that fit.

    The search begins at what the bytes allow and takes 3% less wherever that does not fit.
    Raises MemoryError if not one row fits.
    """
    rows = int((torch.cuda.mem_get_info()[0] - WORK_SPACE) / contender.bytes(prompt + flush + new + ROOM))
    while rows:
        try:
            return decode(row, model, contender, rows, prompt, new, flush, True)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            print(f"{contender.name}: no room for {rows} rows", flush=True)
            rows = int(rows * 0.97)
        clear()
    raise MemoryError(f"not one row of {prompt} tokens fits")


@torch.no_grad()
def prefill(row: Record, model: PreTrainedModel, contender: Contender, rows: int, prompt: int) -> None:
    """Fill a row with milliseconds from prompt to first token, cache included."""
    model.set_attn_implementation(contender.attention)
    ids = torch.ones(rows, prompt, dtype=torch.long, device=model.device)

    def run() -> None:
        model(input_ids=ids, past_key_values=contender.make(rows, prompt + ROOM), use_cache=True, logits_to_keep=1)

    run()
    row.update(batch=rows, step_ms=seconds(run, 1) * 1e3)


def generation_cases(args: argparse.Namespace, table: Table) -> None:
    """Add the rows of every cache: prefill, eager steps for the first of --new, graphs, the most rows that fit."""
    model, path, sizes = subject(args.shape)
    for module in model.modules():  # norms and activations, alike for every cache
        if args.fuse and type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile()
    for contender in contenders(model, load_mask(path), sizes, PACKINGS):
        if args.only and contender.name not in args.only:
            continue
        base: Record = {"cache": contender.name, "prompt": args.prompt}
        given: dict[str, Any] = {"model": model, "contender": contender, "prompt": args.prompt}
        if args.prefill_rows:
            table.add({**base, "loop": "prefill", "asked": args.prefill_rows},
                      partial(prefill, rows=args.prefill_rows, **given))  # fmt: skip
        graphs = model.device.type == "cuda" and contender.graph
        for new in args.new:
            given |= {"new": new, "flush": sizes.flush}
            for batch in args.batch:
                for graph in (False, True):
                    if graphs if graph else not graphs or (new == args.new[0] and not args.graph_only):
                        loop = "graph" if graph else "eager"
                        row = {**base, "loop": loop, "new": new, "asked": batch}
                        table.add(row, partial(decode, rows=batch, graph=graph, **given))
            if graphs and args.largest:
                table.add({**base, "loop": "graph", "new": new, "asked": "largest"}, partial(largest, **given))


# reads


@torch.no_grad()
def read(row: Record, model: PreTrainedModel, keep: Tensor, rows: int, tokens: int, config: Any) -> None:
    """Fill the row of a method of READS. Labels are the first kept channels: any cost as much."""
    from leank.eval.cache.attention.backend import Auto
    from leank.eval.cache.attention.choose import Chosen
    from leank.eval.methods.reads.double_sparsity import Labels
    from leank.eval.methods.reads.quest import Quest

    pruned, kind, budget, sizes = READS[str(row["method"])]
    middles = []
    for layer, mask in enumerate(keep if pruned else torch.ones_like(keep)):
        few = mask & (mask.cumsum(-1) <= mask.shape[-1] // 8)
        quest = Quest(budget, 16, DENSE_LAYERS) if kind == "quest" and layer >= DENSE_LAYERS else None
        middles.append(Middle(mask, reads=Labels(few, budget) if kind == "labels" else quest))
    cache = compressed_cache(model, middles, sizes.sink, sizes.window, sizes.flush, "triton")
    assert isinstance(cache.choice, Auto)
    cache.choice.chosen = Chosen(config)
    fill(model, cache, rows, tokens)
    step = Decoding(model, cache, torch.full((rows, 1), tokens, device=model.device)).graphed()
    for _ in range(sizes.flush):  # the first flush compiles what moves tokens, and makes room for some later ones
        step()
    row["graph_ms"] = seconds(step, 2 * sizes.flush) * 1e3
    row.update(by_kind(profiled(step)))
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    stores = [layer.store for layer in cache.compressed if layer.store is not None]
    row.update(read_gb=sum(bytes_read(store, group) for store in stores) / 1e9, held_gb=cache.memory().total / 1e9)


def reads_cases(args: argparse.Namespace, table: Table) -> None:
    """Add the rows of methods that choose what they read."""
    from leank.eval.cache.attention.choose import ChosenConfig
    from scripts.bench.attention import options

    config = ChosenConfig(**options(args.set))
    model, path, _ = subject("llama8b")
    keep = load_mask(path).keep
    for rows in args.batch:
        for tokens in args.lengths:
            for method in args.methods or READS:
                row: Record = {"method": method, "length": tokens, "rows": rows, "set": " ".join(args.set)}
                table.add(row, partial(read, model=model, keep=keep, rows=rows, tokens=tokens, config=config))


# replies


class Replies:
    """Measures replies of one model. limit: what a layer of Lethe holds at most, 0 = no bound."""

    def __init__(self, shape: str, limit: int) -> None:
        self.shape, self.limit = shape, limit
        self.model, self.mask, self.sizes = subject(shape)
        self.cuda = self.model.device.type == "cuda"
        self.base = torch.cuda.memory_allocated() if self.cuda else 0

    def cache(self, name: str, rows: int, tokens: int) -> Cache:
        """A filled cache: "dense", "transformers", "leank", or of a method that evicts while decoding."""
        self.model.set_attn_implementation("sdpa" if name == "transformers" else ATTENTION)
        own = {"dense": "own cache, nothing pruned", "transformers": "DynamicCache", "leank": "LeanK"}
        if name in own:
            (one,) = [c for c in contenders(self.model, load_mask(self.mask), self.sizes) if c.name == own[name]]
            cache = one.make(rows, tokens)
        else:
            cache = self.evicting(name)
        fill(self.model, cache, rows, tokens, scored=True)
        return cache

    def evicting(self, name: str) -> Cache:
        """An empty cache of a method of conf/method; raises ValueError for one that does not evict while decoding."""
        from leank.eval.inference.models import ModelConfig, load_config
        from leank.eval.methods.tokens.lethe import Lethe
        from scripts.bench.methods import configured

        tokenizer = load_config(ModelConfig())[1]
        (method,) = configured(name, self.shape, self.mask, self.sizes, self.model.config, tokenizer)
        tokens = method.tokens
        if isinstance(tokens, Lethe) and self.limit:
            tokens = replace(tokens, limit=self.limit, evict_at=min(tokens.evict_at, self.limit))
        sizes = Sizes(method.sink, method.window, method.flush)
        prompt: Any = None  # the pass over a prompt, of which these methods read nothing here
        layers = range(self.model.config.num_hidden_layers)
        policies = [None if tokens is None else tokens.eviction(prompt, self.model.config, sizes) for _ in layers]
        if None in policies:
            raise ValueError(f"{name} does not evict while decoding; name a method that does")
        return compressed_cache(self.model, [Middle(eviction=p) for p in policies], *vars(sizes).values())

    @torch.no_grad()
    def begin(self, row: Record, name: str, rows: int, tokens: int) -> Decoding:
        """Fill a cache, and capture the step where that can be."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        cache = self.cache(name, rows, tokens)
        decoding = Decoding(self.model, cache, torch.full((rows, 1), tokens, device=self.model.device))
        self.timed(decoding, WARM_UP)
        row["eager_ms"] = self.timed(decoding, WARM_UP)[0] * 1e3
        row["graph"] = int(self.cuda and capturable(cache))
        if row["graph"]:
            decoding.graphed()
        return decoding

    def sampled(self, row: Record, name: str, rows: int, tokens: int, steps: int) -> None:
        """Fill the row of `steps` steps behind `tokens` tokens."""
        decoding = self.begin(row, name, rows, tokens)
        self.timed(decoding, steps)  # compiles what moves and drops tokens
        self.note(row, decoding.loop.cache, rows, *self.timed(decoding, steps))

    def whole(self, table: Table, first: Record, ends: Sequence[int]) -> None:
        """Add a row for each length of a reply, all of whose tokens are decoded: means from its beginning on."""
        rows, begun, done, spent, worst = int(str(first["batch"])), dict(first), 0, 0.0, 0.0
        decoding = self.begin(begun, str(first["method"]), rows, int(str(first["prompt"])))
        for end in sorted(ends):
            mean, longest = self.timed(decoding, end - done)
            spent, worst, done = spent + mean * (end - done), max(worst, longest), end
            row: Record = {**begun, "reply": end}
            self.note(row, decoding.loop.cache, rows, spent / done, worst)
            table.add(row)

    @torch.no_grad()
    def timed(self, decoding: Decoding, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of the longest as the host sees it."""
        begin = last = now()
        worst = 0.0
        for _ in range(steps):
            decoding.step()
            at = time.perf_counter()
            worst, last = max(worst, at - last), at
        return (now() - begin) / steps, worst

    def note(self, row: Record, cache: Cache, rows: int, mean: float, worst: float) -> None:
        """Fill in what decoding took."""
        row.update(step_ms=mean * 1e3, tokens_s=rows / mean, worst_ms=worst * 1e3)
        if isinstance(cache, CompressedCache):
            row["gb"] = cache.memory().total / 1e9
        if self.cuda:
            row["peak_gb"] = (torch.cuda.max_memory_allocated() - self.base) / 1e9


def replies_cases(args: argparse.Namespace, table: Table) -> None:
    """Add the rows of long replies."""
    bench = Replies(args.shape, args.limit)
    for rows in args.batch:
        for name in args.methods or ["dense", "lethe", "h2o"]:
            first: Record = {"method": name, "batch": rows, "prompt": args.prompt}
            if args.whole:
                bench.whole(table, first, args.at)
                clear()
                continue
            for at in args.at:
                tokens = args.prompt + at
                table.add({**first, "reply": at},
                          partial(bench.sampled, name=name, rows=rows, tokens=tokens, steps=args.steps))  # fmt: skip


# memory


def sealed(keep: Tensor, rows: int, context: int, sizes: Sizes, device: torch.device) -> tuple[Memory, int]:
    """Seal layers of random tokens; return the bytes of the tensors and the bytes at the allocator.

    keep: [L, H, D], True = kept. rows: of the batch. context: tokens of each row.
    """
    clear()
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    layers = [CompressedLayer(Middle(k), sizes, choose_backend("auto")) for k in keep]
    for layer in layers:
        k, v = torch.randn(2, 1, keep.shape[1], context, DIM, device=device, dtype=DTYPE)
        layer.seal(*(x.expand(rows, -1, -1, -1) for x in (k, v)))
    del k, v
    memory = measure(layers, {})
    return memory, torch.cuda.memory_allocated() - before if cuda else memory.total


def memory_cases(args: argparse.Namespace, table: Table) -> None:
    """Add a row for each batch; print the shares of K and V that are saved; draw OUT/memory.png."""
    from matplotlib.figure import Figure

    keep, sizes = load_mask(MASKS / LLAMA).keep[: args.layers], Sizes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (pruned, at), (whole, at_whole) = (
        sealed(mask, args.batch[0], args.context, sizes, device) for mask in (keep, torch.ones_like(keep))
    )
    k, v = 1 - pruned.middle_k / whole.middle_k, 1 - pruned.middle_v / whole.middle_v
    both = (at_whole - at) / (whole.middle_k + whole.middle_v)
    ratio, empty = 1 - keep.float().mean().item(), 1 - keep.any(-1).float().mean().item()
    print(f"beyond sink and window: K saved {k:.2%}, the mask prunes {ratio:.2%}; V saved {v:.2%}, heads without "
          f"channels {empty:.2%}; both as allocated {both:.2%}, expected {(ratio + empty) / 2:.2%}")  # fmt: skip
    rows = []
    for batch in args.batch:
        found, held = sealed(keep, batch, args.context, sizes, device)
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


KEYS = {
    "generate": ("cache", "batch", "prompt", "loop"), "generation": ("cache", "prompt", "loop", "new", "asked"),
    "reads": ("method", "length", "rows", "set"), "replies": ("method", "batch", "prompt", "reply"),
    "memory": ("batch", "context"),
}  # fmt: skip
RUN: dict[str, Callable[[argparse.Namespace, Table], None]] = {
    "generate": generate_cases, "generation": generation_cases, "reads": reads_cases, "replies": replies_cases,
    "memory": memory_cases,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {  # of the settings that several actions have
    "generate": {"new": [192]}, "memory": {"batch": [1, 2, 4, 8, 16]},
    "generation": {"new": [128, 1024], "prompt": 4096, "batch": [64]}, "reads": {"batch": [1, 8]},
    "replies": {"prompt": 256, "batch": [1, 4, 8, 16, 32]},
}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=list(RUN))
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--batch", type=int, nargs="+", help="rows; all but generate")
    parser.add_argument("--prompt", type=int, help="generation, replies: tokens in the cache before decoding")
    parser.add_argument("--new", type=int, nargs="+", help="generate, generation: tokens decoded")
    parser.add_argument("--only", nargs="*", help="generate, generation: names of caches; default all")
    parser.add_argument("--methods", nargs="+", help="reads, replies: methods; replies also has leank, transformers")
    parser.add_argument("--case", nargs="+", default=CASES, help="generate: ROWSxTOKENS of the prompt")
    parser.add_argument("--warm-up", type=int, default=16, help="generate: tokens before those that are timed")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS, help="generate")
    parser.add_argument("--prefill-rows", type=int, default=8, help="generation: rows of the prefill; 0 = none")
    parser.add_argument("--largest", action=argparse.BooleanOptionalAction, default=True,
                        help="generation: also at the most rows that fit (a GPU, caches with a graph)")  # fmt: skip
    parser.add_argument("--graph-only", action="store_true", help="generation: no eager loop where there is a graph")
    parser.add_argument("--fuse", action="store_true", help="generation: norms and MLPs through torch.compile")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072, 4096], help="reads: tokens")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="reads: fields of ChosenConfig")
    parser.add_argument("--at", nargs="+", type=int, default=[1536, 4096, 8192, 20480], help="replies: their tokens")
    parser.add_argument("--steps", type=int, default=160, help="replies: steps that are timed, without --whole")
    parser.add_argument("--whole", action="store_true", help="replies: decode every token")
    parser.add_argument("--limit", type=int, default=1024, help="replies: tokens of a layer of Lethe; 0 = no bound")
    parser.add_argument("--context", type=int, default=32768, help="memory: tokens of a row")
    parser.add_argument("--layers", type=int, help="memory: only the first layers of the mask")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.action].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    table = Table(args.out / f"{args.action}.csv", KEYS[args.action])
    RUN[args.action](args, table)
    table.check()


if __name__ == "__main__":
    main()
