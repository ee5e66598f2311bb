"""Decode attention per layer: the compressed cache's kernel against dense SDPA, at the published masks.

    python -m scripts.bench.kernels.attention OUT             # check, time, write attention.csv and attention.png
    python -m scripts.bench.kernels.attention OUT --variants  # also try configurations, use the best for each shape
    python -m scripts.bench.kernels.attention OUT --plot      # draw attention.png from attention.csv, no GPU needed

Prints, per shape, the speed-up over the fastest dense attention, GB/s, and the limit: the speed-up that the bytes left
to read would allow (LeanK, figures 5 and 10, measure the same). Every call is captured in a CUDA graph that rotates
over copies larger than the L2 cache; times are medians of replays. "reading alone" is a kernel that reads a layer's
bytes in one piece and does nothing else: what any kernel takes at least.

A least-squares line through a shape's layers, which differ in bytes, time = fixed + bytes / rate, separates the fixed
cost of a launch from the speed of reading: columns fixed_us and line_gb_per_s.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from leank.data_gen.amount import amount
from leank.eval.cache.storage.store import Store
from scripts.bench.common.shapes import DIM, DTYPE
from scripts.bench.common.table import Record, write_rows
from scripts.bench.common.timing import device_name
from scripts.bench.kernels.cases import (
    SHAPES,
    Shape,
    check,
    check_case,
    copies_of,
    make_store,
    median_us,
    needed_bytes,
    query,
)

if TYPE_CHECKING:  # Triton is imported where a GPU is used
    from leank.eval.cache.attention.launch import Config, Kernel


def variants() -> list[Config]:
    """Kernel configurations worth trying, the default first."""
    from leank.eval.cache.attention.launch import Config

    by_bytes = Config(slow=1.0, per_tile=0, piece=16384)
    return [
        Config(),
        Config(pdl=False),
        by_bytes,
        replace(by_bytes, pdl=False),
        replace(by_bytes, piece=65536),
        Config(piece=81920),
        Config(merge=80),
        Config(stages=4),
    ]


def dense_times(shape: Shape) -> dict[str, float]:
    """Microseconds of each dense attention over the whole context."""
    from leank.eval.cache.attention.launch import Kernel

    size = dense_size(shape)
    kv = torch.randn(copies_of(size), 2, shape.batch, shape.kv_heads, shape.context, DIM, device="cuda", dtype=DTYPE)
    q, found = query(shape), {}
    for name, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in kv]
                found[name] = median_us(calls)
        except RuntimeError as reason:
            print(f"{name} cannot run {shape.name}: {reason}")
    del kv
    everything = torch.ones(shape.kv_heads, DIM, dtype=torch.bool)
    stores = [make_store(everything, shape.batch, shape.context) for _ in range(copies_of(size))]
    found["own kernel, nothing pruned"] = kernel_us(shape, stores, Kernel())
    return found


def kernel_us(shape: Shape, stores: list[Store], kernel: Kernel) -> float:
    """Microseconds of the kernel over copies of one layer."""
    q = query(shape)
    for store in stores:
        store.plan = None
    position = (stores[0].seen_dev - 1)[:, None].clone()
    return median_us([partial(kernel.attend, store, q, position, DIM**-0.5) for store in stores])


def _compile(config: Config) -> None:
    """Fill Triton's disk cache for one configuration, in a process of its own."""
    from leank.eval.cache.attention.launch import Kernel

    for shape in (SHAPES[0], SHAPES[4]):
        tiny = replace(shape, batch=2, context=2048)
        store = make_store(shape.keep()[0], 2, 2048)
        Kernel(config).attend(store, query(tiny), (store.seen_dev - 1)[:, None].clone(), 1.0)


