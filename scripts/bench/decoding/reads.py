"""Time per token of methods that choose what they read (Quest, Double Sparsity), beside dense and LeanK.

    python -m scripts.bench.decoding.reads OUT                          # Llama-3.1-8B shape, random weights, one GPU
    python -m scripts.bench.decoding.reads OUT --lengths 32768 --rows 1 --set per_sm=8 run=16        # other launches

Every cache is filled with random keys and values of so many tokens, and every step is a replay of a captured CUDA
graph. The timed steps are whole periods of the cache's flush, after a first one that makes room in the middle. Double
Sparsity's labels are the first kept channels of each head, because speed does not depend on which they are. Prints and
writes OUT/reads.csv:

    graph_ms      per token on the clock
    gpu_ms        per token in kernels, of which attention_ms (ranking and choice included), products_ms, other_ms
    kernels       launches per token
    read_gb       bytes of K, V, bounds and labels that attention reads per token
    held_gb       bytes that the cache holds
    error         of a case that failed, whose row ends there

OUT/reads_kernels.csv has the kernels of attention: launches and microseconds per token and per layer that chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.cache import CompressedCache, Sizes, compressed_cache
from leank.eval.cache.attention.backend import Auto
from leank.eval.cache.attention.choose import Chosen, ChosenConfig
from leank.eval.cache.storage.middle import Middle
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from scripts.bench.common.bytes_read import bytes_read
from scripts.bench.common.caches import Decoding, fill, subject
from scripts.bench.common.table import Record, attempt, complain, said, write_rows
from scripts.bench.common.timing import WARM_UP, clear, profiled, seconds, where

SMALL, USUAL = Sizes(16, 64, 32), Sizes()  # as in conf/method
DENSE_LAYERS = 2  # of Quest


@dataclass(frozen=True)
class Case:
    """A method of the table.

    name: of conf/method. pruned: whether it keeps LeanK's channels. reads: "quest", "labels" or None = everything.
    budget: tokens that a query head reads. sizes: of the cache.
    """

    name: str
    pruned: bool
    reads: str | None
    budget: int
    sizes: Sizes

    def middles(self, keep: Tensor) -> list[Middle]:
        """How each layer keeps its middle. keep: bool [L, H, D], LeanK's mask."""
        keep = keep if self.pruned else torch.ones_like(keep)
        return [Middle(mask, reads=self._reads(index, mask)) for index, mask in enumerate(keep)]

    def _reads(self, index: int, mask: Tensor) -> Quest | Labels | None:
        if self.reads == "quest":
            return Quest(self.budget, 16, DENSE_LAYERS) if index >= DENSE_LAYERS else None
        few = mask & (mask.cumsum(-1) <= mask.shape[-1] // 8)
        return Labels(few, self.budget) if self.reads == "labels" else None


CASES = (
    Case("dense", False, None, 0, USUAL),
    Case("leank", True, None, 0, USUAL),
    Case("quest", False, "quest", 1024, SMALL),
    Case("quest_leank", True, "quest", 2048, USUAL),
    Case("double_sparsity", False, "labels", 1024, SMALL),
    Case("double_sparsity_leank", True, "labels", 2048, USUAL),
)


@torch.no_grad()
def measure(
    row: Record,
    model: PreTrainedModel,
    make: Callable[[], Cache],
    rows: int,
    tokens: int,
    flush: int,
    found: list[Record],
) -> None:
    """Fill a row of the table, and add the kernels of its attention to `found`."""
    cache, group = make(), model.config.num_attention_heads // model.config.num_key_value_heads
    assert isinstance(cache, CompressedCache)
    fill(model, cache, rows, tokens)
    decoding = Decoding(model, cache, torch.full((rows, 1), tokens, device=model.device))
    for _ in range(WARM_UP):
        decoding.step()
    if not cache.capturable:
        raise RuntimeError("a step of this cache cannot be captured")
    step = decoding.graphed()
    for _ in range(flush):  # the first flush compiles what moves tokens, and makes room for some later ones
        step()
    row["graph_ms"] = seconds(step, 2 * flush, True) * 1e3
    kernels = profiled(step)
    row.update(where(kernels))
    stores = [layer.store for layer in cache.compressed if layer.store is not None]
    row["read_gb"] = sum(bytes_read(store, group) for store in stores) / 1e9
    row["held_gb"] = cache.memory().total / 1e9
    choosing = sum(store.reads is not None for store in stores) or len(stores)
    for one in kernels:
        if one.kind == "attention_ms" or one.ms > 0.1:
            name = {k: row[k] for k in ("method", "length", "rows")}
            per_layer = one.ms * 1e3 / choosing
            found.append(
                {**name, "kernel": one.name[:60], "launches": one.count, "us": one.ms * 1e3, "us_layer": per_layer}
            )


def options(given: list[str]) -> dict[str, int]:
    """Fields of ChosenConfig from words like per_sm=8; raises SystemExit for others."""
    known = {field.name for field in fields(ChosenConfig)}
    pairs = [word.partition("=")[::2] for word in given]
    if any(name not in known or not value.isdigit() for name, value in pairs):
        raise SystemExit(f"--set takes NAME=NUMBER, where NAME is one of {', '.join(sorted(known))}")
    return {name: int(value) for name, value in pairs}


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072, 4096], help="tokens in the cache")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of the batch")
    parser.add_argument("--methods", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="fields of ChosenConfig")
    args = parser.parse_args(argv)
    config = ChosenConfig(**options(args.set))
    model, path, _ = subject("llama8b")
    keep = LeanK(str(path)).loaded.keep
    args.out.mkdir(parents=True, exist_ok=True)
    table: list[Record] = []
    kernels: list[Record] = []

    def make(case: Case) -> Cache:
        sizes = case.sizes
        cache = compressed_cache(model, case.middles(keep), sizes.sink, sizes.window, sizes.flush, "triton")
        assert isinstance(cache.choice, Auto)
        cache.choice.chosen = Chosen(config)
        return cache

    for rows in args.rows:
        for length in args.lengths:
            for case in CASES:
                if case.name not in args.methods:
                    continue
                row: Record = {"method": case.name, "length": length, "rows": rows, "set": " ".join(args.set)}
                work = partial(measure, model=model, make=partial(make, case), rows=rows, tokens=length,
                               flush=case.sizes.flush, found=kernels)  # fmt: skip
                table.append(attempt(row, work))
                print(said(row), flush=True)
                write_rows(args.out / "reads.csv", table)
                write_rows(args.out / "reads_kernels.csv", kernels)
                clear()
    complain(table, "method")


if __name__ == "__main__":
    main()
