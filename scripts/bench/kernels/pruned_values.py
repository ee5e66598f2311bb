"""Decode attention of one layer whose heads keep some channels of K and of V: time, and bytes per second.

    python -m scripts.bench.kernels.pruned_values OUT

Every head keeps as many random channels. Prints and writes OUT/pruned_values.csv: microseconds of a launch by kept
channels and kernel configuration, GB/s of the bytes that a step must read, the speed-up over the layer that keeps all
channels, and the limit of it, which is the ratio of bytes. Calls are timed as in scripts.bench.kernels.attention.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from leank.eval.cache.attention import naive
from leank.eval.cache.attention.launch import Config, Kernel
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Store
from scripts.bench.common.shapes import DIM, DTYPE
from scripts.bench.common.table import Record, said, write_rows
from scripts.bench.common.timing import clear
from scripts.bench.kernels.cases import SHAPES, SIZES, TOLERANCE, Shape, copies_of, median_us, query

WIDTHS = [(128, 128), (77, 128), (77, 77), (90, 90), (64, 64), (32, 32), (128, 77), (128, 64)]  # of K and V
CONFIGS = {"default": Config(), "tiles of 128": Config(tile=128, stages=2), "4 stages": Config(stages=4)}


def store_of(shape: Shape, width_k: int, width_v: int) -> Store:
    """A sealed layer of one random row, repeated, whose heads keep so many channels, and one token in the window."""
    keep, values = (torch.rand(shape.kv_heads, DIM).argsort(-1) < width for width in (width_k, width_v))
    k, v = torch.randn(2, 1, shape.kv_heads, shape.context, DIM, device="cuda", dtype=DTYPE)
    middle = Middle(keep, None if width_v == DIM else values)
    store = Store(k[:, :, :-1], v[:, :, :-1], None, middle, SIZES)
    store.select(torch.zeros(shape.batch, dtype=torch.long))
    store.append(*(x[:, :, -1:].expand(shape.batch, -1, -1, -1) for x in (k, v)))
    return store


def bytes_of(store: Store) -> int:
    """Bytes of K and V that a step must read."""
    ends = int((store.sizes.sink + store.seen - store.start).sum()) * store.ring_k.shape[1] * 2 * DIM
    return ends * DTYPE.itemsize + sum(store.prompt.held()) + sum(store.tail.held())


def error(kernel: Kernel, store: Store, q: Tensor, position: Tensor) -> float:
    """Relative error of the first row against the slow form."""
    got = kernel.attend(store, q, position, DIM**-0.5)[:1].double()
    store.select(torch.zeros(1, dtype=torch.long))
    want = naive.attend(store, q[:1].double(), position[:1], DIM**-0.5)
    return ((got - want).norm() / want.norm()).item()


def measured(shape: Shape) -> Iterator[Record]:
    """Rows of one shape."""
    whole: dict[str, tuple[float, int]] = {}
    for width_k, width_v in WIDTHS:
        size = bytes_of(store_of(shape, width_k, width_v))
        stores = [store_of(shape, width_k, width_v) for _ in range(min(4, copies_of(size)))]
        q, position = query(shape), torch.full((shape.batch, 1), shape.context - 1, device="cuda")
        for name, config in CONFIGS.items():
            row: Record = {"shape": shape.name, "k": width_k, "v": width_v, "config": name}
            kernel = Kernel(config)
            us = median_us([partial(kernel.attend, store, q, position, DIM**-0.5) for store in stores])
            dense_us, dense_size = whole.setdefault(name, (us, size))
            row.update(us=us, gb_per_s=size / us / 1e3, speed_up=dense_us / us, limit=dense_size / size)
            yield row
        found = error(Kernel(), stores[0], q, position)
        if not math.isfinite(found) or found > TOLERANCE:
            raise SystemExit(f"{shape.name}, {width_k} channels of K, {width_v} of V: relative error {found:.2e}")
        del stores
        clear()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", type=int, nargs="+", default=[0, 3], help="of scripts.bench.kernels.cases.SHAPES")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Record] = []
    for number in args.shapes:
        for row in measured(SHAPES[number]):
            rows.append(row)
            print(said(row, 2), flush=True)
            write_rows(args.out / "pruned_values.csv", rows)


if __name__ == "__main__":
    main()
