"""What the measurements share: shapes, caches that compete, timing on the clock and on the GPU, and tables."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leank.eval.cache import Sizes
from leank.eval.cache.graph import DecodeLoop
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.codecs import PageSegment
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import Store
from leank.files import write_text

ROOT = Path(__file__).resolve().parents[2]
MASKS = ROOT / "models/masks/published"
LLAMA, QWEN = "llama3.1-8b-instruct.pth", "qwen2.5-7b-instruct.pth"
DIM, DTYPE = 128, torch.bfloat16  # of a head of either model, and of its cache
ROOM = 16  # tokens that a cache has room for beside the prompt and the timed steps
WORK_SPACE = 4e9  # bytes left beside the caches where they fill the GPU: activations, tables, a part that is growing
WARM_UP, PROFILED = 3, 4  # steps before those that are timed, and steps under the profiler after them
# Without it, CUPTI stays in the process after the first profile, and a launch of 1,432 captured kernels takes the host
# 0.4 to 0.5 ms instead of 0.01 to 0.05: docs/lab/generation.md#profiled-processes.
TEARDOWN = "TEARDOWN_CUPTI"
# in the names of kernels
ATTENTIONS = ("decode", "flash", "fmha", "sdpa", "attention", "attend", "score_", "choose", "softmax")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")
Record = dict[str, object]  # one row of a CSV; numbers, words, and what formats as such


# shapes


def llama8b(device: torch.device | str, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """A frozen decoder of Llama-3.1-8B's shape with random weights: time and memory do not depend on them."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072 + 1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval().requires_grad_(False)


def subject(shape: str) -> tuple[PreTrainedModel, Path, Sizes]:
    """The model ("llama8b": random weights on a GPU; or "reference"), LeanK's mask and the sizes of the cache."""
    if shape == "reference":
        from leank.eval.inference.models import ModelConfig, load_model

        return load_model(ModelConfig()), ROOT / "models/reference/mask_70pct.safetensors", Sizes(16, 144)
    if not torch.cuda.is_available():
        raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    return llama8b("cuda"), MASKS / LLAMA, Sizes()


# caches


class Decoding:
    """Greedy steps on a filled cache, in the replay's own loop; position: [rows, 1], of the next token of each row."""

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


def bytes_read(store: Store, group: int) -> int:
    """Bytes of K, V, bounds and labels that attention over one layer reads in a step; group: query heads a KV head.

    Where a method chooses, each query head reads what it has chosen, once more what another head has chosen, too.
    """
    held = measure_store(store)
    ends = held.sink + held.window
    ranking = getattr(store.reads, "ranking", None)
    if ranking is None:
        return ends + held.middle_k + held.middle_v
    count, (k, v) = store.prompt.channels.count, _of_token(store)
    middle = store.prompt.length + store.tail.length
    chosen = np.minimum(middle, ranking.most * ranking.page) * group
    if ranking.bounds is None:
        ranked = middle * k * _labels_of(store) / np.maximum(count, 1)
    else:  # in the model's precision, however the keys are stored
        ranked = -(-middle // ranking.page) * 2 * count * store.ring_k.element_size()
    return ends + round((chosen * (k + v) + ranked).sum())


def _labels_of(store: Store) -> np.ndarray:
    """Kept channels of each head that are labels [B, H], wherever they are stored; without labels every one is."""
    kept, labels = store.channels, getattr(store.reads, "labels", None)
    if labels is None:
        return kept.count
    of_kept = labels.to(kept.index.device).expand(kept.index.shape).gather(-1, kept.index.long()).cpu().numpy()
    return (of_kept & (np.arange(of_kept.shape[-1]) < kept.count[..., None])).sum(-1)


def _of_token(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of K and of V of one token of each head's middle [B, H]; of packed numbers scales and zero points, too."""
    part, size = store.prompt, store.ring_k.element_size()
    if isinstance(part, PageSegment):
        k, v = part.page_bytes()
        return k / PAGE, v / PAGE
    of_values = np.full(part.length.shape, part.head_dim) if part.values is None else part.values.count
    return part.channels.count * size, of_values * size


# timing


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


def now() -> float:
    """The clock in seconds, once the GPU has done its work."""
    wait()
    return time.perf_counter()


def seconds(step: Callable[[], object], steps: int) -> float:
    """Seconds of one step, over `steps` of them."""
    begin = now()
    for _ in range(steps):
        step()
    return (now() - begin) / steps


def each_ms(step: Callable[[], object], steps: int) -> list[float]:
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


def profiled(step: Callable[[], object], steps: int = PROFILED) -> list[Launches]:
    """What one step runs on the GPU, the longest first.

    The sum of kernels is the figure to compare across the cases of one process: from about the fourth on, a step takes
    0.4 us more per kernel by the clock, for a reason that is not known (docs/lab/generation.md#later-graphs).

    Afterwards the profiler is taken down, so that later launches take what they took before. TEARDOWN_CUPTI=0 in the
    environment leaves it there.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault(TEARDOWN, "1")  # Kineto reads it when a session starts and when it ends
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    for _ in range(5):  # to be taken down, the profiler needs time, for its own thread, and then a call of CUDA
        time.sleep(0.02)
        torch.cuda.synchronize()
    launches = [
        Launches(event.key, event.count / steps, event.self_device_time_total / 1e3 / steps)
        for event in found.key_averages()
        if event.device_type != DeviceType.CPU
    ]
    return sorted(launches, key=lambda launch: -launch.ms)


def by_kind(found: Iterable[Launches]) -> dict[str, float]:
    """Milliseconds of one step on the GPU, in all and by kind of kernel, and how many kernels it launches.

    Attention in plain PyTorch has no kernel of its own: it is among the products and the others.
    """
    total = {"gpu_ms": 0.0, "attention_ms": 0.0, "products_ms": 0.0, "other_ms": 0.0, "kernels": 0.0}
    for launches in found:
        total[launches.kind] += launches.ms
        total["gpu_ms"] += launches.ms
        total["kernels"] += launches.count
    return total


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch, a graph and Triton have a class of their own for it."""
    return "out of memory" in f"{error} {error.__context__}".lower()


# tables


class Table:
    """The rows of a CSV, which is written anew after each of them; columns `keys` tell them apart.

    A failure is printed and noted in the row's `error`, and costs the other rows nothing. Rows of an earlier run in the
    same folder stay, so that a run that was killed goes on; those that failed are measured again.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self.path, self.keys, self.rows = path, keys, list[Record]()
        if path.is_file():
            earlier = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
            self.rows = [{str(k): v for k, v in row.items()} for row in earlier if not row.get("error")]

    def has(self, row: Record) -> bool:
        """Whether the row of these keys is there."""
        wanted = [str(row.get(key, "")) for key in self.keys]
        return any([str(one.get(key, "")) for key in self.keys] == wanted for one in self.rows)

    def add(self, row: Record, work: Callable[[Record], object] | None = None) -> None:
        """Let `work` fill the row, unless it is there already, and write it; without `work` it is full."""
        if self.has(row):
            return
        try:
            if work is not None:
                work(row)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        self.rows.append(row)
        shown = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v not in (None, ""))
        print("  ".join(shown), flush=True)
        write_text(self.path, pd.DataFrame(self.rows, dtype=object).to_csv(index=False))
        clear()

    def check(self) -> None:
        """Raise SystemExit with the keys of rows that failed, if any did."""
        failed = [" ".join(str(row.get(key, "")) for key in self.keys) for row in self.rows if row.get("error")]
        if failed:
            raise SystemExit(f"failed: {'; '.join(failed)}")
