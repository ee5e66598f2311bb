"""Time of attention over one layer: the decode kernels beside dense attention, and the limit that bytes set.

    python -m scripts.bench.attention layers OUT        # LeanK's kernel at the published masks (figures 5 and 10)
    python -m scripts.bench.attention packed OUT        # middles in 16, 8, 4 and 2 bits
    python -m scripts.bench.attention paged OUT         # over the pages of a served cache
    python -m scripts.bench.attention chosen OUT        # Quest and Double Sparsity, which choose what they read
    python -m scripts.bench.attention rounds OUT        # a round in which tokens leave: H2O, TOVA, R-KV
    python -m scripts.bench.attention sums OUT          # what every key of a prompt receives from all queries

All want a GPU, write CSV files into OUT, and run on random keys. A call is captured in a CUDA graph that rotates over
copies larger than the L2 cache; times are medians of replays, in microseconds.

layers    every layer of a published mask, and dense attention: SDPA's kernels, and this one with nothing pruned. limit
          is the speed-up that the bytes would allow; "reading alone" reads a layer's bytes in one piece and does
          nothing else. A least-squares line through a shape's layers, time = fixed + bytes / rate, separates
          the cost of a launch from the speed of reading: fixed_us, line_gb_per_s
packed    every eighth layer, means
paged     paged_us beside the cache's own kernel (cache_us) and pages that hold every channel (dense_pages_us)
chosen    step_us: scores, choice and attention; choose_us: scores and choice; topk_us: torch.topk of as many scores;
          wrong: query heads whose choice is not that of a stable sort of their scores; dense_us: reading everything
rounds    host_us until Python is done with a round, wall_us until the GPU is, gpu_us in kernels (rounds_kernels.csv);
          rounds_prompts.csv: milliseconds in which R-KV compares all keys of a prompt. alike: share of keys that are so
          much alike that the search for others ends early
sums      milliseconds of dense attention, of attention that also hands over its log-sum-exp, and of the sums from it;
          slow_ms is their reference in plain PyTorch
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle, ReadChoice
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.serving.layout import PageLayout, lay_out
from scripts.bench.common import (
    DIM,
    DTYPE,
    LLAMA,
    MASKS,
    QWEN,
    Record,
    Table,
    bytes_read,
    clear,
    device_name,
    each_ms,
    profiled,
    seconds,
    wait,
)

if TYPE_CHECKING:  # Triton is imported where a GPU is used
    from leank.eval.cache.attention.launch import Kernel

SIZES = Sizes(sink=128, window=1024, flush=32)
HEADS, GROUP = 8, 4  # of Llama-3.1-8B
PACKINGS = {16: None, 8: Packing(8), 4: Packing(4), 2: Packing(2)}  # by bits
CHOSEN, BUDGET, COPIES = Sizes(16, 64, 32), 1024, 4  # of layers that choose: sizes, tokens, layers that take turns
POLICIES = {"h2o": Sizes(0, 512, 32), "tova": Sizes(0, 32, 32), "rkv": Sizes(0, 8, 128)}  # budgets are BUDGET
ROUNDS, WARM = 6, 3
FILES = {  # action -> name of its table, and the columns that tell its rows apart
    "layers": ("attention", ("shape", "layer", "method")), "packed": ("packed", ("batch", "method", "bits")),
    "paged": ("paged", ("shape", "block", "layer")), "chosen": ("chosen", ("kind", "rows", "length", "set")),
    "rounds": ("rounds", ("policy", "rows")), "sums": ("column_sums", ("length",)),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model's attention at one batch and context.

    mask: file of the published mask, in MASKS.
    batch: rows. context: tokens of each row.
    """

    model: str
    mask: str
    q_heads: int
    kv_heads: int
    batch: int
    context: int

    @property
    def name(self) -> str:
        """Model, batch and context, as they stand in the tables."""
        return f"{self.model} {self.batch} x {self.context // 1024}K"

    @property
    def bytes(self) -> int:
        """Bytes of K and V of the whole context."""
        return 2 * self.batch * self.kv_heads * self.context * DIM * DTYPE.itemsize

    def keep(self) -> Tensor:
        """The published mask [L, H, D], True = kept."""
        return torch.load(MASKS / self.mask, map_location="cpu", weights_only=True).bool()

    def query(self) -> Tensor:
        """Random queries of one decode step, [batch, query heads, 1, head_dim]."""
        return torch.randn(self.batch, 1, self.q_heads, DIM, device="cuda", dtype=DTYPE).transpose(1, 2)


