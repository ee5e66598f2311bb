"""First token, time a token and bytes held of every method, at several lengths and batches, in one run.

    python -m scripts.bench.methods OUT --lengths 4096 32768 131072 --batches 1 largest     # 8B shape, one GPU
    python -m scripts.bench.methods OUT --lengths 4096 --new 128 --batches 64 --methods dense leank    # LeanK's table 8
    KIVI="--window 128 --methods dense papers/kivi4 papers/kivi4_think papers/kivi4_iap"
    python -m scripts.bench.methods OUT $KIVI --lengths 160 --new 338 --batches 300    # ThinK's tables 10, 11
    python -m scripts.bench.methods OUT $KIVI --lengths 4097 --new 128 --batches 15    # IAP's table 6
    python -m scripts.bench.methods OUT --lengths 131072 --methods dense snapkv fastkv gemfilter pyramid_infer asl \
        --set '+method.asl.each={prefill:{layer:[7,15,23]}}'    # ASL's tables 4 and 10
    python -m scripts.bench.methods OUT --lengths 256 --new 20480 --batches 32 --methods dense lethe \
        --set +method.lethe.tokens.limit=1024    # Lethe's tables 2 and 3
    python -m scripts.bench.methods OUT --shape reference --lengths 600 --new 4      # a CPU, to look at it

Every method of conf/method, with the settings of --set, builds its cache from a pass over one random prompt and decodes
forced tokens. Methods without a pass of their own share one, and all batches of a length do. A batch repeats the
prompt's cache in all its rows. "largest" is the most rows that fit: it begins at what the bytes at the end of all steps
allow, and takes a twentieth less wherever that does not fit.

Prints and keeps OUT/methods.csv, with one row per method, length and batch, in which a run that was killed goes on. A
method that fails costs its row alone:

    rows, batch   what was asked for (1, 64, largest), and how many rows that was
    ttft_s        of one prompt: prefill_s (to the first token's logits, the least of `passes`) + cache_s (choosing and
                  storing)
    gb            held after the prompt, of which formula_gb by the method's formula (empty where data decide), the rest
                  being tables and spare room; peak_gb: the allocator's peak while decoding, weights included
    read_gb       K, V, bounds and labels that attention reads in a step; a query head reads what it chose by itself
    token_ms      of a decoding step, by `loop`: a captured CUDA graph, or Python. A graph is timed over whole periods
                  in which tokens leave the window, after one that compiles what moves them
    median_ms     of the same steps as the GPU sees them; worst_ms: the longest of them
    tokens_per_s  of all rows
    gpu_ms        of a step in kernels alone, of which attention_ms, products_ms, other_ms; kernels: launches per step.
                  Attention in plain PyTorch counts among products and others. It is what to compare: after three
                  rows of a process, later ones take 0.4 us more per kernel by the clock. --no-profile leaves these
                  columns out
    layer         above which a pass dropped tokens, where it looks for the layer itself; -1 = it found none

The longest kernels of each are in OUT/kernels.csv. "dense" decodes in this project's own storage with nothing pruned,
so that a graph can be captured; it costs no cache_s, because a dense cache goes on in the buffer of its pass.

Weights are random, so attention is nearly uniform. Where shapes alone decide the cost, that does not matter: all
choices of channels and bits, fixed budgets of tokens, pages that are read. It does where the cost follows the data. ASL
looks for the layer at which ranks settle, and Lethe decides from the scores how many tokens stay and when they leave:
their rows say what random weights cost. DuoAttention's and LeanK's heads are those of their files. PyramidInfer's
counts are shares of the length, whatever the data. Calibration looks at few samples, because speed does not depend on
which channels it chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from scripts.bench import SHAPES


def batch(text: str) -> int | str:
    """A number of rows, or "largest"."""
    return text if text == "largest" else int(text)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="prompt tokens")
    parser.add_argument("--batches", type=batch, nargs="+", default=[1], help="rows, or the word largest")
    parser.add_argument("--new", type=int, default=32, help="tokens that are timed; 32 = one flush of the window")
    parser.add_argument("--window", type=int, help="tokens at the end that stay whole, in methods that name no window")
    parser.add_argument("--methods", nargs="+", help="of conf/method; papers/NAME for a preset; default: all")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the methods, as in eval")
    parser.add_argument("--fuse", action="store_true", help="norms and MLPs through torch.compile")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True,
                        help="look where a step's time goes")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.conf.eval import method_options
from leank.eval.cache import CompressedCache, Sizes
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods import Method
from leank.eval.methods.memory import method_bytes
from leank.eval.run.build import build_methods
from leank.eval.run.replay import Replay, Settings
from scripts.bench.common import (
    PROFILED,
    ROOM,
    WARM_UP,
    WORK_SPACE,
    Decoding,
    Record,
    Table,
    by_kind,
    bytes_read,
    clear,
    each_ms,
    now,
    out_of_memory,
    profiled,
    seconds,
    subject,
)

KEYS = ("method", "length", "rows")
LEFT_OUT = {"by_length"}  # two masks, of which each prompt uses one: it costs what leank does
SAMPLES, LONGEST = 4, 8  # most samples to calibrate on; kernels of each method that are written
WARM = 4096  # tokens of the pass that compiles what passes of its kind run
LONG = 6.0  # seconds of a pass that is not run twice
EAGER = 8  # most steps that are timed without a graph
ATTEMPTS, LESS = 10, 0.95  # at the largest batch
LOGITS = 4  # copies of a row's logits while decoding: of the steps before a graph, of the graph, and of their tokens


def every_method() -> list[str]:
    """The methods of conf/method, dense first."""
    return ["dense", *sorted({*method_options()} - LEFT_OUT - {"dense"})]


def configured(
    names: Sequence[str], shape: str, mask: Path, sizes: Sizes, config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase, overrides: Sequence[str] = (),
) -> list[Method]:  # fmt: skip
    """The methods of conf/method, with settings for the reference model where it has some, and overrides of eval.

    A preset there is one method, or several where its settings are varied.
    """
    small = method_options("method/reference") if shape == "reference" else ()
    chosen = ",".join(f"reference/{name}" if name in small else name for name in names)
    with initialize_config_module("leank.conf.eval", version_base="1.3"):
        given = compose("eval", [f"method=[{chosen}]", *overrides])
    given.mask = str(mask)
    given.cache = {"sink": sizes.sink, "window": sizes.window, "flush": sizes.flush}
    found: object = OmegaConf.to_container(given, resolve=True)
    assert isinstance(found, dict)
    for choices in found["method"].values():
        for choice in choices.values():
            if isinstance(choice, dict) and "samples" in choice:
                choice["samples"] = min(SAMPLES, choice["samples"])
    return build_methods(found, config, tokenizer)


class Bench:
    """Measures methods on one model, `new` tokens each, and if `profile` says so, where the time goes."""

    def __init__(self, replay: Replay, new: int, profile: bool = True) -> None:
        self.replay, self.model, self.new, self.profile = replay, replay.model, new, profile
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
    def prefill(self, method: Method, length: int, obs_queries: int = 0, timed: bool = True) -> tuple[Prefill, float]:
        """The method's pass over a prompt, and its seconds; if it is timed, a shorter one runs before the first."""
        short = min(length, WARM)
        if timed and (kind := (*kind_of(method), short)) not in self.warm:
            method.run_prefill(self.model, self.prompt(short), None, 0, None, obs_queries)
            self.warm.add(kind)
        start = now()
        found = method.run_prefill(self.model, self.prompt(length), None, self.new + ROOM, None, obs_queries)
        return found, now() - start

    @torch.no_grad()
    def cache(self, method: Method, prompt: Prefill) -> tuple[CompressedCache, float]:
        """A method's cache in this project's storage, and the seconds in which it makes its own, the second time."""
        method.cache(self.model, prompt)
        clear()
        start = now()
        cache = method.cache(self.model, prompt)
        spent = now() - start
        return cache if isinstance(cache, CompressedCache) else method.compressed(self.model, prompt), spent

    @torch.no_grad()
    def decode_one(self, row: Record, method: Method, prompt: Prefill, cache: CompressedCache) -> None:
        """Fill in what decoding one row costs."""
        self._held(row, method, cache, 1)
        self._steps(row, cache, prompt.lengths[:, None])

    @torch.no_grad()
    def decode(
        self, row: Record, method: Method, prompt: Prefill, aside: Aside, rows: int | str, last: bool = False
    ) -> None:
        """Fill in what decoding costs in `rows` rows, or as many as fit; the pass makes place for them."""
        cache, position = method.compressed(self.model, prompt), prompt.lengths[:, None]
        try:
            aside.leave(for_good=last)
            clear()
            self._several(row, method, cache, position, rows)
        finally:
            del cache
            clear()
            aside.come_back()

    def _several(self, row: Record, method: Method, cache: CompressedCache, position: Tensor, rows: int | str) -> None:
        """Decode in several rows, in fewer where "largest" does not fit."""
        largest = isinstance(rows, str)
        batch = most_rows(self._row_bytes(cache)) if isinstance(rows, str) else rows
        for left in reversed(range(ATTEMPTS if largest else 1)):
            several = None
            try:
                several = cache.repeat(batch)
                self._held(row, method, several, batch)
                self._steps(row, several, position.expand(batch, 1))
                return
            except RuntimeError as error:
                if not left or not out_of_memory(error):
                    raise
                print(f"    no room for {batch} rows", flush=True)
                batch = max(1, int(batch * LESS))
            del several  # a step that ran out of memory has gone through some of its layers
            clear()

    def _row_bytes(self, cache: CompressedCache) -> int:
        """Bytes that a row takes in all steps: what it holds at their end, one layer twice, as it grows, and logits."""
        period, steps = self._timed(cache)
        held, config = grown(cache, 2 * WARM_UP + period + steps + PROFILED), self.model.config
        clear()
        return held + held // config.num_hidden_layers + LOGITS * config.vocab_size * self.model.dtype.itemsize

    def _timed(self, cache: CompressedCache) -> tuple[int, int]:
        """Steps from one flush of the window to the next, and steps that are timed: whole periods of these."""
        period = next((layer.sizes.flush for layer in cache.compressed), 1)
        return period, -(-self.new // period) * period

    def _held(self, row: Record, method: Method, cache: CompressedCache, batch: int) -> None:
        """Fill in the bytes that are held, by measure and by formula, and those that a step reads."""
        config, length = self.model.config, int(str(row["length"]))
        stores = [layer.store for layer in cache.compressed if layer.store is not None]
        group = config.num_attention_heads // config.num_key_value_heads
        formula = method_bytes(method, config, length, self.model.dtype.itemsize)
        row["gb"] = cache.memory().total / 1e9
        row["formula_gb"] = "" if formula is None else batch * formula / 1e9
        row["read_gb"] = sum(bytes_read(store, group) for store in stores) / 1e9

    def _steps(self, row: Record, cache: CompressedCache, position: Tensor) -> None:
        """Time whole periods of the flush, captured where they can be; then look where the time goes.

        One period runs before them: the first tokens that leave the window compile what moves them.
        """
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        decoding = Decoding(self.model, cache, position)
        for _ in range(WARM_UP):
            decoding.step()
        graph = self.cuda and cache.capturable
        step = decoding.graphed() if graph else decoding.step
        period, steps = self._timed(cache)
        for _ in range(period if graph else 0):
            step()
        steps = steps if graph else min(EAGER, self.new)
        if self.cuda:
            begin = now()
            each = each_ms(step, steps)
            spent = (now() - begin) / steps
            row.update(median_ms=median(each), worst_ms=max(each))
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        else:
            spent = seconds(step, steps)
        row.update(batch=len(position), token_ms=spent * 1e3, tokens_per_s=len(position) / spent)
        row.update(loop="graph" if graph else "eager")
        if self.cuda and self.profile:
            found = profiled(step)
            row.update(by_kind(found))
            names = {name: row[name] for name in KEYS}
            self.launches += [{**names, **asdict(launches)} for launches in found[:LONGEST]]


def kind_of(method: Method) -> tuple[object, bool]:
    """Methods of one kind can share a pass."""
    return method.prefill, method.column_sums


class Aside:
    """K and V of a pass, which give their place on the GPU to a batch and come back; `goes`: by default, above 1 GB.

    The copy on the host is made once: decoding changes nothing of a pass.
    """

    def __init__(self, prompt: Prefill, goes: bool | None = None) -> None:
        goes = torch.cuda.is_available() and sum(prompt.bytes()) > 1e9 if goes is None else goes
        self.layers = [layer for layer in prompt.layers if goes and isinstance(layer, PromptLayer)]
        self.device = prompt.logits.device
        self.copies: list[tuple[Tensor, Tensor]] = []

    def leave(self, for_good: bool = False) -> None:
        """Go to the host, or be forgotten: nothing can be made of the pass any more."""
        if for_good:
            self.copies = [(layer.keys[:0].clone(), layer.values[:0].clone()) for layer in self.layers]
        if not self.copies:
            self.copies = [(on_host(layer.keys), on_host(layer.values)) for layer in self.layers]
        for layer, (k, v) in zip(self.layers, self.copies, strict=True):
            layer.take(k, v)

    def come_back(self) -> None:
        """Come back to the GPU; nothing happens where they did not leave."""
        for layer, (k, v) in zip(self.layers, self.copies, strict=False):
            layer.take(k.to(self.device, non_blocking=True), v.to(self.device, non_blocking=True))


@torch.no_grad()
def grown(cache: CompressedCache, tokens: int) -> int:
    """Bytes that a cache will hold after `tokens` more, without tables that it then makes.

    A copy takes in zeros, which receive no attention, as many at a time as leave the window together.
    """
    longer = cache.repeat(1)
    for layer in longer.compressed:
        if (store := layer.store) is None:
            continue
        batch, heads, _, dim = store.ring_k.shape
        for first in range(0, tokens, layer.sizes.flush):
            k, v = store.ring_k.new_zeros(2, batch, heads, min(layer.sizes.flush, tokens - first), dim)
            store.append(k, v)
            if store.eviction is not None:
                held = store.held()
                store.eviction.add(store.seen_dev.new_zeros(held.size, int(held.max())), held)
            store.flush()
    return longer.memory().total


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory that its GPU, if there is one, reads fast."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def most_rows(size: int) -> int:
    """Rows of `size` bytes that fit beside what is there, at least 2."""
    if not torch.cuda.is_available():
        return 2
    free = torch.cuda.mem_get_info()[0]
    return max(2, int((free - WORK_SPACE) / size) + 1)


def passed_over(bench: Bench, methods: Sequence[Method], length: int, timed: bool) -> tuple[Prefill, float, int]:
    """A pass that these methods share, the least seconds of it, if `timed`, and how many were run.

    The first of a length takes about a second more than the others: it meets shapes that nothing was prepared for.
    """
    queries = max(method.obs_queries for method in methods)
    prompt, first = bench.prefill(methods[0], length, queries, timed)
    if first > LONG or not timed:
        return prompt, first, 1
    del prompt
    clear()
    prompt, second = bench.prefill(methods[0], length, queries)
    return prompt, min(first, second), 2


def measure(
    bench: Bench, table: Table, kernels: Table, methods: Sequence[Method], length: int, batches: Sequence[int | str]
) -> None:
    """The rows of methods that share a pass, at one length: every batch of all methods before the next batch."""
    left = [(method, asked) for asked in batches for method in methods
            if not table.has({"method": method.label, "length": length, "rows": asked})]  # fmt: skip
    if not left:
        return
    sharing, aside, failure = list({method.label: method for method, _ in left}.values()), None, None
    try:
        prompt, spent, passes = passed_over(bench, sharing, length, any(asked == 1 for _, asked in left))
        aside = Aside(prompt)
    except RuntimeError as error:  # it costs the methods that share the pass
        failure = error

    def work(row: Record, method: Method, rows: int | str, last: bool) -> None:
        if aside is None:
            raise failure or RuntimeError("no pass")
        if prompt.selected_at:
            row["layer"] = prompt.selected_at[0]
        if rows == 1:
            cache, cache_s = bench.cache(method, prompt)
            row.update(prefill_s=spent, passes=passes, cache_s=cache_s, ttft_s=spent + cache_s)
            bench.decode_one(row, method, prompt, cache)
        else:
            bench.decode(row, method, prompt, aside, rows, last)

    for number, (method, asked) in enumerate(left, 1):
        row: Record = {"method": method.label, "length": length, "rows": asked}
        table.add(row, partial(work, method=method, rows=asked, last=number == len(left)))
        for launches in bench.launches:
            kernels.add(launches)
        bench.launches = []


def kinds(methods: Sequence[Method]) -> Iterator[list[Method]]:
    """Methods that can share a pass, in the order of the first of each kind."""
    found: dict[tuple[object, bool], list[Method]] = {}
    for method in methods:
        found.setdefault(kind_of(method), []).append(method)
    yield from found.values()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parsed(argv)
    model, mask, sizes = subject(args.shape)
    for module in model.modules():
        if args.fuse and type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile()
    sizes = sizes if args.window is None else replace(sizes, window=args.window)
    tokenizer = load_config(ModelConfig())[1]  # of the shipped model: calibration's ids are in any vocabulary
    bench = Bench(Replay(model, tokenizer, Settings()), args.new, args.profile)
    table, kernels = Table(args.out / "methods.csv", KEYS), Table(args.out / "kernels.csv", (*KEYS, "name"))
    names = args.methods or every_method()
    ready = configured(names, args.shape, mask, sizes, model.config, tokenizer, args.set)
    bench.replay.calibrate(ready)
    for length in args.lengths:
        for methods in kinds(ready):
            measure(bench, table, kernels, methods, length, args.batches)
            clear()
    table.check()


if __name__ == "__main__":
    main()
