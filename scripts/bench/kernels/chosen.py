"""One layer that chooses what it reads: microseconds of a step under several launches, beside reading everything.

    python -m scripts.bench.kernels.chosen OUT                     # Llama-3.1-8B's attention, random keys, one GPU

Every launch differs from the default in one setting. Prints and writes OUT/chosen.csv:

    step_us       a step: scores, choice, attention
    choose_us     scores and choice alone
    topk_us       torch.topk of as many scores, in place of the choice; for comparison
    wrong         query heads whose choice is not that of a stable sort of their scores, of all layers
    dense_us      a step of the decode kernel that reads everything
    read_mb       bytes that the step must read, in 10^6; dense_mb: those of the dense step
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from leank.eval.cache import Sizes
from leank.eval.cache.attention.choose import Chosen, ChosenConfig, ranking_of
from leank.eval.cache.attention.launch import Kernel
from leank.eval.cache.attention.places import Column
from leank.eval.cache.storage.middle import Middle, ReadChoice
from leank.eval.cache.storage.store import Store
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from scripts.bench.common.bytes_read import bytes_read
from scripts.bench.common.shapes import DIM, DTYPE
from scripts.bench.common.table import Record, attempt, said, write_rows
from scripts.bench.common.timing import clear
from scripts.bench.kernels.cases import median_us

HEADS, GROUP, SIZES, BUDGET = 8, 4, Sizes(16, 64, 32), 1024
COPIES = 4  # layers over which a timing rotates, so that none is still in the L2 cache
LAUNCHES: dict[str, list[dict[str, int]]] = {
    "quest": [
        {}, {"held": 16}, {"held": 8}, {"per_sm": 1}, {"per_sm": 3}, {"per_sm": 4}, {"tile": 16},
        {"tile": 64}, {"warps": 8}, {"merge": 8}, {"span": 128}, {"score_per_sm": 1}, {"score_per_sm": 3},
        {"score_tile": 32},
    ],
    "labels": [
        {}, {"held": 16}, {"held": 8}, {"score_per_sm": 4}, {"label_tile": 512}, {"score_per_sm": 8},
        {"per_sm": 4}, {"label_tile": 64}, {"per_sm": 1}, {"run": 16}, {"tile": 64}, {"run": 4},
        {"tile": 16},
    ],
}  # fmt: skip


def layer(reads: ReadChoice | None, rows: int, length: int) -> tuple[Store, Tensor, Tensor]:
    """A sealed layer of random keys with one token in the window, a query, and its position."""
    k, v = torch.randn(2, 1, HEADS, length, DIM, device="cuda", dtype=DTYPE)
    store = Store(
        k[:, :, :-1], v[:, :, :-1], None, Middle(torch.ones(HEADS, DIM, dtype=torch.bool), reads=reads), SIZES
    )
    if rows > 1:
        store.select(torch.zeros(rows, dtype=torch.long))
    position = store.append(*(x[:, :, -1:].expand(rows, -1, -1, -1) for x in (k, v)))
    return store, torch.randn(rows, HEADS * GROUP, 1, DIM, device="cuda", dtype=DTYPE), position


def dense(row: Record, rows: int, length: int) -> None:
    """The step that reads everything."""
    kernel = Kernel()
    layers = [layer(None, rows, length) for _ in range(2)]
    row["dense_us"] = median_us([partial(kernel.attend, *one, DIM**-0.5) for one in layers])
    row["dense_mb"] = bytes_read(layers[0][0], GROUP) / 1e6


def wrong(kernel: Chosen, store: Store, q: Tensor) -> int:
    """Query heads whose choice is not the highest scores, of equals the first, in ascending order."""
    plan, ranking = kernel.prepare(store), ranking_of(store)
    found, heads = kernel.choose(store, q, plan, ranking), q.shape[0] * q.shape[1]
    stride = int(plan.table[0, Column.STRIDE])
    scores = plan.scores[: heads * stride].view(heads, stride)
    total = -(-int(store.prompt.length[0, 0] + store.tail.length[0, 0]) // ranking.page)  # alike in all heads
    order = scores[:, :total].argsort(descending=True, stable=True)[:, : ranking.most].sort().values
    mine = found[: heads * ranking.most].view(heads, -1)[:, :total]
    return int((mine != order).any(1).sum())


def launches(kind: str, rows: int, length: int, of_dense: Record, first: int) -> list[Record]:
    """A row for each of the first launches."""
    labels = (torch.arange(DIM) < DIM // 8).expand(HEADS, DIM)
    reads = Quest(BUDGET, 16, 0) if kind == "quest" else Labels(labels, BUDGET)
    layers, found = [layer(reads, rows, length) for _ in range(COPIES)], []
    room = (length + 127) // ranking_of(layers[0][0]).page
    scores = torch.randn(COPIES, rows * HEADS * GROUP, room, device="cuda")
    most = ranking_of(layers[0][0]).most
    topk = median_us([partial(torch.topk, x, min(most, room), sorted=False) for x in scores])

    def measure(row: Record, config: ChosenConfig) -> None:
        kernel = Chosen(config)
        steps = [partial(kernel.attend, *one, DIM**-0.5) for one in layers]
        for step in steps:
            step()
        row["wrong"] = sum(wrong(kernel, store, q) for store, q, _ in layers)
        row["step_us"] = median_us(steps)
        row["choose_us"] = median_us(
            [partial(kernel.choose, store, q, kernel.prepare(store), ranking_of(store)) for store, q, _ in layers]
        )
        row.update(topk_us=topk, **of_dense, read_mb=bytes_read(layers[0][0], GROUP) / 1e6)

    for changed in LAUNCHES[kind][:first]:
        for store, _, _ in layers:
            store.plan = None
        row: Record = {"kind": kind, "rows": rows, "length": length, "set": str(changed)}
        found.append(attempt(row, partial(measure, config=replace(ChosenConfig(), **changed))))
        print(said(row, 1), flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--kinds", nargs="+", choices=list(LAUNCHES), default=list(LAUNCHES))
    parser.add_argument("--first", type=int, default=99, help="so many of the launches, the default one first")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    table: list[Record] = []
    for rows in args.rows:
        for kind in args.kinds:
            for length in args.lengths:
                of_dense: Record = {}
                attempt(of_dense, partial(dense, rows=rows, length=length))
                table += launches(kind, rows, length, of_dense, args.first)
                write_rows(args.out / "chosen.csv", table)
                clear()


if __name__ == "__main__":
    main()