SHAPE_LIST = [
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 8, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 4096),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 1, 131072),
    Shape("Qwen2.5-7B", QWEN, 28, 4, 8, 32768),
]


def make_store(middle: Middle, batch: int, context: int, heads: int, sizes: Sizes = SIZES) -> Store:
    """A sealed layer of one random row, repeated `batch` times, with one decoded token in the window."""
    k, v = torch.randn(2, 1, heads, context, DIM, device="cuda", dtype=DTYPE)
    store = Store(k[:, :, :-1], v[:, :, :-1], None, middle, sizes)
    if batch > 1:
        store.select(torch.zeros(batch, dtype=torch.long))
    store.append(*(x[:, :, -1:].expand(batch, -1, -1, -1) for x in (k, v)))
    return store


def stores_of(shape: Shape, keep: Tensor, bits: Packing | None = None) -> list[Store]:
    """Copies of a layer, as many as it takes for none to be in the L2 cache when its turn comes."""
    first = make_store(Middle(keep, bits=bits), shape.batch, shape.context, shape.kv_heads)
    more = copies_of(needed_bytes(first)) - 1
    return [
        first,
        *(make_store(Middle(keep, bits=bits), shape.batch, shape.context, shape.kv_heads) for _ in range(more)),
    ]


def needed_bytes(store: Store) -> int:
    """Bytes of K and V that a step must read: sink, window, and what the middle holds."""
    ends = int((store.sizes.sink + store.seen - store.start).sum()) * store.ring_k.shape[1] * DIM * 2
    return ends * DTYPE.itemsize + sum(store.prompt.held()) + sum(store.tail.held())


def copies_of(size: int) -> int:
    """How many copies of `size` bytes to rotate over so that none is still in L2 when its turn comes."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if size > 40 * cache else 2 + 4 * cache // size


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of one call, the median over replays of a CUDA graph of all calls.

    calls: the same work, each on its own copy of the data. repeats: replays that count.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(max(1, 8 // len(calls))) for call in calls]
    return median(each_ms(graph.replay, 3 + repeats)[3:]) * 1e3 / len(kept)


def kernel_us(shape: Shape, stores: Sequence[Store], kernel: Kernel | None = None) -> float:
    """Microseconds of the decode kernel over copies of one layer."""
    from leank.eval.cache.attention.launch import Kernel

    kernel = kernel or Kernel()
    q, position = shape.query(), (stores[0].seen_dev - 1)[:, None].clone()
    return median_us([partial(kernel.attend, store, q, position, DIM**-0.5) for store in stores])


# layers


def dense_times(shape: Shape) -> dict[str, float]:
    """Microseconds of each dense attention over the whole context."""
    copies = copies_of(shape.bytes)
    kv = torch.randn(copies, 2, shape.batch, shape.kv_heads, shape.context, DIM, device="cuda", dtype=DTYPE)
    q, found = shape.query(), {}
    for name, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                found[name] = median_us(
                    [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in kv]
                )
        except RuntimeError as reason:
            print(f"{name} cannot run {shape.name}: {reason}")
    del kv
    everything = torch.ones(shape.kv_heads, DIM, dtype=torch.bool)
    found["own kernel, nothing pruned"] = kernel_us(shape, stores_of(shape, everything))
    clear()
    return found


def reading_us(size: int) -> float:
    """Microseconds in which `size` bytes, in one piece and not in the L2 cache, can be read: the best of LAUNCHES."""
    from scripts.bench.reading_kernel import LAUNCHES, read

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    length = -(-size // 4 // LAUNCHES[-1][0]) * LAUNCHES[-1][0]
    copies = torch.randint(0, 9, (copies_of(size), length), dtype=torch.int32, device="cuda")
    times = []
    for block, per_sm in LAUNCHES:
        out = torch.empty(multiprocessors * per_sm, dtype=torch.int32, device="cuda")
        times.append(median_us([partial(read, words, out, block) for words in copies], repeats=5))
    return min(times)


def fitted(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The line time = fixed + bytes / rate through the layers `rows`, by least squares.

    Returns (fixed microseconds of a launch, rate in GB/s); both are NaN if all layers have the same bytes.
    """
    size, us = (np.array([float(row[key]) for row in rows]) for key in ("bytes", "us"))
    if len(set(size)) < 2:
        return float("nan"), float("nan")
    slope = ((size - size.mean()) * (us - us.mean())).sum() / ((size - size.mean()) ** 2).sum()
    return float(us.mean() - slope * size.mean()), float(1e-3 / slope)


