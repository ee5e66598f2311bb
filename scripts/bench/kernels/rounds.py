"""A round in which tokens leave the middle of one layer: time on the host and on the GPU, kernel by kernel.

    python -m scripts.bench.kernels.rounds OUT --rows 1 831 --prompts 32768

The layer has the heads of Llama-3.1-8B and a budget of 1,024 tokens, settings as in conf/method, random keys and
random scores. Before each round as many tokens come as leave the window at a time. Prints and writes

    OUT/rounds.csv   host_us until Python is done with a round, wall_us until the GPU is, gpu_us in kernels, launches
    OUT/kernels.csv  launches and microseconds of each kernel in a round
    OUT/prompts.csv  milliseconds in which R-KV compares all keys of a prompt, by how the kernel is launched, and in
                     plain PyTorch; alike: share of keys that are so much alike that the search for others ends early
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from leank.eval.cache.attention.launch import Kernel
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.methods.kernels import rkv as rkv_launch
from leank.eval.methods.tokens import rkv
from leank.eval.methods.tokens.rkv import RKV
from leank.eval.methods.tokens.tova import LastQuery
from scripts.bench.common.shapes import DIM, DTYPE
from scripts.bench.common.table import Record, said, write_rows
from scripts.bench.common.timing import each_ms, profiled, wait

HEADS, BUDGET = 8, 1024
SIZES = {"h2o": Sizes(0, 512, 32), "tova": Sizes(0, 32, 32), "rkv": Sizes(0, 8, 128)}
TILES = {
    "default": rkv_launch.DEFAULT,
    "4 stages": rkv_launch.Tiles(stages=4),
    "blocks of 64": rkv_launch.Tiles(block=64),
    "8 warps, tiles of 128": rkv_launch.Tiles(tile=128, warps=8),
}
ROUNDS, WARM = 6, 3


class Round:
    """One layer that holds its budget; a call lets tokens come and measures the round after them.

    name: of SIZES.
    rows: int: rows of the batch.
    """

    def __init__(self, name: str, rows: int) -> None:
        self.sizes, self.kernel = SIZES[name], Kernel()
        heavy = BUDGET - self.sizes.window
        policies = {"h2o": HeavyHitters, "tova": LastQuery, "rkv": RKV().policy}
        middle = Middle(eviction=policies[name](heavy))
        k, v = self.tokens(1, BUDGET)
        self.store = Store(k, v, None, middle, self.sizes)
        self.store.select(torch.zeros(rows, dtype=torch.long))
        self.host: list[float] = []
        self.wall: list[float] = []

    def tokens(self, rows: int, count: int) -> Tensor:
        """Random K and V [2, rows, H, count, D]."""
        return torch.randn(2, 1, HEADS, count, DIM, device="cuda", dtype=DTYPE).expand(-1, rows, -1, -1, -1)

    def come(self) -> None:
        """Let as many tokens come as leave the window at a time, and give all tokens random scores."""
        store, policy = self.store, self.store.eviction
        assert policy is not None
        k, v = self.tokens(len(store.seen), self.sizes.flush)
        store.append(k, v, None, self.kernel.write)
        self.kernel.prepare(store)
        held = int(store.held().max())
        policy.scores[..., :held].uniform_()

    def __call__(self) -> None:
        """A round."""
        self.come()
        wait()
        begin = time.perf_counter()
        self.store.flush(self.kernel.move, self.kernel.evict)
        self.host.append(time.perf_counter() - begin)
        wait()
        self.wall.append(time.perf_counter() - begin)


def rounds(name: str, rows: int) -> tuple[Record, list[Record]]:
    """The row of a policy, and those of its kernels."""
    one = Round(name, rows)
    for _ in range(WARM + ROUNDS):
        one()
    host, wall = (median(spent[WARM:]) * 1e6 for spent in (one.host, one.wall))
    with_tokens = profiled(one)
    tokens_alone = {launches.name: launches for launches in profiled(one.come)}
    kernels: list[Record] = []
    for launches in with_tokens:  # less what the tokens' coming takes
        other = tokens_alone.get(launches.name)
        count, ms = (launches.count, launches.ms) if other is None else (launches.count - other.count, 0.0)
        if other is not None and count > 0:
            ms = launches.ms - other.ms
        if count > 0:
            kernels.append({"policy": name, "rows": rows, "kernel": launches.name[:80], "count": count, "us": ms * 1e3})
    gpu, number = (sum(float(str(row[column])) for row in kernels) for column in ("us", "count"))
    return {"policy": name, "rows": rows, "host_us": host, "wall_us": wall, "gpu_us": gpu, "launches": number}, kernels


def prompts(tokens: int) -> Iterator[Record]:
    """The rows of a prompt's length."""
    for alike in (0.0, 1.0):
        keys = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=DTYPE)
        keys[:, :, : int(alike * tokens)] += 2  # their cosine is 0.8
        keys = keys[:, :, torch.randperm(tokens, device="cuda")]
        there = torch.ones(keys.shape[:3], dtype=torch.bool, device="cuda")
        want = rkv.redundancy(keys, there, 0.5)
        for name, tiles in TILES.items():
            torch.testing.assert_close(rkv_launch.redundancy(keys, there, 0.5, tiles), want, rtol=1e-4, atol=0)
            fast = partial(_drop, partial(rkv_launch.redundancy, keys, there, 0.5, tiles))
            yield {"tokens": tokens, "alike": alike, "launch": name, "ms": median(each_ms(fast, ROUNDS))}
        slow = partial(_drop, partial(rkv.redundancy, keys, there, 0.5))
        yield {"tokens": tokens, "alike": alike, "launch": "plain PyTorch", "ms": median(each_ms(slow, 2))}


def _drop(work: Callable[[], Tensor]) -> None:
    """Run, and keep nothing."""
    work()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--policies", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 831])
    parser.add_argument("--prompts", type=int, nargs="*", default=[32768], help="tokens")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Record]] = {"prompts": [], "rounds": [], "kernels": []}
    for tokens in args.prompts:
        for row in prompts(tokens):
            tables["prompts"].append(row)
            print(said(row), flush=True)
            write_rows(args.out / "prompts.csv", tables["prompts"])
    for rows in args.rows:
        for policy in args.policies:
            row, kernels = rounds(policy, rows)
            tables["rounds"].append(row)
            tables["kernels"] += kernels
            print(said(row), *(f"    {said(kernel)}" for kernel in kernels), sep="\n", flush=True)
            for name in ("rounds", "kernels"):
                write_rows(args.out / f"{name}.csv", tables[name])


if __name__ == "__main__":
    main()
