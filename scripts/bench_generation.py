"""Decoding end to end: tokens a second with the compressed cache and with dense ones, in one loop (LeanK, table 8).

    python -m scripts.bench_generation OUT                       # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench_generation OUT --shape reference --prompt 600 --new 8 --batch 2      # a CPU, to look at it

Every cache is filled with `prompt` random tokens; then `new` tokens are forced on every row, once in an eager loop and
once as a captured CUDA graph where the cache allows that. Prefill is timed apart. At `--batch` rows, and at the most
rows that fit each cache. Prints and writes OUT/generation.csv: tokens a second, and of one step the milliseconds in
attention, in matrix products, in other kernels, and on the clock.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from eval.cache import CompressedCache, Sizes, bytes_per_row, compressed_cache
from eval.cache.hook import ATTENTION
from eval.models import ModelConfig, load_model
from leank_train import backbone
from leank_train.mask import ChannelMask
from scripts.attention_cases import LLAMA, MASKS
from scripts.shapes import llama8b

ROOT = Path(__file__).resolve().parents[1]
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
    """LeanK, and three dense caches: transformers' two, and our own storage and kernel with nothing pruned."""
    config = model.config
    layers, heads, dim = backbone.kv_shape(config)
    everything = torch.ones(layers, heads, dim, dtype=torch.bool)

    def dense(tokens: int) -> int:
        return 2 * layers * heads * dim * tokens * model.dtype.itemsize

    def ours(keep: Any) -> Callable[[int, int], Any]:
        return lambda rows, room: compressed_cache(model, keep, sizes.sink, sizes.window, sizes.flush)

    return [
        Contender("LeanK", ours(mask), lambda n: bytes_per_row(mask, n, model.dtype, sizes), ATTENTION, True),
        Contender("own cache, nothing pruned", ours(everything), dense, ATTENTION, True),
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
    """Greedy steps on one cache, eager or as a captured graph."""

    def __init__(self, model: Any, contender: Contender, rows: int, prompt: int, new: int):
        model.set_attn_implementation(contender.attention)
        self.model, self.cache = model, contender.make(rows, prompt + new + 16)
        fill(model, self.cache, rows, prompt)
        self.token = torch.ones(rows, 1, dtype=torch.long, device=model.device)
        self.position = torch.full((rows, 1), prompt, device=model.device)

    def step(self) -> None:
        out = self.model(
            input_ids=self.token, position_ids=self.position, past_key_values=self.cache, use_cache=True
        )  # fmt: skip
        self.token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    def graphed(self) -> Callable[[], None]:
        """One step as a graph, with what the cache does on the host after it."""
        for _ in range(3):
            self.step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.step()
        if not isinstance(self.cache, CompressedCache):
            return graph.replay

        def replay() -> None:
            graph.replay()
            self.cache.advance()

        return replay


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


def where(step: Callable[[], None], steps: int = 4) -> dict[str, float]:
    """Milliseconds of one step on the GPU, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    total = {"attention_ms": 0.0, "products_ms": 0.0, "other_ms": 0.0}
    for event in found.key_averages():
        name = event.key.lower()
        kind = "attention_ms" if any(n in name for n in ATTENTIONS) else None
        kind = kind or ("products_ms" if any(n in name for n in PRODUCTS) else "other_ms")
        total[kind] += event.self_device_time_total / 1e3 / steps
    return total


@torch.no_grad()
def decode(model: Any, contender: Contender, rows: int, prompt: int, new: int, graph: bool) -> dict[str, Any]:
    """Tokens a second of one contender, and where a step's time goes."""
    cuda = model.device.type == "cuda"
    decoding = Decoding(model, contender, rows, prompt, new)
    step = decoding.graphed() if graph else decoding.step
    for _ in range(0 if graph else 2):
        step()
    spent = seconds(step, new - 8 if new > 16 else new, cuda)
    row = {"cache": contender.name, "loop": "graph" if graph else "eager", "batch": rows, "prompt": prompt, "new": new,
           "tokens_per_s": rows / spent, "step_ms": spent * 1e3}  # fmt: skip
    return {**row, **(where(step) if cuda else {})}


def largest(model: Any, contender: Contender, prompt: int, new: int, graph: bool) -> dict[str, Any]:
    """The same at the most rows that fit; begins at what the bytes allow and gives way by 3%."""
    free, _ = torch.cuda.mem_get_info()
    rows = int((free - 3e9) / contender.bytes(prompt + new + 16))
    while rows:
        try:
            return decode(model, contender, rows, prompt, new, graph)
        except torch.OutOfMemoryError:
            rows = int(rows * 0.97)
        clear()
    raise MemoryError(f"not one row of {prompt} tokens fits")


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def prefill_seconds(model: Any, contender: Contender, rows: int, prompt: int) -> float:
    """Seconds from prompt to first token, cache included."""
    model.set_attn_implementation(contender.attention)
    ids = torch.ones(rows, prompt, dtype=torch.long, device=model.device)

    def run() -> None:
        model(input_ids=ids, past_key_values=contender.make(rows, prompt + 16), use_cache=True, logits_to_keep=1)

    run()
    return seconds(run, 1, model.device.type == "cuda")


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
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if args.shape == "llama8b":
        if not cuda:
            raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
        model, mask, sizes = llama8b("cuda"), ChannelMask.from_official(MASKS / LLAMA), Sizes()
    else:
        model = load_model(ModelConfig())
        mask = ChannelMask.load(ROOT / "leank_train/assets/reference/mask_70pct.safetensors")
        sizes = Sizes(16, 144, 32)
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)

    def done(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        with open(args.out / "generation.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(k for r in rows for k in r)))
            writer.writeheader()
            writer.writerows(rows)
        clear()

    for contender in contenders(model, mask, sizes):
        if args.only and contender.name not in args.only:
            continue
        if args.prefill_rows:
            spent = prefill_seconds(model, contender, args.prefill_rows, args.prompt)
            done({"cache": contender.name, "loop": "prefill", "batch": args.prefill_rows, "prompt": args.prompt,
                  "step_ms": spent * 1e3})  # fmt: skip
        for new in args.new:
            for graph in (False, True) if cuda and contender.graph else (False,):
                done(decode(model, contender, args.batch, args.prompt, new, graph))
                if cuda:
                    done({**largest(model, contender, args.prompt, new, graph), "largest": True})


if __name__ == "__main__":
    main()
