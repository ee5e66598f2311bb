"""What the pass over a prompt costs, on one GPU.

    python -m scripts.bench.prefill first_token OUT --lengths 4096 8192 16384 32768 65536 131072   # 8B shape, one GPU
    python -m scripts.bench.prefill first_token OUT --shape reference --lengths 600 --layers 3 5 --budget 256    # a CPU
    python -m scripts.bench.prefill replay OUT --lengths 32768          # one replay of six methods against six runs

first_token: seconds of methods that drop tokens on the way up, as a share of dense (ASL's tables 4 and 10, Appendix B).
ASL selects at the layers --layers, whatever the ranks, in one pass and in two. FastKV, GemFilter, PyramidInfer and
SnapKV, which reads the whole prompt, stand beside it, and ASL where it looks for the layer itself. Prints and keeps
OUT/first_token.csv, in which a run that was killed goes on:

    layer         above which tokens were dropped, -1 = nowhere; depth = (layer + 1) / L, the share of whole layers
    ttft_s        the pass over one random prompt, to the first token's logits, and the cache that is built from it: the
                  least of up to --repeats runs, of which the one that makes 2 s full is the last. A run before them,
                  which compiles, does not count
    share         ttft_s / dense's
    expected      ASL's Appendix B: in one pass depth + (1 - depth) T(k) / T(n), in two depth + T(k) / T(n), where T is
                  dense's own time, n the prompt and k what goes on up

Weights are random, so the layer that ASL finds by itself says nothing about a trained model; at a layer that is given,
the cost depends on shapes alone. A layer that is given leaves out the comparison of ranks in the layers below it.

replay: seconds of one replay of several methods against as many separate runs of prefill, cache and decode. A separate
run is model.generate() with the method's own cache; every answer is forced to --new-tokens. Writes OUT/replay.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from leank.eval.benchmarks.row import Row
from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.decode import greedy
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method, build_method
from leank.eval.methods.common.slicing import layer_at
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from leank.files import write_json
from scripts.bench.common import SHAPES, Record, Table, clear, subject, wait
from scripts.bench.methods import Bench, configured

BESIDE = ("snapkv", "fastkv", "gemfilter", "pyramid_infer")
KEYS = ("method", "length", "asked")
LAYERS = (7, 11, 15, 19, 23, 27, 30)
LONG = 2.0  # seconds of a case after which it is not repeated


def cases(found: Mapping[str, Method], layers: Sequence[int], budget: int | None) -> Iterator[tuple[Method, str]]:
    """Every method with the layer that is asked of it, or "its own".

    budget: tokens that ASL's passes keep, None = as configured.
    """
    for name, method in found.items():
        asl = method.prefill
        if not isinstance(asl, ASL):
            yield method, "its own"
            continue
        asl = asl if budget is None else replace(asl, budget=budget)
        yield replace(method, prefill=asl), "its own"
        for layer in layers:
            yield replace(method, label=name, prefill=replace(asl, layer=layer)), str(layer)


@torch.no_grad()
def timed(bench: Bench, method: Method, length: int, repeats: int) -> tuple[float, int]:
    """Seconds to the first token, and the layer above which tokens were dropped, -1 = nowhere or none that is known."""
    best, spent, layer = float("inf"), 0.0, -1
    for number in range(repeats + 1):
        prompt, prefill_s = bench.prefill(method, length)
        ttft_s = prefill_s + bench.cache_s(method, prompt)
        layer = prompt.selected_at[0] if prompt.selected_at else -1
        del prompt
        clear()
        if number == 0:  # it compiles, and meets shapes that nothing was prepared for
            continue
        best, spent = min(best, ttft_s), spent + ttft_s
        if spent > LONG:
            break
    return best, layer


def selection(method: Method, config: PreTrainedConfig, found: int) -> tuple[int, int, bool]:
    """The layer above which a method drops tokens, how many tokens go on, and whether all layers read these anew.

    config: the model's. found: the layer that the pass names, -1 = none.
    """
    choice = method.prefill
    if isinstance(choice, ASL):
        return found, choice.budget, choice.two_pass
    if isinstance(choice, GemFilter):
        return layer_at(choice.layer, 13, config), choice.budget, True
    if isinstance(choice, FastKV) and isinstance(choice.budget, int):
        return layer_at(choice.layer, 15, config), choice.budget, False
    return -1, 0, False


class Dense:
    """Dense's own times T(n), each measured once."""

    def __init__(self, bench: Bench, method: Method, repeats: int) -> None:
        self.bench, self.method, self.repeats = bench, method, repeats
        self.found: dict[int, float] = {}

    def __call__(self, length: int) -> float:
        """Seconds to the first token of a prompt of so many tokens."""
        if length not in self.found:
            self.found[length] = timed(self.bench, self.method, length, self.repeats)[0]
        return self.found[length]


def fill(row: Record, bench: Bench, method: Method, dense: Dense) -> None:
    """Fill one row."""
    length, config = int(str(row["length"])), bench.model.config
    whole = dense(length)
    spent, found = (whole, -1) if method is dense.method else timed(bench, method, length, dense.repeats)
    row.update(ttft_s=spent, share=spent / whole)
    layer, budget, anew = selection(method, config, found)
    row["layer"] = layer
    if layer >= 0 and budget < length:
        depth, less = (layer + 1) / config.num_hidden_layers, dense(budget) / whole
        row.update(depth=depth, expected=depth + (less if anew else (1 - depth) * less))