def layers(shape: Shape, table: Table, step: int) -> None:
    """Add the rows of one shape: every dense method, then every `step`-th layer of the published mask."""
    dense = dense_times(shape)
    fastest = min(dense, key=lambda name: dense[name])
    found: list[Record] = [{"layer": "", "method": n, "us": us, "bytes": shape.bytes} for n, us in dense.items()]
    alone: dict[int, float] = {}  # bytes of a layer -> microseconds of reading them
    for layer, keep in list(enumerate(shape.keep()))[::step]:
        stores = stores_of(shape, keep)
        size = needed_bytes(stores[0])
        found.append({"layer": layer, "method": "LeanK", "us": kernel_us(shape, stores), "bytes": size})
        del stores
        clear()
        alone[size] = alone.get(size) or reading_us(size)
        found.append({"layer": layer, "method": "reading alone", "us": alone[size], "bytes": size})
    pruned: list[Any] = [row for row in found if row["method"] == "LeanK"]
    fixed, rate = fitted(pruned)
    for row in found:
        us, read = float(str(row["us"])), int(str(row["bytes"]))
        line: Record = {"fixed_us": fixed, "line_gb_per_s": rate} if row["method"] == "LeanK" else {}
        table.add({"shape": shape.name, "dense_us": dense[fastest], "dense": fastest, **row,
                   "limit": shape.bytes / read, "gb_per_s": read / us / 1e3, "speedup": dense[fastest] / us,
                   **line})  # fmt: skip
    us, mean_size = (float(np.mean([row[key] for row in pruned])) for key in ("us", "bytes"))
    floor = np.mean([float(str(row["us"])) for row in found if row["method"] == "reading alone"])
    gained, limit = dense[fastest] / us, shape.bytes / mean_size
    print(f"{shape.name}: {us:.1f} us per layer, {mean_size / us / 1e3:.0f} GB/s, {gained:.3f}x over {fastest}; "
          f"the bytes allow {limit:.3f}x, {gained / limit:.1%} of which it is; reading alone {floor:.1f} us; "
          f"{fixed:.1f} us per launch, then {rate:.0f} GB/s")  # fmt: skip


# packed


def packed(row: Record, batch: int, bits: int, masks: Tensor) -> None:
    """Fill the row of a batch and bits: the mean over layers."""
    shape, times, sizes = replace(SHAPE_LIST[0], batch=batch), [], []
    for mask in masks:
        stores = stores_of(shape, mask, PACKINGS[bits])
        times.append(kernel_us(shape, stores))
        sizes.append(needed_bytes(stores[0]))
        del stores
        clear()
    row.update(us=np.mean(times), mb=np.mean(sizes) / 1e6, gb_per_s=sum(sizes) / sum(times) / 1e3)


# paged


def layout_of(keep: Tensor, block: int, rest: int) -> PageLayout:
    """Pages that hold one layer [1, H, D] of a mask: `block` tokens of kept channels, `rest` of the others."""
    kept, others = lay_out(keep, keep.any(-1), block), lay_out(~keep, ~keep.any(-1), rest)
    return PageLayout(kept, others, SIZES.sink, SIZES.window, DIM)


