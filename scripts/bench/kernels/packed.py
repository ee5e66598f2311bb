"""Decode attention over packed middles: LeanK's cache in 16, 8, 4 and 2 bits, and dense, kernel alone.

    python -m scripts.bench.kernels.packed OUT               # check, time, write OUT/packed.csv; Llama-3.1-8B at 32K
    python -m scripts.bench.kernels.packed OUT --variants    # every launch configuration, to choose the default
    python -m scripts.bench.kernels.packed OUT --bits 8 4    # these alone; 16 is LeanK unpacked, and dense

Times are those of `scripts.bench.kernels.attention`: medians of captured graphs over copies larger than the L2 cache,
the mean of every eighth layer of the published mask.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leank.eval.cache.storage.quantised import Packing
from scripts.bench.common.shapes import DIM
from scripts.bench.common.table import Record, said, write_rows
from scripts.bench.common.timing import clear, device_name
from scripts.bench.kernels.attention import kernel_us
from scripts.bench.kernels.cases import SHAPES, check_case, copies_of, make_store, needed_bytes, query

if TYPE_CHECKING:  # Triton is imported where a GPU is used
    from leank.eval.cache.attention.launch import Config

CONTEXT, STEP = 32768, 8  # tokens; every so manieth layer is timed
PACKINGS = {16: None, 8: Packing(8), 4: Packing(4), 2: Packing(2)}  # by bits


def variants(packing: Packing | None) -> list[Config | None]:
    """Launch configurations worth trying, the default (None) first."""
    from leank.eval.cache.attention.launch import Config

    if packing is None:
        return [None]
    return [None, Config(), Config(stages=2), Config(slow=1.6), Config(stages=2, per_sm=3, registers=168)]


def compile_one(packing: Packing | None, config: Config | None) -> None:
    """Fill Triton's disk cache for one configuration, in a process of its own."""
    from leank.eval.cache.attention.launch import Kernel

    tiny = replace(SHAPES[0], batch=2, context=2048)
    store = make_store(tiny.keep()[0], 2, 2048, packing)
    Kernel(config).attend(store, query(tiny), (store.seen_dev - 1)[:, None].clone(), 1.0)


def check(packing: Packing, group: int, queries: int) -> None:
    """The kernel against float64 at published masks (group 4) and ragged ones."""
    torch.manual_seed(0)
    ragged = torch.rand(6, DIM).argsort(-1) < torch.tensor([0, 5, 77, 96, 33, 128])[:, None]
    check_case(SHAPES[0].keep()[13] if group == 4 else ragged, group, queries, None, packing)


def in_parallel(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Make calls (function, arguments), each in a process of its own; one that fails is printed and costs no other.

    Returns the calls that failed.
    """
    failed = []
    with ProcessPoolExecutor(16, mp_context=get_context("spawn")) as pool:
        for call, job in [(call, pool.submit(*call)) for call in calls]:
            if (reason := job.exception()) is not None:
                print(f"{call}: {type(reason).__name__} {str(reason)[:300]}", flush=True)
                failed.append(call)
    return failed


def bench(folder: Path, batches: Sequence[int], packings: Sequence[Packing | None], every_variant: bool) -> None:
    """Time packings at every batch, and dense where None is among them; write packed.csv after each."""
    from leank.eval.cache.attention.launch import Kernel

    keep, rows = SHAPES[0].keep()[::STEP], []
    cases = [("LeanK", keep, packing) for packing in packings]
    if None in packings:
        cases.insert(0, ("dense", torch.ones_like(keep[:1]), None))
    for batch in batches:
        shape = replace(SHAPES[0], batch=batch, context=CONTEXT)
        for name, masks, packing in cases:
            found: dict[Config | None, list[float]] = defaultdict(list)
            size = 0
            for mask in masks:
                stores = [make_store(mask, batch, CONTEXT, packing)]
                one = needed_bytes(stores[0])
                stores += [make_store(mask, batch, CONTEXT, packing) for _ in range(copies_of(one) - 1)]
                size += one
                for config in variants(packing) if every_variant else [None]:
                    try:
                        found[config].append(kernel_us(shape, stores, Kernel(config)))
                    except Exception as reason:  # a configuration that does not fit costs the others nothing
                        print(f"{packing} {config}: {type(reason).__name__} {str(reason)[:200]}", flush=True)
                del stores
                clear()
            whole = {config: sum(each) for config, each in found.items() if len(each) == len(masks)}
            for config, us in whole.items():
                bits = packing.bits if packing else 16
                row: Record = {"batch": batch, "method": name, "bits": bits, "us": us / len(masks)}
                row |= {"mb": size / len(masks) / 1e6, "gb_per_s": size / us / 1e3, "config": config}
                rows.append(row)
                print(said(row, 1), flush=True)
            write_rows(folder / "packed.csv", rows)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where packed.csv goes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--bits", type=int, nargs="+", choices=list(PACKINGS), default=list(PACKINGS))
    parser.add_argument("--variants", action="store_true", help="every launch configuration")
    parser.add_argument("--check-only", action="store_true", help="compare with float64, time nothing")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    options.folder.mkdir(parents=True, exist_ok=True)
    print(device_name(), "torch", torch.__version__)
    packings = [PACKINGS[bits] for bits in options.bits]
    chosen = [(p, c) for p in packings for c in (variants(p) if options.variants else [None])]
    cases = list(dict.fromkeys((p, c and replace(c, slow=1.0, per_sm=2)) for p, c in chosen))
    checks = [(p, group, queries) for p in packings if p for group, queries in ((4, 1), (8, 1), (4, 5))]
    failed = in_parallel([(check, *case) for case in checks] + [(compile_one, p, c) for p, c in cases])
    if not options.check_only:
        bench(options.folder, options.batch, packings, options.variants)
    if wrong := [call for call in failed if call[0] is check]:
        raise SystemExit(f"packed: {len(wrong)} of {len(checks)} checks against float64 failed: the kernel is wrong")


if __name__ == "__main__":
    main()
