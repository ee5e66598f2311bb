"""Time of attention over one layer: LeanK's decode kernel beside dense attention, and the limit that bytes set.

    python -m scripts.bench.attention layers OUT        # at the published masks (LeanK, figures 5 and 10)
    python -m scripts.bench.attention packed OUT        # middles in 16, 8, 4 and 2 bits
    python -m scripts.bench.attention layouts OUT       # bits of each channel's own, beside dense attention
    python -m scripts.bench.attention dims OUT          # heads of 64, 128, 192 and 256 channels
    python -m scripts.bench.attention means OUT         # a step with means for pruned channels, and without

All want a GPU, write a CSV file into OUT, and run on random keys. A call is captured in a CUDA graph that rotates over
copies larger than the L2 cache; times are medians of replays, in microseconds.

layers    every layer of a published mask, and dense attention: SDPA's kernels, and this one with nothing pruned. limit
          is the speed-up that the bytes would allow; "reading alone" reads a layer's bytes in one piece and does
          nothing else. A least-squares line through a shape's layers, time = fixed + bytes / rate, separates
          the cost of a launch from the speed of reading: fixed_us, line_gb_per_s
packed    every eighth layer, means
layouts   a layer of random layouts (`LAYOUTS`), in which every head has other bands, of 8 KV heads with 4 query heads
          each; limit is the time in which the bytes can be read in one piece, middle_bytes the share of the middle
means     as packed, at the shapes of layers; us is a step: the new token's way into the window, and the attention
dims      a layer of a random mask that keeps 30% of the channels in blocks of 32, of 8 KV heads with 4 query heads
          each; limit_us as the limit of layouts, share_of_limit is limit_us / us
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["layers", "packed", "layouts", "dims", "means"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, help="every so many layers; default: layers 1, packed and means 8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="packed, layouts, dims: of the batch")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[4096, 16384, 32768], help="layouts, dims: tokens of a row"
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 192, 256], help="dims: channels of a head")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from leank.eval.cache.storage.banded import codecs
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.precision import Precision
from scripts.bench.common import DIM, DTYPE, LLAMA, MASKS, QWEN, Record, Table, clear, device_name, each_ms

SIZES = Sizes(sink=128, window=1024, flush=64)
# By share of K's dense bytes, scales counted: shares of blocks of 16 channels by their bits, and of heads by the bits
# of V; about as layouts that were learned on SmolLM2 have them.
LAYOUTS = {
    0.25: ({0: 0.05, 2: 0.08, 3: 0.45, 4: 0.35, 8: 0.07}, {3: 0.5, 4: 0.5}),
    0.40: ({4: 0.5, 8: 0.5}, {4: 0.6, 8: 0.4}),
}
BLOCK = 32  # channels of a head that a random mask keeps or prunes together
PACKINGS = {16: None, 8: Packing(8), 4: Packing(4), 2: Packing(2)}  # by bits


@dataclass(frozen=True)
class Shape:
    """A model's attention at one batch and context."""

    model: str
    mask: str  # file of the published mask, in MASKS
    q_heads: int
    kv_heads: int
    batch: int  # rows. context: tokens of each row.
    context: int
    dim: int = DIM  # channels of a head

    @property
    def name(self) -> str:
        """Model, batch and context, as they stand in the tables."""
        return f"{self.model} {self.batch} x {self.context // 1024}K"

    @property
    def bytes(self) -> int:
        """Bytes of K and V of the whole context."""
        return 2 * self.batch * self.kv_heads * self.context * self.dim * DTYPE.itemsize

    def keep(self) -> Tensor:
        """The published mask [L, H, D], True = kept."""
        return torch.load(MASKS / self.mask, map_location="cpu", weights_only=True).bool()

    def query(self) -> Tensor:
        """Random queries of one decode step, [batch, query heads, 1, head_dim]."""
        return torch.randn(self.batch, 1, self.q_heads, self.dim, device="cuda", dtype=DTYPE).transpose(1, 2)


SHAPE_LIST = [
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 8, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 32768),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 64, 4096),
    Shape("Llama-3.1-8B", LLAMA, 32, 8, 1, 131072),
    Shape("Qwen2.5-7B", QWEN, 28, 4, 8, 32768),
]


