"""One method on one model: its pass over a prompt, its cache, and decoding in one row or several."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from eval.cache import CompressedCache, Sizes
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods import Method
from eval.run.build import build_methods
from eval.run.replay import Replay
from scripts.bench.common import ROOM, WARM_UP, Decoding, Record, clear, profiled, seconds, wait, where
from scripts.bench.generation import WORK_SPACE
from scripts.bench.table import out_of_memory

FOLDER = files("conf.eval") / "method"
NAMES = ("method", "length", "rows")
SAMPLES, LONGEST = 4, 8  # most samples to calibrate on; kernels of each method that are written
WARM = 4096  # tokens of the pass that compiles what passes of its kind run
EAGER = 8  # most steps that are timed without a graph
ATTEMPTS, LESS = 6, 0.9  # at the largest batch


def configured(
    name: str, shape: str, mask: Path, sizes: Sizes, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Method]:
    """The methods `name` of conf/eval/method, with the settings for the reference model where it has some.

    A file there is one method, or several where its settings are varied.
    """
    small = shape == "reference" and (FOLDER / "reference" / f"{name}.yaml").is_file()
    with initialize_config_module("conf.eval", version_base="1.3"):
        given = compose("eval", [f"method=[{'reference/' if small else ''}{name}]"])
    given.mask, given.cache = str(mask), asdict(sizes)
    found: object = OmegaConf.to_container(given, resolve=True)
    assert isinstance(found, dict)
    for choices in found["method"].values():
        for choice in choices.values():
            if isinstance(choice, dict) and "samples" in choice:
                choice["samples"] = min(SAMPLES, choice["samples"])
    return build_methods(found, config, tokenizer)


def now() -> float:
    """The clock in seconds, once the GPU has done its work."""
    wait()
    return time.perf_counter()


def repeated(cache: CompressedCache, rows: int) -> None:
    """Make the cache one of `rows` rows, each as the first is."""
    for layer in cache.compressed:
        layer.keys = layer.values = None  # of a step that ran out of memory between append and attention
        layer.batch_select_indices(torch.zeros(rows, dtype=torch.long))


def why_eager(cache: CompressedCache) -> str:
    """Why no decoding step over the cache can be captured; empty where one can."""
    if cache.capturable:
        return ""
    if not torch.cuda.is_available():
        return "no GPU"
    reasons = (layer.store.middle.why_not_kernel for layer in cache.compressed if layer.store is not None)
    return next(filter(None, reasons), "a row is no longer than the sink")


class Bench:
    """Measures methods on one model.

    new: tokens that are timed.
    """

    def __init__(self, replay: Replay, new: int) -> None:
        self.replay, self.model, self.new = replay, replay.model, new
        self.device = self.model.device
        self.cuda = self.device.type == "cuda"
        self.warm: set[tuple[object, bool, int]] = set()  # kinds of passes that have run before, and their lengths
        self.launches: list[Record] = []

    def prompt(self, length: int) -> Tensor:
        """A random prompt [1, length], always the same."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(10, self.model.config.vocab_size, (1, length), generator=generator)
        return ids.to(self.device)

    @torch.no_grad()
    def prefill(self, method: Method, length: int, obs_queries: int = 0) -> tuple[Prefill, float]:
        """The method's pass over a prompt, and its seconds; a shorter one runs before the first of its kind."""
        short = min(length, WARM)
        if (kind := (*kind_of(method), short)) not in self.warm:
            method.run_prefill(self.model, self.prompt(short), None, 0, None, obs_queries)
            self.warm.add(kind)
        start = now()
        found = method.run_prefill(self.model, self.prompt(length), None, self.new + ROOM, None, obs_queries)
        return found, now() - start

    @torch.no_grad()
    def cache_s(self, method: Method, prompt: Prefill) -> float:
        """Seconds in which a method makes its cache, the second time."""
        method.cache(self.model, prompt)
        clear()
        start = now()
        method.cache(self.model, prompt)
        return now() - start

    @torch.no_grad()
    def decode(self, row: Record, method: Method, prompt: Prefill, rows: int | str) -> None:
        """Fill in what decoding costs in `rows` rows, or in as many as fit."""
        cache, position = method.compressed(self.model, prompt), prompt.lengths[:, None]
        held = cache.memory().total
        if rows == 1:
            row["gb"] = held / 1e9
            self._steps(row, cache, position)
            return
        away = self.cuda and sum(prompt.bytes()) > 1e9  # the prompt makes place for the rows
        try:
            move(prompt, "cpu" if away else self.device)
            clear()
            self._several(row, cache, position, rows, held)
        finally:
            del cache
            clear()
            move(prompt, self.device)

    def _several(self, row: Record, cache: CompressedCache, position: Tensor, rows: int | str, held: int) -> None:
        """Decode in several rows, in fewer where "largest" does not fit."""
        largest = isinstance(rows, str)
        batch = most_rows(held) if isinstance(rows, str) else rows
        for left in reversed(range(ATTEMPTS if largest else 1)):
            try:
                repeated(cache, batch)
                row["gb"] = cache.memory().total / 1e9
                self._steps(row, cache, position.expand(batch, 1))
                return
            except RuntimeError as error:
                if not left or not out_of_memory(error):
                    raise
                print(f"    {batch} rows do not fit", flush=True)
                batch = max(1, int(batch * LESS))
            repeated(cache, 1)
            clear()

    def _steps(self, row: Record, cache: CompressedCache, position: Tensor) -> None:
        """Time steps, captured where they can be; then look where their time goes."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        decoding = Decoding(self.model, cache, position)
        for _ in range(WARM_UP):
            decoding.step()
        graph = self.cuda and cache.capturable
        step = decoding.graphed() if graph else decoding.step
        spent = seconds(step, self.new if graph else min(EAGER, self.new), self.cuda)
        row.update(batch=len(position), token_ms=spent * 1e3, tokens_per_s=len(position) / spent)
        row.update(loop="graph" if graph else "eager", why_eager=why_eager(cache))
        if self.cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            found = profiled(step)
            row.update(where(found))
            names = {name: row[name] for name in NAMES}
            self.launches += [{**names, **asdict(launches)} for launches in found[:LONGEST]]


def kind_of(method: Method) -> tuple[object, bool]:
    """Methods of one kind can share a pass."""
    return method.prefill, method.column_sums


def move(prompt: Prefill, device: torch.device | str) -> None:
    """Move the K and V of a pass."""
    for layer in prompt.layers:
        if isinstance(layer, PromptLayer):
            layer.to(device)


def most_rows(size: int) -> int:
    """Rows of `size` bytes that fit beside what is there, at least 2."""
    if not torch.cuda.is_available():
        return 2
    free = torch.cuda.mem_get_info()[0]
    return max(2, int((free - WORK_SPACE) / size) + 1)
