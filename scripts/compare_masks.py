"""Score learned masks beside dense, ThinK and the masks that need no training, on unseen RULER-form samples.

    python -m scripts.compare_masks OUT --masks leank=outputs/reference_70pct_seed1/mask.safetensors \
        --ratio 0.7 --lengths 1024 2048 4096 --samples 200 --seed 7001

Decoding as deployed (leank_train/validation.py). OUT receives rows.jsonl (one sample and method a line), table.md and
summary.json: RULER recall by task and length, and the paired differences of every learned mask to every other method
with 95% bootstrap intervals. A run that was stopped goes on where it was; --workers shares a GPU among processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from data_gen.tasks import RULER_NIAH
from data_gen.tokens import TokenCounter
from leank_train import backbone as backbones
from leank_train import validation
from leank_train.baselines import lowest_frequencies, random_mask
from leank_train.compare import static_norm_mask, unseen
from leank_train.escape import markdown as escaped
from leank_train.escape import markdown_table
from leank_train.files import write_json, write_text
from leank_train.mask import ChannelMask


def methods(args: argparse.Namespace, backbone: backbones.Backbone) -> dict[str, Any]:
    """Every learned mask, and the baselines at every ratio."""
    found: dict[str, Any] = {"dense": None}
    for item in args.masks:
        name, path = item.split("=", 1)
        found[name] = ChannelMask.load(path)
        found[name].check_model(backbone.model.config)
    makers = {
        "think": validation.think,
        "static_norm": lambda ratio: ChannelMask.load(args.out / f"static_norm@{100 * ratio:.0f}%.safetensors"),
        "lowest_frequencies": lambda ratio: lowest_frequencies(backbone.model.config, ratio),
        "random": lambda ratio: random_mask(backbone.shape, ratio, 0),
    }
    found |= {f"{name}@{100 * r:.0f}%": makers[name](r) for r in args.ratio for name in args.baselines}
    return found


def work(rank: int, args: argparse.Namespace, units: list[tuple[str, int, int]]) -> None:
    """Score this worker's share of the units (task, length, first sample)."""
    torch.set_num_threads(max(1, torch.get_num_threads() // args.workers))
    backbone = backbones.load(args.model, args.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    counter, chosen = TokenCounter(backbone.tokenizer), methods(args, backbone)
    with (args.out / f"rows.{rank}.jsonl").open("a") as out:
        for name, length, first in units[rank :: args.workers]:
            last = min(first + args.batch, args.samples)
            batch = [unseen(backbone, counter, name, length, args.seed, i) for i in range(first, last)]
            rows = validation.evaluate(
                backbone, chosen, [batch], args.sink, args.window, max_new_tokens=args.max_new_tokens
            )
            rows = [dataclasses.replace(r, length=length) for r in rows]
            out.write("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows))
            out.flush()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--masks", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--ratio", type=float, nargs="*", default=[0.7], help="ratios of the baselines")
    parser.add_argument("--baselines", nargs="*", default=["think", "static_norm", "lowest_frequencies", "random"])
    parser.add_argument("--max-new-tokens", type=int, help="default: each task's own (128 for NIAH)")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", nargs="*", default=list(RULER_NIAH))
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--samples", type=int, default=200, help="per task and length")
    parser.add_argument("--seed", type=int, default=7001)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=144)
    parser.add_argument("--batch", type=int, default=50, help="documents decoded together")
    parser.add_argument("--workers", type=int, default=1, help="processes (they share one GPU)")
    parser.add_argument("--calibration", type=int, default=100, help="samples behind the static norm mask")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    missing = [r for r in args.ratio if not (args.out / f"static_norm@{100 * r:.0f}%.safetensors").exists()]
    if missing and "static_norm" in args.baselines:
        backbone = backbones.load(args.model, args.dtype, "cuda" if torch.cuda.is_available() else "cpu")
        norms = static_norm_mask(backbone, max(args.lengths), args.calibration, seed=0)
        for ratio in missing:
            norms.mask(ratio).save(args.out / f"static_norm@{100 * ratio:.0f}%.safetensors")
    done = {(r.task, r.length, r.index) for r in read(args.out)}
    units = [
        (name, length, first)
        for length in sorted(args.lengths, reverse=True)
        for name in args.tasks
        for first in range(0, args.samples, args.batch)
        if (name, length, first) not in done
    ]
    if args.workers == 1:
        work(0, args, units)
    else:
        torch.multiprocessing.spawn(work, (args, units), nprocs=args.workers)
    report(read(args.out), [m.split("=", 1)[0] for m in args.masks], args.out)


def read(out: Path) -> list[validation.Result]:
    """Every row so far; a torn last line of a killed run is left out."""
    rows = []
    for file in sorted(out.glob("rows.*.jsonl")):
        lines = file.read_text().split("\n")
        rows += [validation.Result(**json.loads(line)) for line in lines[:-1]]
    return rows


def report(rows: list[validation.Result], learned: list[str], out: Path) -> None:
    """table.md and summary.json from the rows alone."""
    lengths = sorted({r.length for r in rows})
    everything = validation.table(rows)
    by_length = {n: validation.table([r for r in rows if r.length == n]) for n in lengths}
    summary: dict[str, Any] = {"recall": everything, "by_length": by_length, "rows": len(rows), "paired": {}}
    text = f"All lengths {lengths}\n\n{validation.markdown(everything)}\n\n"
    lines = [[m, *(f"{by_length[n][m]['average']:.1f}" for n in lengths)] for m in everything]
    text += markdown_table(["method", *map(str, lengths)], lines) + "\n"
    for name in learned:
        summary["paired"][name] = {}
        share = everything[name]["average"] / everything["dense"]["average"]
        text += f"\n{escaped(name)}: {100 * share:.2f}% of dense; minus\n"
        for other in everything:
            if other != name:
                mean, low, high = validation.paired_difference(rows, name, other)
                summary["paired"][name][other] = {"mean": mean, "low": low, "high": high}
                text += f"  {escaped(other):28s} {mean:+7.2f}  [{low:+.2f}, {high:+.2f}]\n"
    plot(everything, lengths, out)
    write_json(out / "summary.json", summary)
    write_text(out / "table.md", text)
    print(text)


def plot(scores: dict[str, dict[str, float]], lengths: list[int], out: Path) -> None:
    """recall.png: mean recall of every method, dense as the line to reach."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [m for m in scores if m != "dense"]
    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.3 * len(names)))
    colours = ["C3" if "@" in m else "C0" for m in names]
    bars = axis.barh(names[::-1], [scores[m]["average"] for m in names[::-1]], color=colours[::-1])
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.axvline(
        scores["dense"]["average"], color="black", lw=1, ls="--", label=f"dense {scores['dense']['average']:.1f}"
    )
    axis.set(xlim=(0, 112), xlabel=f"RULER NIAH recall (%), mean over {lengths} tokens")
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(out / "recall.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