def make_store(shape: Shape, middle: Middle) -> tuple[Store, Tensor, Tensor]:
    """A compressed layer of one random row, repeated for the batch, with one decoded token in the window; K and V."""
    k, v = torch.randn(2, 1, shape.kv_heads, shape.context, shape.dim, device="cuda", dtype=DTYPE)
    store = Store(k[:, :, :-1], v[:, :, :-1], None, middle, SIZES)
    if shape.batch > 1:
        store.select(torch.zeros(shape.batch, dtype=torch.long))
    k, v = (x[:, :, -1:].expand(shape.batch, -1, -1, -1) for x in (k, v))
    store.append(k, v)
    return store, k, v


def needed_bytes(store: Store) -> int:
    """Bytes of K and V that a step must read: sink, window, and what the middle holds."""
    _, heads, _, dim = store.ring_k.shape
    ends = int((store.sizes.sink + store.seen - store.start).sum()) * heads * dim * 2
    return ends * DTYPE.itemsize + sum(store.prompt.held()) + sum(store.tail.held())


def copies_of(size: int) -> int:
    """How many copies of `size` bytes to rotate over so that none is still in L2 when its turn comes."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if size > 40 * cache else 2 + 4 * cache // size


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of one of these equal calls, the median over replays of a CUDA graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(max(1, 8 // len(calls))) for call in calls]
    return median(each_ms(graph.replay, 3 + repeats)[3:]) * 1e3 / len(kept)


def kernel_us(shape: Shape, middle: Middle, write: bool = False) -> tuple[float, int]:
    """Microseconds of the decode kernel over copies of a layer, and the bytes that it must read of each.

    write: the time includes that of writing the newest token, which is taken back before (a kernel of its own)
    """
    from leank.eval.cache.attention.launch import Kernel  # needs Triton

    kernel, stores = Kernel(), [make_store(shape, middle)]
    size = needed_bytes(stores[0][0])
    stores += [make_store(shape, middle) for _ in range(copies_of(size) - 1)]
    q, position = shape.query(), (stores[0][0].seen_dev - 1)[:, None].clone()

    def step(store: Store, k: Tensor, v: Tensor) -> None:
        if write:
            store.seen_dev.sub_(1)
            kernel.write(store, k, v)
        kernel.attend(store, q, position, shape.dim**-0.5)

    us = median_us([partial(step, *one) for one in stores])
    del stores
    clear()
    return us, size


# layers


def dense_times(shape: Shape) -> dict[str, float]:
    """Microseconds of each dense attention over the whole context."""
    copies = copies_of(shape.bytes)
    kv = torch.randn(copies, 2, shape.batch, shape.kv_heads, shape.context, shape.dim, device="cuda", dtype=DTYPE)
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
    everything = torch.ones(shape.kv_heads, shape.dim, dtype=torch.bool)
    found["own kernel, nothing pruned"] = kernel_us(shape, Middle(everything))[0]
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
    """The line time = fixed (us) + bytes / rate (GB/s) through layers, by least squares; NaN if all bytes are equal."""
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
        us, size = kernel_us(shape, Middle(keep))
        found.append({"layer": layer, "method": "LeanK", "us": us, "bytes": size})
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
    shape = replace(SHAPE_LIST[0], batch=batch)
    times, sizes = zip(*(kernel_us(shape, Middle(mask, bits=PACKINGS[bits])) for mask in masks), strict=True)
    row.update(us=np.mean(times), mb=np.mean(sizes) / 1e6, gb_per_s=sum(sizes) / sum(times) / 1e3)


# means


def means(row: Record, shape: Shape, masks: Tensor, centered: bool) -> None:
    """Fill the row of a shape: the mean over layers."""
    center = torch.randn(masks.shape[1:]) if centered else None
    row["us"] = np.mean([kernel_us(shape, Middle(mask, center=center), write=True)[0] for mask in masks])


# layouts


def random_layout(share: float, layers: int = 32, heads: int = 8, packed: bool = False) -> Precision:
    """A layout of the shares in `LAYOUTS`, drawn at random and always the same; packed: whether scales are."""
    generator, (of_blocks, of_heads) = torch.Generator().manual_seed(0), LAYOUTS[share]

    def drawn(shares: dict[int, float], number: int) -> Tensor:
        which = torch.multinomial(torch.tensor([*shares.values()]), number, True, generator=generator)
        return torch.tensor([*shares], dtype=torch.uint8)[which]

    key_bits = drawn(of_blocks, layers * heads * DIM // 16).repeat_interleave(16)
    value_bits = drawn(of_heads, layers * heads).view(layers, heads)
    return Precision(key_bits.view(layers, heads, DIM), value_bits, packed=packed)


def layout(row: Record, shape: Shape, share: float, packed: bool) -> None:
    """Fill the row of a layout, whose scales may be packed."""
    precision = random_layout(share, packed=packed)
    codec = codecs(precision)[0]
    us, size = kernel_us(shape, Middle(codec.order > 0, bits=codec))
    row.update(us=us, mb=size / 1e6, gb_per_s=size / us / 1e3, limit_us=reading_us(size), k_bytes=share)
    row["middle_bytes"] = Precision(precision.key_bits[:1], precision.value_bits[:1], packed=packed).middle_bytes


# dims


def random_keep(heads: int, dim: int, share: float = 0.3) -> Tensor:
    """A mask [heads, dim] that keeps so large a share of the blocks of 32 channels, and always the same ones."""
    blocks = torch.zeros(heads * dim // BLOCK, dtype=torch.bool)
    kept = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    blocks[kept[: round(share * len(blocks))]] = True
    return blocks.repeat_interleave(BLOCK).view(heads, dim)


def long_heads(row: Record, shape: Shape) -> None:
    """Fill the row of a random mask at one head_dim."""
    us, size = kernel_us(shape, Middle(random_keep(shape.kv_heads, shape.dim)))
    alone = reading_us(size)
    row.update(us=us, mb=size / 1e6, gb_per_s=size / us / 1e3, limit_us=alone, share_of_limit=alone / us)


def dense(row: Record, shape: Shape) -> None:
    """Fill the row of the fastest dense attention."""
    found = dense_times(shape)
    name = min(found, key=lambda one: found[one])
    row.update(us=found[name], mb=shape.bytes / 1e6, gb_per_s=shape.bytes / found[name] / 1e3, kernel=name)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parsed(argv)
    if not torch.cuda.is_available():
        raise SystemExit("these measurements need a CUDA device")
    torch.manual_seed(0)
    print(device_name(), "torch", torch.__version__)
    measure(args).check()


def measure(args: argparse.Namespace) -> Table:
    """Measure what the command line asks for."""
    if args.action == "layers":
        table = Table(args.out / "attention.csv", ("shape", "layer", "method"))
        for shape in SHAPE_LIST:
            layers(shape, table, args.step or 1)
    elif args.action == "layouts":
        table = Table(args.out / "layouts.csv", ("batch", "context", "method"))
        for context, batch in product(args.contexts, args.rows):
            shape = replace(SHAPE_LIST[0], batch=batch, context=context)
            names: Record = {"batch": batch, "context": context}
            table.add({**names, "method": "dense"}, partial(dense, shape=shape))
            for share, packed_scales in product(LAYOUTS, (False, True)):
                names["method"] = f"layout {share}{', packed' * packed_scales}"
                table.add({**names}, partial(layout, shape=shape, share=share, packed=packed_scales))
    elif args.action == "dims":
        table = Table(args.out / "dims.csv", ("head_dim", "batch", "context", "method"))
        for dim, context, batch in product(args.dims, args.contexts, args.rows):
            shape = replace(SHAPE_LIST[0], batch=batch, context=context, dim=dim)
            names = {"head_dim": dim, "batch": batch, "context": context}
            table.add({**names, "method": "dense"}, partial(dense, shape=shape))
            table.add({**names, "method": "LeanK"}, partial(long_heads, shape=shape))
    elif args.action == "means":
        table = Table(args.out / "means.csv", ("shape", "means"))
        for shape, centered in product(SHAPE_LIST, (False, True)):
            names = {"shape": shape.name, "means": centered}
            masks = shape.keep()[:: args.step or 8]
            table.add(names, partial(means, shape=shape, masks=masks, centered=centered))
    else:
        table, keep = Table(args.out / "packed.csv", ("batch", "method", "bits")), SHAPE_LIST[0].keep()
        keep = keep[:: args.step or 8]
        cases = [("dense", 16, torch.ones_like(keep[:1])), *(("LeanK", bits, keep) for bits in PACKINGS)]
        for batch in args.rows:
            for method, bits, masks in cases:
                names = {"batch": batch, "method": method, "bits": bits}
                table.add(names, partial(packed, batch=batch, bits=bits, masks=masks))
    return table


if __name__ == "__main__":
    main()
