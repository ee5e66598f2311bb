"""Decode attention over the pages of a served cache, per layer: beside the cache's own kernel, and beside dense pages.

    python -m scripts.bench.kernels.paged OUT --block 64

The shapes and the timing are those of `scripts.bench.kernels.attention`; every STEP-th layer of a published mask is
timed. "dense pages" is the same kernel over pages that hold every channel. Block tables are random permutations, rows
have the whole context, and the pages hold the columns of one layer, for as many tokens as those of the whole mask.
Prints and writes OUT/paged.csv.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from leank.eval.serving.layout import PageGroup, PageLayout, lay_out
from leank.eval.serving.paged import PagedAttention
from scripts.bench.common.shapes import DIM, DTYPE
from scripts.bench.common.table import Record, write_rows
from scripts.bench.common.timing import clear, device_name
from scripts.bench.kernels.attention import dense_size, kernel_us
from scripts.bench.kernels.cases import SHAPES, SIZES, Shape, copies_of, make_store, median_us, needed_bytes, query


def dense_layout(heads: int, block: int) -> PageLayout:
    """Pages that hold every channel of every token."""
    everything = torch.ones(1, heads, DIM, dtype=torch.bool)
    kept = lay_out(everything, everything.any(-1))
    rest = lay_out(~everything, ~everything.any(-1))
    return PageLayout(PageGroup(block, kept), PageGroup(block, rest), SIZES.sink, SIZES.window, DIM)


def layout_of(masks: Tensor, layer: int, block: int) -> PageLayout:
    """Pages that hold one layer of a mask [L, H, D]."""
    whole, keep = PageLayout.of(masks, block, SIZES.sink, SIZES.window), masks[layer : layer + 1]
    kept, rest = lay_out(keep, keep.any(-1)), lay_out(~keep, ~keep.any(-1))
    return PageLayout(PageGroup(block, kept), PageGroup(whole.rest.block, rest), SIZES.sink, SIZES.window, DIM)


def paged_us(shape: Shape, layout: PageLayout) -> float:
    """Microseconds of one launch over random pages."""
    device = torch.device("cuda")
    paged = PagedAttention(layout, device, shape.q_heads)
    widths = [-(-shape.context // group.block) for group in (layout.kept, layout.rest)]
    stored = rest_pages(layout, shape.context)
    blocks = 1 + shape.batch * (widths[0] + len(stored))
    size = blocks * layout.page_columns * DTYPE.itemsize
    q = query(shape)[:, :, 0]
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    calls = []
    for _ in range(copies_of(size)):
        pages = torch.empty(blocks, layout.page_columns, dtype=DTYPE, device=device).normal_()
        kept, rest = tables(shape, widths, stored)
        calls.append(partial(paged.attend, pages, 0, q, lengths, kept, rest, DIM**-0.5))
    return median_us(calls)


def rest_pages(layout: PageLayout, context: int) -> list[int]:
    """The pages of `rest` that hold sink or window of a request that decodes its token number `context`."""
    if not layout.rest.columns:
        return []
    block, first = layout.rest.block, layout.whole_from(context - 1)
    return sorted({*range(-(-min(layout.sink, context) // block)), *range(first // block, -(-context // block))})


def tables(shape: Shape, widths: list[int], stored: list[int]) -> tuple[Tensor, Tensor]:
    """Random block tables [batch, blocks] of both groups; the rest has pages at `stored` alone."""
    free = (torch.randperm(shape.batch * (widths[0] + len(stored)), device="cuda") + 1).int()
    kept = free[: shape.batch * widths[0]].view(shape.batch, widths[0])
    rest = torch.zeros(shape.batch, widths[1], dtype=torch.int32, device="cuda")
    if stored:
        rest[:, stored] = free[shape.batch * widths[0] :].view(shape.batch, len(stored))
    return kept, rest


def bench(shape: Shape, block: int, step: int) -> list[Record]:
    """A row per timed layer: microseconds of the three, and bytes that the cache's kernel must read."""
    from leank.eval.cache.attention.launch import Kernel

    masks = shape.keep()
    dense = paged_us(shape, dense_layout(masks.shape[1], block))
    clear()
    rows: list[Record] = []
    for layer in range(0, len(masks), step):
        keep = masks[layer]
        paged = paged_us(shape, layout_of(masks, layer, block))
        clear()
        stores = [make_store(keep, shape.batch, shape.context)]
        left = needed_bytes(stores[0])
        stores += [make_store(keep, shape.batch, shape.context) for _ in range(copies_of(left) - 1)]
        own = kernel_us(shape, stores, Kernel())
        del stores
        clear()
        found = {"paged_us": paged, "cache_us": own, "dense_pages_us": dense}
        rows.append({"shape": shape.name, "block": block, "layer": layer, "bytes": left, **found})
    total = [sum(float(str(row[name])) for row in rows) for name in ("paged_us", "cache_us", "dense_pages_us")]
    rate = sum(int(str(row["bytes"])) for row in rows) / total[0] / 1e3
    print(f"{shape.name}, pages of {block}: {total[0] / len(rows):.1f} us per layer, {rate:.0f} GB/s, "
          f"{total[1] / total[0]:.3f} of the cache's own speed; dense pages {dense:.1f} us "
          f"({dense_size(shape) / dense / 1e3:.0f} GB/s), {total[2] / total[0]:.3f}x", flush=True)  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where paged.csv goes")
    parser.add_argument("--block", type=int, nargs="+", default=[64], help="tokens of a page")
    parser.add_argument("--step", type=int, default=4, help="every so many layers of the mask")
    parser.add_argument("--shapes", type=int, nargs="*", help=f"which of the {len(SHAPES)} shapes, from 0; default all")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    print(device_name(), "torch", torch.__version__)
    rows: list[Record] = []
    for block in args.block:
        for index in args.shapes or range(len(SHAPES)):
            rows += bench(SHAPES[index], block, args.step)
            write_rows(args.out / "paged.csv", rows)


if __name__ == "__main__":
    main()