def paged_us(shape: Shape, layout: PageLayout) -> float:
    """Microseconds of one launch over random pages."""
    from leank.eval.serving.paged import PagedAttention

    paged = PagedAttention(layout, torch.device("cuda"), shape.q_heads)
    widths = [-(-shape.context // group.block) for group in (layout.kept, layout.rest)]
    stored = rest_pages(layout, shape.context)
    blocks = 1 + shape.batch * (widths[0] + len(stored))
    q = shape.query()[:, :, 0]
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")
    calls = []
    for _ in range(copies_of(blocks * layout.page_columns * DTYPE.itemsize)):
        pages = torch.empty(blocks, layout.page_columns, dtype=DTYPE, device="cuda").normal_()
        free = (torch.randperm(blocks - 1, device="cuda") + 1).int()  # block tables are random permutations
        kept = free[: shape.batch * widths[0]].view(shape.batch, widths[0])
        rest = torch.zeros(shape.batch, widths[1], dtype=torch.int32, device="cuda")
        rest[:, stored] = free[shape.batch * widths[0] :].view(shape.batch, len(stored))
        calls.append(partial(paged.attend, pages, 0, q, lengths, kept, rest, DIM**-0.5))
    return median_us(calls)


def rest_pages(layout: PageLayout, context: int) -> list[int]:
    """The pages of `rest` that hold sink or window of a request that decodes its token number `context`."""
    if not layout.rest.columns:
        return []
    block, first = layout.rest.block, layout.whole_from(context - 1)
    return sorted({*range(-(-min(layout.sink, context) // block)), *range(first // block, -(-context // block))})


def paged(shape: Shape, table: Table, block: int, step: int) -> None:
    """Add the rows of one shape: every `step`-th layer."""
    masks = shape.keep()
    dense = paged_us(shape, layout_of(torch.ones_like(masks[:1]), block, block))
    rest = PageLayout.of(masks, block, SIZES.sink, SIZES.window).rest.block
    for layer in range(0, len(masks), step):
        clear()
        us = paged_us(shape, layout_of(masks[layer : layer + 1], block, rest))
        stores = stores_of(shape, masks[layer])
        found = {"paged_us": us, "cache_us": kernel_us(shape, stores), "dense_pages_us": dense}
        table.add({"shape": shape.name, "block": block, "layer": layer, "bytes": needed_bytes(stores[0]), **found})
        del stores


# chosen


def chosen(row: Record, kind: str, rows: int, length: int, changed: Mapping[str, int]) -> None:
    """Fill the row of one kind of choice. changed: fields of ChosenConfig."""
    from leank.eval.cache.attention.choose import Chosen, ChosenConfig, ranking_of
    from leank.eval.methods.reads.double_sparsity import Labels
    from leank.eval.methods.reads.quest import Quest

    def layer(reads: ReadChoice | None) -> tuple[Store, Tensor, Tensor]:
        everything = torch.ones(HEADS, DIM, dtype=torch.bool)
        store = make_store(Middle(everything, reads=reads), rows, length, HEADS, CHOSEN)
        q = torch.randn(rows, HEADS * GROUP, 1, DIM, device="cuda", dtype=DTYPE)
        return store, q, (store.seen_dev - 1)[:, None].clone()

    whole = [layer(None) for _ in range(2)]
    shape = replace(SHAPE_LIST[0], batch=rows)
    row.update(dense_us=kernel_us(shape, [store for store, _, _ in whole]))
    row.update(dense_mb=bytes_read(whole[0][0], GROUP) / 1e6)
    labels = (torch.arange(DIM) < DIM // 8).expand(HEADS, DIM)
    found = [layer(Quest(BUDGET, 16, 0) if kind == "quest" else Labels(labels, BUDGET)) for _ in range(COPIES)]
    kernel, ranking = Chosen(ChosenConfig(**changed)), ranking_of(found[0][0])
    steps = [partial(kernel.attend, *one, DIM**-0.5) for one in found]
    for step in steps:
        step()
    row["wrong"] = sum(wrong(kernel, store, q) for store, q, _ in found)
    row["step_us"] = median_us(steps)
    choices = [partial(kernel.select, store, q, kernel.prepare(store), ranking_of(store)) for store, q, _ in found]
    row["choose_us"] = median_us(choices)
    pages = (length + 127) // ranking.page
    scores = torch.randn(COPIES, rows * HEADS * GROUP, pages, device="cuda")
    row["topk_us"] = median_us([partial(torch.topk, x, min(ranking.most, pages), sorted=False) for x in scores])
    row["read_mb"] = bytes_read(found[0][0], GROUP) / 1e6


def wrong(kernel: Any, store: Store, q: Tensor) -> int:
    """Query heads whose choice is not the highest scores, of equals the first, in ascending order."""
    from leank.eval.cache.attention.choose import ranking_of
    from leank.eval.cache.attention.ranking import Column

    plan, ranking = kernel.prepare(store), ranking_of(store)
    found, heads = kernel.select(store, q, plan, ranking), q.shape[0] * q.shape[1]
    stride = int(plan.table[0, Column.STRIDE])
    scores = plan.scores[: heads * stride].view(heads, stride)
    total = -(-int(store.prompt.length[0, 0] + store.tail.length[0, 0]) // ranking.page)  # alike in all heads
    order = scores[:, :total].argsort(descending=True, stable=True)[:, : ranking.most].sort().values
    mine = found[: heads * ranking.most].view(heads, -1)[:, :total]
    return int((mine != order).any(1).sum())


# rounds


class Round:
    """One layer that holds its budget; a call lets tokens come and measures the round after them."""

    def __init__(self, name: str, rows: int) -> None:
        from leank.eval.cache.attention.launch import Kernel
        from leank.eval.methods.tokens.rkv import RKV
        from leank.eval.methods.tokens.tova import LastQuery

        self.sizes, self.kernel = POLICIES[name], Kernel()
        policy: Any = {"h2o": HeavyHitters, "tova": LastQuery, "rkv": RKV().policy}[name]
        k, v = self.tokens(1, BUDGET)
        self.store = Store(k, v, None, Middle(eviction=policy(BUDGET - self.sizes.window)), self.sizes)
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
        policy.scores[..., : int(store.held().max())].uniform_()

    def __call__(self) -> None:
        """A round."""
        self.come()
        wait()
        begin = time.perf_counter()
        self.store.flush(self.kernel.move, self.kernel.evict)
        self.host.append(time.perf_counter() - begin)
        wait()
        self.wall.append(time.perf_counter() - begin)


def rounds(row: Record, name: str, rows: int, kernels: Table) -> None:
    """Fill the row of a policy, and add those of its kernels."""
    one = Round(name, rows)
    for _ in range(WARM + ROUNDS):
        one()
    host, wall = (median(spent[WARM:]) * 1e6 for spent in (one.host, one.wall))
    with_tokens, coming = profiled(one), {launches.name: launches for launches in profiled(one.come)}
    total = np.zeros(2)
    for launches in with_tokens:  # less what the tokens' coming takes
        less = coming.get(launches.name)
        count, us = (launches.count - less.count, launches.ms - less.ms) if less else (launches.count, launches.ms)
        if count > 0:
            kernels.add({"policy": name, "rows": rows, "kernel": launches.name[:80], "count": count, "us": us * 1e3})
            total += us * 1e3, count
    row.update(host_us=host, wall_us=wall, gpu_us=total[0], launches=total[1])


def prompts(row: Record, tokens: int, alike: float) -> None:
    """Fill the row of a prompt's length."""
    from leank.eval.methods.kernels import rkv as fast
    from leank.eval.methods.tokens import rkv

    keys = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=DTYPE)
    keys[:, :, : int(alike * tokens)] += 2  # their cosine is 0.8
    keys = keys[:, :, torch.randperm(tokens, device="cuda")]
    there = torch.ones(keys.shape[:3], dtype=torch.bool, device="cuda")
    torch.testing.assert_close(
        fast.redundancy(keys, there, 0.5), rkv.redundancy(keys, there, 0.5), rtol=1e-4, atol=0
    )  # fmt: skip
    row["ms"] = median(each_ms(lambda: fast.redundancy(keys, there, 0.5), ROUNDS))
    row["plain_pytorch_ms"] = median(each_ms(lambda: rkv.redundancy(keys, there, 0.5), 2))


# sums


def sums(row: Record, length: int, slow: bool) -> None:
    """Fill the row of a prompt's length. slow: whether the reference is timed and compared with, too."""
    from leank.eval.cache.attention import dense
    from leank.eval.inference.observe import column_sums, received

    def milliseconds(call: Callable[[], object], calls: int = 5) -> float:
        call()  # compiles what it needs
        return seconds(call, calls) * 1e3

    q, k = (torch.randn(1, length, n, DIM, device="cuda", dtype=DTYPE).transpose(1, 2) for n in (HEADS * GROUP, HEADS))
    row["dense_ms"] = milliseconds(lambda: dense.attend(q, k, k))
    lse = torch.full(q.shape[:3], torch.inf, device="cuda")
    row["lse_ms"] = milliseconds(lambda: dense.attend(q, k, k, lse=lse))
    row["sums_ms"] = milliseconds(lambda: column_sums(q, k, lse))
    if slow:
        row["slow_ms"] = milliseconds(lambda: received(q, k), 1)
        wanted = received(q, k).unflatten(1, (HEADS, GROUP)).sum(2)
        row["difference"] = float((column_sums(q, k, lse) - wanted).abs().max() / wanted.max())


def options(given: Sequence[str]) -> dict[str, int]:
    """Names and numbers from words like per_sm=8; raises SystemExit for others."""
    pairs = [word.partition("=")[::2] for word in given]
    if not all(value.isdigit() for _, value in pairs):
        raise SystemExit(f"--set {' '.join(given)}: give NAME=NUMBER")
    return {name: int(value) for name, value in pairs}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=list(FILES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPE_LIST)),
                        help=f"layers, paged: which of the {len(SHAPE_LIST)} shapes, from 0; default all")  # fmt: skip
    parser.add_argument("--step", type=int, help="every so many layers; default: layers 1, paged 4, packed 8")
    parser.add_argument("--rows", type=int, nargs="+", help="packed, chosen, rounds: of the batch")
    parser.add_argument("--bits", type=int, nargs="+", choices=list(PACKINGS), default=list(PACKINGS), help="packed")
    parser.add_argument("--block", type=int, nargs="+", default=[64], help="paged: tokens of a page")
    parser.add_argument("--lengths", type=int, nargs="+",
                        help="chosen, sums, rounds (R-KV's prompts): tokens")  # fmt: skip
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="chosen: fields of ChosenConfig")
    return parser.parse_args(argv)


def all_packed(args: argparse.Namespace, table: Table) -> None:
    """Add dense, and LeanK in every number of bits, at every batch."""
    keep = SHAPE_LIST[0].keep()[:: args.step or 8]
    for batch in args.rows or [1, 16, 64]:
        for method, bits, masks in (("dense", 16, torch.ones_like(keep[:1])), *(("LeanK", b, keep) for b in args.bits)):
            row: Record = {"batch": batch, "method": method, "bits": bits}
            table.add(row, partial(packed, batch=batch, bits=bits, masks=masks))


def all_chosen(args: argparse.Namespace, table: Table) -> None:
    """Add both kinds of choice at every batch and length."""
    for rows, kind in product(args.rows or [1], ("quest", "labels")):
        for length in args.lengths or [32768, 131072]:
            row: Record = {"kind": kind, "rows": rows, "length": length, "set": " ".join(args.set)}
            table.add(row, partial(chosen, kind=kind, rows=rows, length=length, changed=options(args.set)))


def all_rounds(args: argparse.Namespace, table: Table) -> None:
    """Add every policy's round at every batch, its kernels, and R-KV's comparison of a prompt's keys."""
    of_prompts = Table(args.out / "rounds_prompts.csv", ("tokens", "alike"))
    kernels = Table(args.out / "rounds_kernels.csv", ("policy", "rows", "kernel"))
    for tokens, alike in product(args.lengths or [32768], (0.0, 1.0)):
        of_prompts.add({"tokens": tokens, "alike": alike}, partial(prompts, tokens=tokens, alike=alike))
    for rows, policy in product(args.rows or [1, 831], POLICIES):
        table.add({"policy": policy, "rows": rows}, partial(rounds, name=policy, rows=rows, kernels=kernels))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("these measurements need a CUDA device")
    torch.manual_seed(0)
    print(device_name(), "torch", torch.__version__)
    name, keys = FILES[args.action]
    table, shapes = Table(args.out / f"{name}.csv", keys), [SHAPE_LIST[index] for index in args.shapes]
    if args.action == "layers":
        for shape in shapes:
            layers(shape, table, args.step or 1)
    elif args.action == "paged":
        for block, shape in product(args.block, shapes):
            paged(shape, table, block, args.step or 4)
    elif args.action == "sums":
        for length in args.lengths or [8192, 32768]:
            table.add({"length": length}, partial(sums, length=length, slow=length <= 32768))
    else:
        {"packed": all_packed, "chosen": all_chosen, "rounds": all_rounds}[args.action](args, table)
    table.check()


if __name__ == "__main__":
    main()
