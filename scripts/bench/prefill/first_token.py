"""First token of methods that drop tokens on the way up, as a share of dense (ASL's tables 4 and 10, Appendix B).

    python -m scripts.bench.prefill.first_token OUT --lengths 4096 8192 16384 32768 65536 131072   # 8B shape, one GPU
    python -m scripts.bench.prefill.first_token OUT --shape reference --lengths 600 --layers 3 5 --budget 256    # a CPU

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
OUT/first_token.png draws share against depth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import torch
from transformers import PreTrainedConfig

from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import Method
from leank.eval.methods.common.slicing import layer_at
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.report.style import INK, MARKERS, PALETTE, SETTINGS, plain, png, sheet
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from leank.files import write_bytes
from scripts.bench.common.caches import subject
from scripts.bench.common.one_method import Bench, configured
from scripts.bench.common.table import Record, Table, attempt, complain, final
from scripts.bench.common.timing import clear

BESIDE = ("snapkv", "fastkv", "gemfilter", "pyramid_infer")
NAMES, COLUMNS = ("method", "length", "asked"), ("layer", "depth", "ttft_s", "share", "expected", "error")
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


def draw(rows: Sequence[Record], path: Path) -> None:
    """Share of dense against depth, a panel per length."""
    found = [row for row in rows if row.get("depth")]
    lengths = sorted({int(str(row["length"])) for row in found})
    if not found:
        return
    with matplotlib.rc_context(SETTINGS):
        figure = sheet(2.8 * -(-len(lengths) // 2))
        panels = figure.subplots(-(-len(lengths) // 2), 2, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, length in zip(panels, lengths, strict=False):
            axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
            for number, name in enumerate(dict.fromkeys(str(row["method"]) for row in found)):
                of_name = [row for row in found if row["method"] == name and int(str(row["length"])) == length]
                points = sorted((float(str(row["depth"])), float(str(row["share"]))) for row in of_name)
                style = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}
                axes.plot(
                    *zip(*points, strict=True), label=name, markersize=4, linewidth=1, **style
                ) if points else None
            axes.set(title=f"{length:,} tokens", xlabel="(layer + 1) / layers", ylabel="first token / dense's")
            plain(axes)
        panels[0].legend(fontsize=7)
        write_bytes(path, png(figure))


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["llama8b", "reference"], default="llama8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="prompt tokens")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS, help="layers at which ASL selects")
    parser.add_argument("--budget", type=int, help="tokens that ASL keeps; default as configured")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} times nothing; give 1 or more")
    model, mask, sizes = subject(args.shape)
    tokenizer = load_config(ModelConfig())[1]
    bench, table = Bench(Replay(model, tokenizer, Settings()), 0), Table(args.out / "first_token.csv", NAMES, COLUMNS)
    found: dict[str, Method] = {}
    for name in ("dense", *BESIDE, "asl", "asl_two_pass"):
        (found[name],) = configured(name, args.shape, mask, sizes, model.config, tokenizer)
    dense = Dense(bench, found["dense"], args.repeats)
    for length in args.lengths:
        for method, asked in cases(found, args.layers, args.budget):
            if not table.has(method.label, length, asked):
                row: Record = {"method": method.label, "length": length, "asked": asked}
                table.add(attempt(row, partial(fill, bench=bench, method=method, dense=dense)))
            clear()
        draw(table.rows, args.out / "first_token.png")
    complain([row for row in table.rows if not final(row)], "method")


if __name__ == "__main__":
    main()
