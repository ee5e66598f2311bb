"""Time of the column sums of a prompt beside dense attention, for one layer of the 8B shape, by tiles.

    python -m scripts.bench.prefill.column_sums OUT --length 8192 32768 65536       # one GPU

Prints and writes OUT/column_sums.csv, in milliseconds per layer:

    dense_ms      attention alone
    lse_ms        attention that also hands over its log-sum-exp, from which the sums are computed
    sums_ms       the sums, by the kernel with these tiles
    slow_ms       the sums in plain PyTorch, which is their reference
    difference    largest difference from the reference, over its largest sum
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.inference.observe import Tiles, column_sums, received
from scripts.bench.common.table import Record, attempt, complain, said, write_rows
from scripts.bench.common.timing import clear, seconds

HEADS, GROUP, DIM = 8, 4, 128
TILES = (
    Tiles(), Tiles(128, 64, 4, 3), Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 4), Tiles(128, 128, 8, 3),
    Tiles(256, 64, 8, 3),
)  # fmt: skip


def milliseconds(call: Callable[[], object], calls: int = 5) -> float:
    """Milliseconds of a call, after one that compiles what it needs."""
    call()
    return seconds(lambda: (call(), None)[1], calls, True) * 1e3


def measure(row: Record, q: Tensor, k: Tensor, slow: bool) -> None:
    """Fill the row of a length with what all tiles share."""
    row["dense_ms"] = milliseconds(lambda: dense.attend(q, k, k))
    lse = torch.full(q.shape[:3], torch.inf, device=q.device)
    row["lse_ms"] = milliseconds(lambda: dense.attend(q, k, k, lse=lse))
    if slow:
        row["slow_ms"] = milliseconds(lambda: received(q, k), 1)


def by_tiles(row: Record, q: Tensor, k: Tensor, lse: Tensor, wanted: Tensor | None, tiles: Tiles) -> None:
    """Fill the row of one launch."""
    row["sums_ms"] = milliseconds(lambda: column_sums(q, k, lse, tiles=tiles))
    if wanted is not None:
        found = column_sums(q, k, lse, tiles=tiles)
        row["difference"] = float((found - wanted).abs().max() / wanted.max())


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--slow-up-to", type=int, default=32768, help="longest prompt for the reference")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Record] = []

    def done(row: Record) -> None:
        rows.append(row)
        print(said(row), flush=True)
        write_rows(args.out / "column_sums.csv", rows)

    for length in args.length:
        q, k = (
            torch.randn(1, length, heads, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (HEADS * GROUP, HEADS)
        )
        slow = length <= args.slow_up_to
        done(attempt({"length": length}, lambda row: measure(row, q, k, slow)))  # noqa: B023
        wanted = received(q, k).unflatten(1, (HEADS, GROUP)).sum(2) if slow else None
        lse = torch.full(q.shape[:3], torch.inf, device="cuda")
        dense.attend(q, k, k, lse=lse)
        for tiles in TILES:
            row: Record = {"length": length, **tiles._asdict()}
            done(attempt(row, lambda row: by_tiles(row, q, k, lse, wanted, tiles)))  # noqa: B023
        clear()
    complain(rows, "length")


if __name__ == "__main__":
    main()
