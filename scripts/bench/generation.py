"""Decoding end to end: tokens a second with the compressed cache and with dense ones, in one loop (LeanK, table 8).

    python -m scripts.bench.generation OUT                       # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.generation OUT --shape reference --prompt 600 --new 8 --batch 2      # a CPU, to look at it

Every cache is filled with `prompt` random tokens; then `new` tokens are forced on every row, as a captured CUDA graph
where the cache allows that and in an eager loop (beside a graph only for the first of --new). Prefill is timed apart.
At --batch rows, and, as a graph, at the most rows that fit each cache. Timed are whole periods of the cache's flush.
Prints and writes OUT/generation.csv: tokens a second, and of one step the milliseconds on the clock and on the GPU, in
attention, in matrix products and in other kernels. What fails is printed, noted in its row, and costs the others
nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from eval.cache import CompressedCache, Sizes, bytes_per_row, compressed_cache
from eval.cache.graph import DecodeLoop
from eval.cache.hook import ATTENTION
from eval.cache.storage.store import GROWTH
from eval.inference.models import ModelConfig, load_model
from eval.methods.channels.leank import LeanK
from leank_train import backbone
from leank_train.common.escape import csv_rows
from leank_train.common.files import write_text
from leank_train.mask import ChannelMask
from scripts.bench.attention_cases import LLAMA, MASKS
from scripts.bench.shapes import llama8b

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, PROFILED = 3, 4  # steps before those that are timed, and steps under the profiler after them
WORK_SPACE = 4e9  # bytes left beside the caches where they fill the GPU: activations, tables, a part that is growing
ROOM = 16  # tokens that a cache has room for beside prompt and timed steps
ATTENTIONS = ("decode", "flash", "fmha", "sdpa", "attention", "softmax")  # in the names of kernels
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")


@dataclass(frozen=True)
class Contender:
    """A cache to decode with. make(rows, room) -> an empty cache; bytes(tokens): of one row; attention: the model's."""

    name: str
    make: Callable[[int, int], Any]
    bytes: Callable[[int], int]
    attention: str
    graph: bool


def contenders(model: Any, mask: ChannelMask, sizes: Sizes) -> list[Contender]:
    """LeanK, and three dense caches: transformers' two, and our own storage and kernel with nothing pruned.

    A step on a StaticCache has a mask, for which transformers 5.17 copies a layer's K and V for every query head (5.23
    does not): there our own dense cache is the one to compare graphs with.
    """
    config = model.config
    layers, heads, dim = backbone.kv_shape(config)
    everything = torch.ones(layers, heads, dim, dtype=torch.bool)

    def dense(tokens: int) -> int:
        return 2 * layers * heads * dim * tokens * model.dtype.itemsize

    def ours(name: str, keep: Any) -> Contender:
        return Contender(
            name,
            lambda rows, room: compressed_cache(model, keep, sizes.sink, sizes.window, sizes.flush),
            lambda n: bytes_per_row(keep, n + GROWTH, model.dtype, sizes),  # what decoding adds grows ahead of need
            ATTENTION,
            True,
        )

    return [
        ours("LeanK", mask),
        ours("own cache, nothing pruned", everything),
        Contender("StaticCache", lambda rows, room: StaticCache(config, max_cache_len=room), dense, "sdpa", True),
        Contender("DynamicCache", lambda rows, room: DynamicCache(config=config), dense, "sdpa", False),
    ]


def fill(model: Any, cache: Any, rows: int, tokens: int) -> None:
    """Put random keys and values of `tokens` tokens into every layer, the same in each row."""
    _, heads, dim = backbone.kv_shape(model.config)
    for layer in cache.layers:
        k, v = torch.randn(2, 1, heads, tokens, dim, device=model.device, dtype=model.dtype)
        k, v = (x.expand(rows, -1, -1, -1) for x in (k, v))
        if isinstance(cache, CompressedCache):
            layer.seal(k, v)
        else:
            layer.update(k, v)


class Decoding:
    """Greedy steps on a filled cache, in the replay's own loop; position [rows, 1]: of the next token."""

    def __init__(self, model: Any, cache: Any, position: Tensor) -> None:
        self.loop, self.token = DecodeLoop(model, cache, position), torch.ones_like(position)

    def step(self) -> None:
        self.token.copy_(self.loop.step(self.token).argmax(-1, keepdim=True))

    def graphed(self) -> Callable[[], None]:
        """The step as a captured graph."""
        for _ in range(WARM_UP):
            self.step()
        self.loop.capture()
        return self.step


def seconds(step: Callable[[], None], steps: int, cuda: bool) -> float:
    """Seconds of one step, over `steps` of them."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


@dataclass(frozen=True)
class Launches:
    """A kernel (or copy) by name: launches and milliseconds on the GPU of one step."""

    name: str
    count: float
    ms: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        if any(part in name for part in ATTENTIONS):
            return "attention_ms"
        return "products_ms" if any(part in name for part in PRODUCTS) else "other_ms"


def profiled(step: Callable[[], None], steps: int = PROFILED) -> list[Launches]:
    """What one step runs on the GPU, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    launches = [
        Launches(event.key, event.count / steps, event.self_device_time_total / 1e3 / steps)
        for event in found.key_averages()
        if event.device_type != DeviceType.CPU
    ]
    return sorted(launches, key=lambda launch: -launch.ms)


def where(found: Iterable[Launches]) -> dict[str, float]:
    """Milliseconds of one step on the GPU, in all and by kind of kernel, and how many kernels it launches.

    Attention in plain PyTorch has no kernel of its own: it is among the products and the others.
    """
    total = {"gpu_ms": 0.0, "attention_ms": 0.0, "products_ms": 0.0, "other_ms": 0.0, "kernels": 0.0}
    for launches in found:
        total[launches.kind] += launches.ms
        total["gpu_ms"] += launches.ms
        total["kernels"] += launches.count
    return total


