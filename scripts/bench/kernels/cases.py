"""What the attention benchmarks share: shapes, layers of random keys, timing, the check of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leank.data_gen.amount import amount
from leank.eval.cache.attention import naive
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from scripts.bench.common.shapes import DIM, DTYPE, LLAMA, MASKS, QWEN

if TYPE_CHECKING:  # Triton is not everywhere that these modules are imported
    from leank.eval.cache.attention.launch import Config

SIZES = Sizes(sink=128, window=1024, flush=32)
TOLERANCE = 5e-3  # relative error against float64


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

    def keep(self) -> Tensor:
        """The published mask [L, H, D], True = kept."""
        return torch.load(MASKS / self.mask, map_location="cpu", weights_only=True).bool()


SHAPES = [
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 8, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 4096),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 1, 131072),
    Shape("Qwen2.5-7B", QWEN, 28, 4, 8, 32768),
]


def make_store(keep: Tensor, batch: int, context: int, bits: Packing | None = None) -> Store:
    """A sealed layer of one random row, repeated `batch` times, with one decoded token in the window.

    bits: how the middle is packed, None = in 16 bits.
    """
    heads = keep.shape[0]
    k, v = torch.randn(2, 1, heads, context, DIM, device="cuda", dtype=DTYPE)
    store = Store(k[:, :, :-1], v[:, :, :-1], None, Middle(keep, bits=bits), SIZES)
    if batch > 1:
        store.select(torch.zeros(batch, dtype=torch.long))
    store.append(*(x[:, :, -1:].expand(batch, -1, -1, -1) for x in (k, v)))
    return store


def needed_bytes(store: Store) -> int:
    """Bytes of K and V that a step must read: sink, window, and what the middle holds."""
    ends = int((store.sizes.sink + store.seen - store.start).sum()) * store.ring_k.shape[1] * DIM * 2
    return ends * DTYPE.itemsize + sum(store.prompt.held()) + sum(store.tail.held())


def query(shape: Shape) -> Tensor:
    """Random queries of one decode step, [batch, query heads, 1, head_dim]."""
    return torch.randn(shape.batch, 1, shape.q_heads, DIM, device="cuda", dtype=DTYPE).transpose(1, 2)


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
    rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(rounds) for call in calls]
    times = []
    for _ in range(3 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(kept))
    return sorted(times[3:])[repeats // 2]


def copies_of(size: int) -> int:
    """How many copies of `size` bytes to rotate over so that none is still in L2 when its turn comes."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if size > 40 * cache else 2 + 4 * cache // size


def check_case(keep: Tensor, group: int, queries: int, config: Config | None, bits: Packing | None = None) -> None:
    """Compare the kernel with attention in float64 while it decodes padded rows.

    keep: [H, D], True = kept. group: query heads per KV head. queries: of each step. config: the kernel's.
    bits: how the middle is packed, None = in 16 bits.
    Raises SystemExit if the relative error exceeds TOLERANCE.
    """
    from leank.eval.cache.attention.launch import Kernel

    heads, dim = keep.shape
    k, v = torch.randn(2, 3, heads, 3333, dim, device="cuda", dtype=DTYPE)
    real = torch.arange(3333, device="cuda") >= torch.tensor([0, 700, 2500], device="cuda")[:, None]
    store, kernel, worst = Store(k, v, real, Middle(keep, bits=bits), SIZES), Kernel(config), 0.0
    for _ in range(5):
        k, v = torch.randn(2, 3, heads, 11 if queries == 1 else queries, dim, device="cuda", dtype=DTYPE)
        position = store.append(k, v, write=kernel.write)[:, -queries:]
        q = torch.randn(3, queries, heads * group, dim, device="cuda", dtype=DTYPE).transpose(1, 2)
        want = naive.attend(store, q.double(), position, dim**-0.5)
        got = kernel.attend(store, q, position, dim**-0.5)
        worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
        store.flush()
    print(
        f"check {keep.sum(-1).tolist()} of {dim}, group {group}, {amount(queries, 'query')}: {worst:.1e}  "
        f"{config} {bits or ''}"
    )
    if not worst <= TOLERANCE:
        raise SystemExit(f"the kernel is wrong: relative error {worst:.2e} > {TOLERANCE}")


def check() -> None:
    """Compare the kernel with attention in float64 on published and on ragged masks, for one query and several."""
    from leank.eval.cache.attention.launch import Config

    llama, qwen = SHAPES[0].keep()[13], SHAPES[4].keep()[20]
    ragged = torch.rand(6, DIM).argsort(-1) < torch.tensor([0, 5, 77, 96, 33, 128])[:, None]
    wide = Config(tile=128, stages=2)
    for case in ((llama, 4, 1), (llama, 4, 5), (qwen, 7, 1), (ragged, 1, 1), (ragged, 8, 3), (ragged[:, :64], 8, 40)):
        check_case(*case, Config())
    check_case(ragged, 4, 1, wide)