def static_methods(sink: int, window: int) -> list[Method]:
    """Dense, four static masks and one that is chosen per sample."""
    shared = {"sink": sink, "window": window}
    specs = {
        "lowest_70": {"name": "lowest_frequencies", "ratio": 0.7},
        "lowest_50": {"name": "lowest_frequencies", "ratio": 0.5},
        "random_70": {"name": "random", "ratio": 0.7},
        "random_50": {"name": "random", "ratio": 0.5},
        "think_60": {"name": "think", "ratio": 0.6},
    }
    return [build_method("dense"), *(build_method(label, {"channels": c}, shared) for label, c in specs.items())]


class _Numbers:
    """Stands in for a tokenizer."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, tokens: list[int], **options: object) -> str:
        """The ids as words."""
        return " ".join(map(str, tokens))


class Contest:
    """The same methods on the same prompt, in one replay and in separate runs.

    model: Any, because transformers types generate() for a protocol that its own models do not meet.
    ids: of the prompt. new: tokens that every answer is forced to.
    """

    def __init__(self, model: Any, tokenizer: Any, chosen: Sequence[Method], ids: list[int], new: int) -> None:
        self.model, self.chosen, self.ids, self.new = model, chosen, ids, new
        self.engine = Replay(model, tokenizer, Settings())

    def replayed(self) -> list[list[int]]:
        """Tokens of each method, from one replay."""
        row = Row("speed", "0", "", "", ("x",), self.new, "ruler_all", min_new_tokens=self.new)
        return [answers[0].tokens for _, answers in self.engine.answers([Prompt(self.ids, 0)], [row], self.chosen)]

    @torch.no_grad()
    def separate(self) -> list[list[int]]:
        """Tokens of each method, from a run of its own."""
        prompt = torch.tensor([self.ids], device=self.model.device)
        return [self._per_sample(m, prompt) if m.obs_queries else self._generated(m, prompt) for m in self.chosen]

    def _per_sample(self, one: Method, prompt: Tensor) -> list[int]:
        """A mask that needs the prompt's own queries takes the engine's pass, once."""
        dense = prefill(self.model, prompt, None, self.new, one.obs_queries)
        cache, n = one.cache(self.model, dense), [self.new]
        return greedy(self.model, cache, dense.logits, None, dense.lengths, self.engine.eos, n, n)[0][0]

    def _generated(self, one: Method, prompt: Tensor) -> list[int]:
        cache: Cache = DynamicCache(config=self.model.config)
        if one.channels is not None:
            keep = one.channels.keep_mask(None, self.model.config)  # type: ignore[arg-type]
            cache = compressed_cache(self.model, keep, one.sink, one.window, one.flush, one.backend)
        self.model.set_attn_implementation(ATTENTION)
        tokens = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
            max_new_tokens=self.new, min_new_tokens=self.new, pad_token_id=0,
        )  # fmt: skip
        return tokens[0, len(self.ids) :].tolist()


def fastest(work: Callable[[], list[list[int]]], repeats: int) -> tuple[float, list[list[int]]]:
    """Seconds of the fastest of `repeats` runs, and what the last one returned."""
    best, result = float("inf"), []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best, result


def first_tokens(args: argparse.Namespace) -> None:
    """Keep OUT/first_token.csv."""
    model, mask, sizes = subject(args.shape)
    tokenizer = load_config(ModelConfig())[1]
    bench, table = Bench(Replay(model, tokenizer, Settings()), 0), Table(args.out / "first_token.csv", KEYS)
    found: dict[str, Method] = {}
    for name in ("dense", *BESIDE, "asl", "asl_two_pass"):
        (found[name],) = configured(name, args.shape, mask, sizes, model.config, tokenizer)
    dense = Dense(bench, found["dense"], args.repeats)
    for length in args.lengths:
        for method, asked in cases(found, args.layers, args.budget):
            row: Record = {"method": method.label, "length": length, "asked": asked}
            table.add(row, partial(fill, bench=bench, method=method, dense=dense))
    table.check()


def replays(args: argparse.Namespace) -> None:
    """Write OUT/replay.json."""
    model, _, sizes = subject(args.shape)
    tokenizer = load_config(ModelConfig())[1] if args.shape == "reference" else _Numbers()
    chosen, found = static_methods(sizes.sink, 128 if args.shape == "reference" else sizes.window), []
    for length in args.lengths:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(10, model.config.vocab_size, (length,), generator=generator).tolist()
        both = Contest(model, tokenizer, chosen, ids, args.new_tokens)
        if model.device.type == "cuda":
            both.replayed()  # loads kernels
        once, one_by_one = fastest(both.replayed, args.repeats), fastest(both.separate, args.repeats)
        found.append({
            "length": length, "new_tokens": args.new_tokens, "methods": [m.label for m in chosen],
            "replay_s": once[0], "separate_s": one_by_one[0], "share": once[0] / one_by_one[0],
            "same_tokens": [a == b for a, b in zip(once[1], one_by_one[1], strict=True)],
        })  # fmt: skip
        print(found[-1], flush=True)
        write_json(args.out / "replay.json", found)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["first_token", "replay"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="prompt tokens")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS, help="first_token: where ASL selects")
    parser.add_argument("--budget", type=int, help="first_token: tokens that ASL keeps; default as configured")
    parser.add_argument("--new-tokens", type=int, default=32, help="replay: tokens of every answer")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts, 1 or more")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} times nothing; give 1 or more")
    first_tokens(args) if args.action == "first_token" else replays(args)


if __name__ == "__main__":
    main()