def timed(new: int, flush: int) -> int:
    """Steps of `new` that are timed: whole periods of the flush, so that they bear their share of moving tokens."""
    return max(0, new - WARM_UP - PROFILED) // flush * flush or new


@torch.no_grad()
def decode(
    model: Any, contender: Contender, rows: int, prompt: int, new: int, flush: int, graph: bool
) -> dict[str, Any]:
    """Tokens a second of one contender, and where a step's time goes."""
    cuda = model.device.type == "cuda"
    model.set_attn_implementation(contender.attention)
    cache = contender.make(rows, prompt + new + ROOM)
    fill(model, cache, rows, prompt)
    decoding = Decoding(model, cache, torch.full((rows, 1), prompt, device=model.device))
    step = decoding.graphed() if graph else decoding.step
    for _ in range(0 if graph else WARM_UP):
        step()
    spent = seconds(step, timed(new, flush), cuda)
    row = {"batch": rows, "tokens_per_s": rows / spent, "step_ms": spent * 1e3}
    return {**row, **(where(profiled(step)) if cuda else {})}


def largest(model: Any, contender: Contender, prompt: int, new: int, flush: int) -> dict[str, Any]:
    """The same, as a graph, at the most rows that fit; begins at what the bytes allow and gives way by 3%."""
    free, _ = torch.cuda.mem_get_info()
    rows = int((free - WORK_SPACE) / contender.bytes(prompt + new + ROOM))
    while rows:
        try:
            return decode(model, contender, rows, prompt, new, flush, True)
        except RuntimeError as error:  # of PyTorch, of a graph, of Triton: each has a class of its own
            if "out of memory" not in str(error).lower():
                raise
            print(f"{contender.name}: {rows} rows do not fit", flush=True)
            rows = int(rows * 0.97)
        clear()
    raise MemoryError(f"not one row of {prompt} tokens fits")


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def prefill_ms(model: Any, contender: Contender, rows: int, prompt: int) -> dict[str, Any]:
    """Milliseconds from prompt to first token, cache included."""
    model.set_attn_implementation(contender.attention)
    ids = torch.ones(rows, prompt, dtype=torch.long, device=model.device)

    def run() -> None:
        model(input_ids=ids, past_key_values=contender.make(rows, prompt + ROOM), use_cache=True, logits_to_keep=1)

    run()
    return {"batch": rows, "step_ms": seconds(run, 1, model.device.type == "cuda") * 1e3}


def fuse(model: Any) -> None:
    """Let torch.compile fuse what lies between products and attention, norms and activations: alike for every cache."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile()


def subject(shape: str) -> tuple[Any, Path, Sizes]:
    """(model, LeanK's mask, sizes of the cache) of "llama8b", random weights on a GPU, or "reference", as shipped."""
    if shape == "reference":
        return load_model(ModelConfig()), ROOT / "leank_train/assets/reference/mask_70pct.safetensors", Sizes(16, 144)
    if not torch.cuda.is_available():
        raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    return llama8b("cuda"), MASKS / LLAMA, Sizes()


def attempt(row: dict[str, Any], work: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The row that `work` fills; what goes wrong is printed and noted in it, and costs other rows nothing."""
    try:
        work(row)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as CSV, with the columns that any of them has."""
    write_text(path, csv_rows(rows))


def complain(rows: Iterable[dict[str, Any]], name: str) -> None:
    """Raise SystemExit with the `name` of rows that failed, if any did."""
    failed = [str(row[name]) for row in rows if row.get("error")]
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens in the cache before decoding")
    parser.add_argument("--new", type=int, nargs="+", default=[128, 1024], help="tokens decoded")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", nargs="*", help="names of caches; default all")
    parser.add_argument("--prefill-rows", type=int, default=8, help="rows of the prefill that is timed; 0 = none")
    parser.add_argument("--largest", action=argparse.BooleanOptionalAction, default=True,
                        help="also at the most rows that fit (a GPU, caches with a graph)")  # fmt: skip
    parser.add_argument("--fuse", action="store_true", help="norms and MLPs through torch.compile, for every cache")
    args = parser.parse_args(argv)
    model, mask, sizes = subject(args.shape)
    if args.fuse:
        fuse(model)
    cuda = model.device.type == "cuda"
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)

    def do(work: Callable[[], dict[str, Any]], **row: Any) -> None:
        rows.append(attempt(row, lambda found: found.update(work())))
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        write_rows(args.out / "generation.csv", rows)
        clear()

    for contender in contenders(model, LeanK(str(mask)).loaded, sizes):
        if args.only and contender.name not in args.only:
            continue
        named = {"cache": contender.name, "prompt": args.prompt}
        if args.prefill_rows:
            do(partial(prefill_ms, model, contender, args.prefill_rows, args.prompt), **named, loop="prefill")
        for new in args.new:
            given, graphs = (model, contender, args.batch, args.prompt, new, sizes.flush), cuda and contender.graph
            if new == args.new[0] or not graphs:
                do(partial(decode, *given, False), **named, loop="eager", new=new)
            if graphs:
                do(partial(decode, *given, True), **named, loop="graph", new=new)
                if args.largest:
                    do(partial(largest, model, contender, args.prompt, new, sizes.flush), **named, loop="graph",
                       new=new, largest=True)  # fmt: skip
    complain(rows, "cache")


if __name__ == "__main__":
    main()
