"""What the benchmarks share: caches that compete, a decoding loop, timing, the GPU's kernels, rows of a CSV."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.cache import CompressedLayer, Sizes, bytes_per_row, compressed_cache
from eval.cache.graph import DecodeLoop
from eval.cache.hook import ATTENTION
from eval.cache.storage.channels import layer_masks
from eval.cache.storage.middle import Middle
from eval.cache.storage.quantised import Packing
from eval.cache.storage.store import GROWTH
from eval.inference.models import ModelConfig, load_model
from leank_train import backbone
from leank_train.common.escape import csv_rows
from leank_train.common.files import write_text
from leank_train.mask import ChannelMask
from scripts.bench.attention_cases import LLAMA, MASKS
from scripts.bench.shapes import llama8b

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, PROFILED = 3, 4  # steps before those that are timed, and steps under the profiler after them
ROOM = 16  # tokens that a cache has room for beside the prompt and the timed steps
# in the names of kernels
ATTENTIONS = ("decode", "flash", "fmha", "sdpa", "attention", "attend", "score_", "choose", "softmax")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")

Record = dict[str, object]  # one row of a CSV; numbers, words, and what formats as such


@dataclass(frozen=True)
class Contender:
    """A cache to decode with.

    name: as it stands in the tables.
    make: (rows, tokens of room) -> an empty cache.
    bytes: tokens -> bytes of one row.
    attention: the model's attention implementation.
    graph: whether a step can be captured as a CUDA graph.
    """

    name: str
    make: Callable[[int, int], Cache]
    bytes: Callable[[int], int]
    attention: str
    graph: bool


def contenders(
    model: PreTrainedModel, mask: ChannelMask | Tensor, sizes: Sizes, packings: Sequence[Packing] = ()
) -> list[Contender]:
    """LeanK, and three dense caches: this project's storage and kernel with nothing pruned, and transformers' two.

    packings: LeanK with a middle of fewer bits, one more contender each.

    A step on a StaticCache has an attention mask, for which transformers 5.17 copies a layer's K and V once per query
    head (5.23 does not). On 5.17 this project's dense cache is the one to compare graphs with.
    """
    config = model.config
    layers, heads, dim = backbone.kv_shape(config)
    everything = torch.ones(layers, heads, dim, dtype=torch.bool)

    def dense(tokens: int) -> int:
        return 2 * layers * heads * dim * tokens * model.dtype.itemsize

    def compressed(name: str, keep: ChannelMask | Tensor, bits: Packing | None = None) -> Contender:
        middles = [Middle(one, bits=bits) for one in layer_masks(keep)]
        return Contender(
            name,
            lambda rows, room: compressed_cache(model, middles, sizes.sink, sizes.window, sizes.flush),
            lambda n: bytes_per_row(keep, n + GROWTH, model.dtype, sizes, bits),  # decoding adds ahead of need
            ATTENTION,
            True,
        )

    return [
        compressed("LeanK", mask),
        *(compressed(f"LeanK, {packing.bits} bits", mask, packing) for packing in packings),
        compressed("own cache, nothing pruned", everything),
        Contender("StaticCache", lambda rows, room: StaticCache(config, max_cache_len=room), dense, "sdpa", True),
        Contender("DynamicCache", lambda rows, room: DynamicCache(config=config), dense, "sdpa", False),
    ]


def fill(model: PreTrainedModel, cache: Cache, rows: int, tokens: int) -> None:
    """Put random keys and values of `tokens` tokens into every layer, the same in each row."""
    _, heads, dim = backbone.kv_shape(model.config)
    for index, layer in enumerate(cache.layers):
        k, v = torch.randn(2, 1, heads, tokens, dim, device=model.device, dtype=model.dtype)
        k, v = (x.expand(rows, -1, -1, -1) for x in (k, v))
        if isinstance(layer, CompressedLayer):
            layer.seal(k, v)
        else:
            cache.update(k, v, index)


class Decoding:
    """Greedy steps on a filled cache, in the replay's own loop.

    position: [rows, 1], of the next token of each row.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, position: Tensor) -> None:
        self.loop, self.token = DecodeLoop(model, cache, position), torch.ones_like(position)

    def step(self) -> None:
        """Decode one token per row."""
        self.token.copy_(self.loop.step(self.token).argmax(-1, keepdim=True))

    def graphed(self) -> Callable[[], None]:
        """Capture the step as a CUDA graph and return it."""
        for _ in range(WARM_UP):
            self.step()
        self.loop.capture()
        return self.step


def wait() -> None:
    """Wait until the GPU has done its work, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear() -> None:
    """Free what no name holds any more, on the host and on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name() -> str:
    """The GPU's name, or CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def seconds(step: Callable[[], None], steps: int, cuda: bool) -> float:
    """Seconds of one step, over `steps` of them."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def each_ms(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps as the GPU sees them, from the end of the one before."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(ends)]


@dataclass(frozen=True)
class Launches:
    """A kernel (or copy) by name: launches and milliseconds on the GPU of one step."""

    name: str
    count: float
    ms: float

    @property
    def kind(self) -> str:
        """The column that its time belongs to: attention_ms, products_ms or other_ms."""
        name = self.name.lower()
        if any(part in name for part in ATTENTIONS):
            return "attention_ms"
        return "products_ms" if any(part in name for part in PRODUCTS) else "other_ms"


def profiled(step: Callable[[], None], steps: int = PROFILED) -> list[Launches]:
    """What one step runs on the GPU, the longest first.

    The sum of kernels is the figure to compare across the cases of one process: from the fourth to sixth captured step
    of a process on, a step takes 0.4 us more per kernel by the clock, for a reason that is not known.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    launches = [
        Launches(event.key, event.count / steps, event.self_device_time_total / 1e3 / steps)
        for event in found.key_averages()
        if event.device_type != DeviceType.CPU
    ]
    return sorted(launches, key=lambda launch: -launch.ms)


def where(found: Iterable[Launches]) -> dict[str, float]:
    """Milliseconds of one step on the GPU, in all and by kind of kernel, and how many kernels it launches.

    Attention in plain PyTorch has no kernel of its own: it is among the products and the others.
    """
    total = {"gpu_ms": 0.0, "attention_ms": 0.0, "products_ms": 0.0, "other_ms": 0.0, "kernels": 0.0}
    for launches in found:
        total[launches.kind] += launches.ms
        total["gpu_ms"] += launches.ms
        total["kernels"] += launches.count
    return total


def subject(shape: str) -> tuple[PreTrainedModel, Path, Sizes]:
    """The model, LeanK's mask and the sizes of the cache.

    shape: "llama8b", random weights on a GPU, or "reference", the shipped model.
    Raises SystemExit for llama8b without a GPU.
    """
    if shape == "reference":
        return load_model(ModelConfig()), ROOT / "leank_train/assets/reference/mask_70pct.safetensors", Sizes(16, 144)
    if not torch.cuda.is_available():
        raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    return llama8b("cuda"), MASKS / LLAMA, Sizes()


def attempt(row: Record, work: Callable[[Record], None]) -> Record:
    """The row that `work` fills. A failure is printed and noted in the row, and costs the other rows nothing."""
    try:
        work(row)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def said(row: Mapping[str, object], digits: int = 3) -> str:
    """A row as one line: names and values, fractions with so many digits."""
    return "  ".join(f"{k} {v:.{digits}f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows as CSV, with the columns that any of them has."""
    write_text(path, csv_rows(rows))


def complain(rows: Iterable[Record], name: str) -> None:
    """Raise SystemExit with the `name` of rows that failed, if any did."""
    failed = [str(row[name]) for row in rows if row.get("error")]
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")
