"""Throughput and memory of long replies by batch size: dense caches and methods that evict (Lethe's tables 2 and 3).

    python -m scripts.bench.decoding.replies OUT --batch 1 8 32 --at 1536 8192 20480    # sampled: minutes
    python -m scripts.bench.decoding.replies OUT --batch 1 4 8 16 32 --whole     # every token of every reply
    python -m scripts.bench.decoding.replies OUT --prompt 32768 --at 0 --batch 1 8 --methods leank h2o lethe    # long
    python -m scripts.bench.decoding.replies OUT --shape reference --batch 2 --prompt 200 --at 64 --steps 20    # a CPU

Caches of the Llama-3.1-8B shape are filled with random keys, values and scores, then decode. `--whole` decodes whole
replies. Otherwise a cache is filled with prompt and reply up to each length of `--at`, and only `--steps` tokens are
timed, after as many that compile what moves tokens; a layer that evicts drops to its budget when it is filled. Prints
and writes OUT/replies.csv:

    eager_ms, step_ms    per step, in a Python loop, and as a captured CUDA graph with all that happens between replays
    tokens_s             tokens per second of all rows
    worst_ms             the longest single step, such as one in which every layer evicts
    gb                   held by the cache; peak_gb: the most that was allocated, less what the model takes

Random weights attend almost evenly, and then no layer has a breakpoint by which Lethe drops tokens. `--limit` bounds
what a layer holds, whatever its attention is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Cache

from leank.eval.cache import CompressedCache, Sizes, compressed_cache
from leank.eval.cache.graph import capturable
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.storage.middle import Middle
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.tokens.lethe import Lethe
from scripts.bench.common.caches import Decoding, contenders, fill, subject
from scripts.bench.common.one_method import configured
from scripts.bench.common.table import Record, attempt, complain, said, write_rows
from scripts.bench.common.timing import WARM_UP, clear, wait

DENSE = "dense"  # this project's storage and kernel with nothing pruned
DYNAMIC = "transformers"  # the library's own cache, step by step


class Bench:
    """Measures replies of one model.

    limit: what a layer of Lethe holds at most, 0 = no bound.
    """

    def __init__(self, shape: str, limit: int) -> None:
        self.shape, self.limit = shape, limit
        self.model, self.mask, self.sizes = subject(shape)
        self.cuda = self.model.device.type == "cuda"
        self.tokenizer = load_config(ModelConfig())[1]
        self.base = torch.cuda.memory_allocated() if self.cuda else 0

    def method(self, name: str) -> Method:
        """The method of conf/method, with the bound on what Lethe holds."""
        (found,) = configured(name, self.shape, self.mask, self.sizes, self.model.config, self.tokenizer)
        if isinstance(found.tokens, Lethe) and self.limit:
            bound = replace(found.tokens, limit=self.limit, evict_at=min(found.tokens.evict_at, self.limit))
            return replace(found, tokens=bound)
        return found

    def cache(self, name: str, rows: int, tokens: int) -> Cache:
        """The cache of a method, filled."""
        self.model.set_attn_implementation("sdpa" if name == DYNAMIC else ATTENTION)
        keep = LeanK(str(self.mask)).loaded
        named = {"dense": "own cache, nothing pruned", "transformers": "DynamicCache", "leank": "LeanK"}
        if name in named:
            (one,) = [c for c in contenders(self.model, keep, self.sizes) if c.name == named[name]]
            cache = one.make(rows, tokens)
        else:
            cache = self.evicting(self.method(name))
        fill(self.model, cache, rows, tokens, scored=True)
        return cache

    def evicting(self, method: Method) -> CompressedCache:
        """An empty cache of a method that evicts; raises ValueError for another."""
        sizes = Sizes(method.sink, method.window, method.flush)
        nothing: object = None  # the pass over a prompt, of which these methods read nothing here
        policies = [
            None if method.tokens is None else method.tokens.eviction(nothing, self.model.config, sizes)  # type: ignore[arg-type]
            for _ in range(self.model.config.num_hidden_layers)
        ]
        if None in policies:
            raise ValueError(f"{method.label} does not evict while decoding; name one that does")
        middles = [Middle(eviction=policy) for policy in policies]
        return compressed_cache(self.model, middles, sizes.sink, sizes.window, sizes.flush)

    @torch.no_grad()
    def sampled(self, row: Record, name: str, rows: int, tokens: int, steps: int) -> None:
        """Fill the row of `steps` steps behind `tokens` tokens."""
        decoding = self._begin(row, name, rows, tokens)
        row["eager_ms"] = self._timed(decoding, WARM_UP)[0] * 1e3
        self._capture(row, decoding)
        self._timed(decoding, steps)  # compiles what moves and drops tokens
        mean, worst = self._timed(decoding, steps)
        self._note(row, decoding.loop.cache, rows, mean, worst)

    @torch.no_grad()
    def whole(self, name: str, rows: int, prompt: int, ends: Sequence[int]) -> list[Record]:
        """A row for each length of a reply, all of whose tokens are decoded: means from its beginning on."""
        found, first = [], {"method": name, "batch": rows, "prompt": prompt}
        decoding = self._begin(first, name, rows, prompt)
        self._timed(decoding, WARM_UP)
        self._capture(first, decoding)
        done, spent, worst = 0, 0.0, 0.0
        for end in sorted(ends):
            mean, longest = self._timed(decoding, end - done)
            spent, worst, done = spent + mean * (end - done), max(worst, longest), end
            row: Record = {**first, "reply": end}
            self._note(row, decoding.loop.cache, rows, spent / done, worst)
            found.append(row)
        return found

    def _begin(self, row: Record, name: str, rows: int, tokens: int) -> Decoding:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        cache = self.cache(name, rows, tokens)
        decoding = Decoding(self.model, cache, torch.full((rows, 1), tokens, device=self.model.device))
        for _ in range(WARM_UP):
            decoding.step()
        return decoding

    def _capture(self, row: Record, decoding: Decoding) -> None:
        row["graph"] = int(self.cuda and capturable(decoding.loop.cache))
        if row["graph"]:
            decoding.graphed()

    def _timed(self, decoding: Decoding, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of the longest as the host sees it."""
        wait()
        begin = last = time.perf_counter()
        worst = 0.0
        for _ in range(steps):
            decoding.step()
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        wait()
        return (time.perf_counter() - begin) / steps, worst

    def _note(self, row: Record, cache: Cache, rows: int, mean: float, worst: float) -> None:
        row.update(step_ms=mean * 1e3, tokens_s=rows / mean, worst_ms=worst * 1e3)
        if isinstance(cache, CompressedCache):
            row["gb"] = cache.memory().total / 1e9
        if self.cuda:
            row["peak_gb"] = (torch.cuda.max_memory_allocated() - self.base) / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=256, help="tokens before the reply")
    parser.add_argument("--at", nargs="+", type=int, default=[1536, 4096, 8192, 20480], help="tokens of the reply")
    parser.add_argument("--steps", type=int, default=160, help="steps that are timed, without --whole")
    parser.add_argument("--whole", action="store_true", help="decode every token of the replies")
    parser.add_argument("--methods", nargs="+", default=[DENSE, "lethe", "h2o"], help=f"or {DYNAMIC}, leank")
    parser.add_argument("--limit", type=int, default=1024, help="tokens that a layer of Lethe holds at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    args = parser.parse_args(argv)
    bench, begin = Bench(args.shape, args.limit), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Record] = []

    def done(row: Record) -> None:
        rows.append(row)
        print(said(row), flush=True)
        write_rows(args.out / "replies.csv", rows)
        clear()

    for batch in args.batch:
        for name in args.methods:
            for at in args.at[:1] if args.whole else args.at:
                row: Record = {"method": name, "batch": batch, "prompt": args.prompt, "reply": at}
                if time.perf_counter() - begin > args.seconds:
                    done({**row, "skipped": f"after {args.seconds:.0f} s"})
                elif args.whole:
                    made: list[Record] = []
                    failed = attempt(
                        row,
                        lambda _: made.extend(bench.whole(name, batch, args.prompt, args.at)),  # noqa: B023
                    )
                    for one in made or [failed]:
                        done(one)
                else:
                    tokens = args.prompt + at
                    done(attempt(row, lambda row: bench.sampled(row, name, batch, tokens, args.steps)))  # noqa: B023
    complain(rows, "method")


if __name__ == "__main__":
    main()
