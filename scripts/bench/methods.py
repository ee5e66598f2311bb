"""Time to first token and time per token of every method at one length, beside dense, in one run.

    python -m scripts.bench.methods OUT --length 32768           # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.methods OUT --shape reference --length 600 --new 4      # a CPU, to look at it

Each method of conf/eval/method runs its own pass over the same random prompt (after one warm-up per kind of pass),
builds its cache (twice, the second counts) and decodes `new` forced tokens of one row. Prints and writes
OUT/methods.csv:

    ttft_s        = prefill_s (to the first token's logits) + cache_s (choosing and storing)
    gb            held after the prompt
    eager_ms      per token in a Python loop, in which the window's first flush makes room in the middle
    graph_ms      per token as a captured CUDA graph, where the Triton kernel reads every layer
    gpu_ms        per token in kernels alone, of which attention_ms, products_ms, other_ms; kernels: launches per token.
                  eager_ms far above gpu_ms: the loop waits for Python. Attention in plain PyTorch counts among
                  products and others
    error         of a method that failed, whose row ends there

The longest kernels of each are in OUT/kernels.csv. Three rows are dense: the replay's own cache, transformers'
StaticCache, and this project's storage and kernel with nothing pruned. ASL and Lethe look at the prompt to decide how
much stays, so their times are those of random weights. Calibration looks at few samples, because speed does not depend
on which channels are chosen.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedTokenizerBase

from eval.cache import CompressedCache, Sizes
from eval.cache.graph import capturable
from eval.inference.models import ModelConfig, load_config
from eval.inference.prefill import Prefill, prefill
from eval.methods import Method
from eval.methods.channels.leank import LeanK
from eval.run.build import build_methods
from eval.run.replay import Replay, Settings, cache_bytes
from scripts.bench.common import (
    ROOM,
    WARM_UP,
    Contender,
    Decoding,
    Record,
    attempt,
    clear,
    complain,
    contenders,
    fill,
    profiled,
    seconds,
    subject,
    wait,
    where,
    write_rows,
)

METHODS = (
    "dense", "leank", "leank_budget", "think", "iap", "lowest_frequencies", "double_sparsity_channels", "snapkv",
    "h2o", "streaming_llm", "pyramidkv", "duo_attention", "duo_leank", "lethe", "gemfilter", "fastkv", "asl",
    "asl_two_pass", "pyramid_infer", "kivi", "kivi_leank", "quest", "quest_leank", "double_sparsity", "snapkv_think",
    "h2o_iap",
)  # fmt: skip
DENSE = ("StaticCache", "own cache, nothing pruned")  # contenders that follow "dense"
COLUMNS = ("ttft_s", "prefill_s", "cache_s", "gb", "eager_ms", "graph_ms", "gpu_ms", "attention_ms", "products_ms",
           "other_ms", "kernels")  # fmt: skip
SAMPLES, LONGEST = 4, 8  # most samples to calibrate on; kernels of each method that are written


def configured(
    name: str, shape: str, mask: Path, sizes: Sizes, model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Method:
    """The method `name` of conf/eval/method, with the settings for the reference model where it has some."""
    small = shape == "reference" and (files("conf.eval") / "method" / "reference" / f"{name}.yaml").is_file()
    with initialize_config_module("conf.eval", version_base="1.3"):
        given = compose("eval", [f"method=[{'reference/' if small else ''}{name}]"])
    given.mask, given.cache = str(mask), asdict(sizes)
    config: object = OmegaConf.to_container(given, resolve=True)
    assert isinstance(config, dict)
    for choice in config["method"][name].values():
        if isinstance(choice, dict) and "samples" in choice:
            choice["samples"] = min(SAMPLES, choice["samples"])
    (found,) = build_methods(config, model_config, tokenizer)
    return found


def now() -> float:
    """The clock in seconds, once the GPU has done its work."""
    wait()
    return time.perf_counter()


class Bench:
    """Measures rows of one model at one prompt.

    ids: [1, T], the prompt. new: tokens that are timed.
    """

    def __init__(self, replay: Replay, ids: Tensor, new: int) -> None:
        self.replay, self.model, self.ids, self.new = replay, replay.model, ids, new
        self.cuda = self.model.device.type == "cuda"
        self.warm: set[tuple[object, bool]] = set()  # kinds of passes that have run before
        self.launches: list[Record] = []

    def _pass(self, method: Method) -> tuple[Prefill, float]:
        """The method's own pass, and its seconds."""
        room, start = self.new + ROOM, now()
        if method.prefill is None:
            prompt = prefill(self.model, self.ids, None, room, method.obs_queries, None, method.column_sums)
        else:
            prompt = method.prefill.run(self.model, self.ids, None, room, method.obs_queries, None)
        return prompt, now() - start

    def _built(self, method: Method, prompt: Prefill) -> tuple[Cache, float]:
        """The method's cache, and the seconds that it took."""
        start = now()
        cache = method.cache(self.model, prompt)
        return cache, now() - start

    @torch.no_grad()
    def method(self, row: Record, method: Method) -> None:
        """Fill the row of a method."""
        self.replay.calibrate([method])
        kind = (method.prefill, method.column_sums)
        if kind not in self.warm:
            self._pass(method)
            self.warm.add(kind)
        prompt, prefill_s = self._pass(method)
        self._built(method, prompt)
        cache, cache_s = self._built(method, prompt)
        row.update(prefill_s=prefill_s, cache_s=cache_s, ttft_s=prefill_s + cache_s)
        row["gb"] = sum(own["total"] for own in cache_bytes(cache, prompt)) / 1e9
        position = prompt.lengths[:, None]
        del prompt  # its K and V, of which a compressed cache needs nothing more
        self._decoding(row, cache, position, None)

    @torch.no_grad()
    def contender(self, row: Record, contender: Contender) -> None:
        """Fill the row of a cache of random keys and values."""
        self.model.set_attn_implementation(contender.attention)
        length = self.ids.shape[1]
        cache = contender.make(1, length + 2 * (self.new + ROOM))
        fill(self.model, cache, 1, length)
        row["gb"] = (cache.memory().total if isinstance(cache, CompressedCache) else contender.bytes(length)) / 1e9
        self._decoding(row, cache, torch.full((1, 1), length, device=self.model.device), contender.graph)

    def _decoding(self, row: Record, cache: Cache, position: Tensor, graph: bool | None) -> None:
        """Time steps: eager, under the profiler, and as a graph.

        graph: whether a graph can be captured; None asks the cache.
        """
        decoding = Decoding(self.model, cache, position)
        for _ in range(WARM_UP):
            decoding.step()
        row["eager_ms"] = seconds(decoding.step, self.new, self.cuda) * 1e3
        if not self.cuda:
            return
        found = profiled(decoding.step)
        row.update(where(found))
        self.launches += [{"method": row["method"], **asdict(launches)} for launches in found[:LONGEST]]
        if capturable(cache) if graph is None else graph:
            row["graph_ms"] = seconds(decoding.graphed(), self.new, self.cuda) * 1e3