def tune(shape: Shape, dense: float) -> Config:
    """The fastest configuration for a shape on every eighth layer; prints all of them.

    dense: microseconds of the fastest dense attention, to print speed-ups.
    """
    from leank.eval.cache.attention.launch import Kernel

    layers = shape.keep()[::8]
    total: dict[Config, float] = {}
    for keep in layers:
        stores = [make_store(keep, shape.batch, shape.context)]
        stores += [make_store(keep, shape.batch, shape.context) for _ in range(copies_of(needed_bytes(stores[0])) - 1)]
        for config in variants():
            try:
                total[config] = total.get(config, 0) + kernel_us(shape, stores, Kernel(config)) / len(layers)
            except Exception as reason:  # a configuration that does not fit the device is no failure of the others
                print(f"  {config}: {type(reason).__name__} {str(reason)[:100]}")
        del stores
    ranked = sorted(total, key=lambda c: total[c])
    for config in ranked:
        print(f"  {total[config]:8.1f} us  {dense / total[config]:.3f}x  {config}")
    return ranked[0]


def fitted(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The line time = fixed + bytes / rate through the layers `rows`, by least squares.

    Returns (fixed microseconds of a launch, rate in GB/s); both are NaN if all layers have the same bytes.
    """
    size, us = (np.array([float(row[key]) for row in rows]) for key in ("bytes", "us"))
    if len(set(size)) < 2:
        return float("nan"), float("nan")
    slope = ((size - size.mean()) * (us - us.mean())).sum() / ((size - size.mean()) ** 2).sum()
    return float(us.mean() - slope * size.mean()), float(1e-3 / slope)


def dense_size(shape: Shape) -> int:
    """Bytes of K and V of the whole context."""
    return 2 * shape.batch * shape.kv_heads * shape.context * DIM * DTYPE.itemsize


def time_layers(shape: Shape, config: Config) -> list[dict[str, Any]]:
    """Layer, microseconds and bytes at every layer of the published mask, of the kernel and of reading alone."""
    from leank.eval.cache.attention.launch import Kernel
    from scripts.bench.kernels.reading_kernel import reading_us

    rows, floor = [], {}  # bytes of a layer -> microseconds of reading them
    for layer, keep in enumerate(shape.keep()):
        stores = [make_store(keep, shape.batch, shape.context)]
        left = needed_bytes(stores[0])
        stores += [make_store(keep, shape.batch, shape.context) for _ in range(copies_of(left) - 1)]
        us = kernel_us(shape, stores, Kernel(config))
        del stores
        if left not in floor:
            floor[left] = reading_us(left)
        for method, found in (("LeanK", us), ("reading alone", floor[left])):
            rows.append(
                {"layer": layer, "method": method, "us": found, "bytes": left, "limit": dense_size(shape) / left}
            )
    return rows


def bench(shape: Shape, try_variants: bool) -> list[Record]:
    """Rows of the table for one shape: every dense method, then every layer of the published mask."""
    from leank.eval.cache.attention.launch import Config

    dense, size = dense_times(shape), dense_size(shape)
    torch.cuda.empty_cache()
    fastest = min(dense, key=lambda name: dense[name])
    print(f"\n{shape.name}: " + ", ".join(f"{n} {t:.1f} us ({size / t / 1e3:.0f} GB/s)" for n, t in dense.items()))
    config = Config()
    if try_variants:
        config = tune(shape, dense[fastest])
        check_case(shape.keep()[13], shape.q_heads // shape.kv_heads, 1, config)
    layers = time_layers(shape, config)
    pruned = [row for row in layers if row["method"] == "LeanK"]
    floor = sum(row["us"] for row in layers) - sum(row["us"] for row in pruned)
    us, left = (sum(r[key] for r in pruned) / len(pruned) for key in ("us", "bytes"))
    gained, limit = dense[fastest] / us, size / left
    print(f"{shape.name}: {us:.1f} us per layer, {left / us / 1e3:.0f} GB/s, {gained:.3f}x over {fastest}; "
          f"the bytes allow {limit:.3f}x, so {gained / limit:.1%} of the limit  [{config}]")  # fmt: skip
    print(f"{shape.name}: reading alone takes {floor / len(pruned):.1f} us, {floor / len(pruned) / us:.1%} of that")
    fixed, rate = fitted(pruned)
    print(f"{shape.name}: {fixed:.1f} us per launch, then {rate:.0f} GB/s; the launch is {fixed / us:.1%} of the time")
    rows = [{"layer": "", "method": n, "us": t, "bytes": size, "limit": 1.0} for n, t in dense.items()] + layers
    common = {"shape": shape.name, "dense_us": dense[fastest], "dense": fastest}
    line = {"LeanK": (fixed, rate)}
    return [
        common | row | {"gb_per_s": row["bytes"] / row["us"] / 1e3, "speedup": dense[fastest] / row["us"]}
        | dict(zip(("fixed_us", "line_gb_per_s"), line.get(row["method"], ("", "")), strict=True))
        for row in rows
    ]  # fmt: skip


def plot(folder: Path) -> None:
    """Draw attention.png from attention.csv: speed-up and limit per shape, time by layer and by bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(folder / "attention.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(18, 4.5), layout="constrained")
    for i, shape in enumerate(shapes):
        pruned = [r for r in rows if r["shape"] == shape and r["method"] == "LeanK"]
        dense, us, size = (sum(float(r[key]) for r in pruned) / len(pruned) for key in ("dense_us", "us", "bytes"))
        whole = next(float(r["bytes"]) for r in rows if r["shape"] == shape and r["method"] != "LeanK")
        left.bar(i, dense / us, color="tab:blue", label=None if i else "LeanK kernel")
        left.hlines(whole / size, i - 0.4, i + 0.4, color="k", label=None if i else "limit by bytes")
        times = [float(r["us"]) / float(r["dense_us"]) for r in pruned]
        middle.plot(times, marker=".", label=shape)
        fixed, rate = fitted(pruned)
        label = f"{shape}: {fixed:.1f} us + bytes / {rate:.0f} GB/s"
        points = right.plot([float(r["bytes"]) / whole for r in pruned], times, ".", label=label)
        line = [(fixed + share * whole / rate / 1e3) / float(pruned[0]["dense_us"]) for share in (0, 1)]
        right.plot([0, 1], line, color=points[0].get_color(), linewidth=0.8)
    left.set_xticks(range(len(shapes)), [s.replace(" ", "\n", 1) for s in shapes], fontsize=8)
    left.set_ylabel("speed-up over the fastest dense attention")
    left.legend(loc="lower right", fontsize=8)
    middle.set_xlabel("layer")
    right.set_xlabel("bytes to read / dense bytes")
    for axes in (middle, right):
        axes.set_ylabel("time / fastest dense time")
        axes.set_ylim(0, 1.1)
        axes.legend(fontsize=8)
    figure.savefig(folder / "attention.png", dpi=150)


def compile_variants() -> None:
    """Compile every configuration in parallel; one that fails is printed and costs the others nothing."""
    compiled = list({replace(c, per_sm=2, slow=1.0, per_tile=0, piece=0): None for c in variants()})
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        for config, job in [(c, pool.submit(_compile, c)) for c in compiled]:
            if (reason := job.exception()) is not None:
                print(f"{config} does not compile or run: {type(reason).__name__} {str(reason)[:200]}")
    print(f"compiled {amount(len(compiled), 'configuration')}")


def run(folder: Path, shapes: Sequence[Shape], try_variants: bool) -> None:
    """Check the kernel, time the shapes, write attention.csv after each."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device (--plot does not)")
    begin = time.time()
    torch.manual_seed(0)
    print(device_name(), "torch", torch.__version__)
    if try_variants:
        compile_variants()
    check()
    rows: list[Record] = []
    for shape in shapes:
        rows += bench(shape, try_variants)
        torch.cuda.empty_cache()
        write_rows(folder / "attention.csv", rows)
    print(f"{time.time() - begin:.0f} s in all; {folder / 'attention.csv'}")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where attention.csv and attention.png go")
    parser.add_argument(
        "--variants", action="store_true", help="try kernel configurations and use the best for each shape"
    )
    parser.add_argument("--plot", action="store_true", help="only draw attention.png from an earlier attention.csv")
    parser.add_argument("--shapes", type=int, nargs="*", help=f"which of the {len(SHAPES)} shapes, from 0; default all")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.plot:
        run(options.folder, [SHAPES[i] for i in options.shapes or range(len(SHAPES))], options.variants)
    try:
        plot(options.folder)
    except ImportError:
        print(f"matplotlib is not installed: draw later with --plot, from {options.folder / 'attention.csv'}")


if __name__ == "__main__":
    main()