def line(row: Record | None = None) -> str:
    """A row as one line of the printed table; None gives the head."""
    if row is None:
        return f"{'method':32}" + "".join(f"{name:>13}" for name in COLUMNS)
    cells = (f"{row[name]:13.3f}" if name in row else " " * 13 for name in COLUMNS)
    return f"{row['method']:32}{''.join(cells)}" + (f"  {row['error']}" if "error" in row else "")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--length", type=int, default=32768, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens that are timed; 32 = one flush of the window")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="of conf/eval/method")
    args = parser.parse_args(argv)
    model, mask, sizes = subject(args.shape)
    tokenizer = load_config(ModelConfig())[1]  # of the shipped model: calibration's ids are in any vocabulary
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, args.length), generator=generator).to(model.device)
    bench = Bench(Replay(model, tokenizer, Settings()), ids, args.new)
    rows: list[Record] = []
    args.out.mkdir(parents=True, exist_ok=True)
    print(line(), flush=True)

    def done(row: Record) -> None:
        rows.append(row)
        print(line(row), flush=True)
        write_rows(args.out / "methods.csv", [{k: r.get(k, "") for k in ("method", *COLUMNS, "error")} for r in rows])
        if bench.launches:
            write_rows(args.out / "kernels.csv", bench.launches)
        clear()

    def method(row: Record, name: str) -> None:
        bench.method(row, configured(name, args.shape, mask, sizes, model.config, tokenizer))

    for name in args.methods:
        done(attempt({"method": name}, partial(method, name=name)))
        if name == "dense":
            for contender in contenders(model, LeanK(str(mask)).loaded, sizes):
                if contender.name in DENSE:
                    done(attempt({"method": f"dense, {contender.name}"}, partial(bench.contender, contender=contender)))
    complain(rows, "method")


if __name__ == "__main__":
    main()
