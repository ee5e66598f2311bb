"""The pictures of the README, drawn from the tables of docs/results.

    python -m scripts.bench.pictures recall docs/results/reference{,_mixed}/recall.csv docs/pictures/recall.svg
    python -m scripts.bench.pictures documents docs/results/reference/documents.csv docs/pictures/documents.svg
    python -m scripts.bench.pictures speed docs/results/h200 docs/pictures/speed.svg

`recall` draws tables of `scripts.bench.quality ratios`: label, ratio (% of K channels pruned, empty for dense), recall,
low, high. Of several, each has a panel with the name of its folder. `documents` draws the table of
`scripts.bench.documents`. `speed` draws generation.csv and attention.csv of one folder. The files are
transparent SVG, to be read on white and on black.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.eval.report.style import INK, PALETTE, SETTINGS, plain, sheet
from leank.files import write_text

# Okabe and Ito's six that do not fade on white, then three more; an SVG in an <img> cannot take the colour of its page
COLOURS = {
    "LeanK": "#0072B2", "lowest frequencies": "#E69F00", "ThinK": "#009E73", "static norm": "#CC79A7",
    "random": "#D55E00", "paper's objective": "#56B4E9", "L2, steered": "#B3651A", "IAP": "#8A7FD1",
    "DuoAttention": "#A08C00",
}  # fmt: skip
OTHERS = ("#5E8C31", "#C2497B")  # of labels without a colour of their own
TEXT = "#7b8088"  # contrast 4 to 1 on white, 4.8 to 1 on #0d1117
LOOK = SETTINGS | {"font.size": 11, "axes.titlesize": 11, "svg.fonttype": "none", "svg.hashsalt": "leank"}

NAMES = {
    "kl": "KL", "l2": "L2", "one_document": "KL, one document a step", "usual_momentum": "KL, momentum 0.9",
    "stopping": "KL, early stopping",
}  # fmt: skip

Records = Sequence[Mapping[str, str]]


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart as little as needed, so that neighbours differ by at least `gap`; their order stays."""
    order = np.argsort(values, kind="stable")
    moved = np.asarray(values, dtype=float)[order]
    for _ in range(1000):
        short = gap - np.diff(moved)
        if (short <= 1e-6).all():
            break
        push = np.maximum(short, 0) / 2
        moved[:-1] -= push
        moved[1:] += push
    out = np.empty_like(moved)
    out[order] = moved
    return out.tolist()


def draw_recall(axes: Axes, table: Records) -> None:
    """Recall against pruning ratio: a line with its band per label, the label at its end, dense as a dashed line."""
    plain(axes)
    lines: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in table:
        recall, low, high = (float(row[key]) for key in ("recall", "low", "high"))
        if row["ratio"]:
            lines[row["label"]].append((float(row["ratio"]), recall, low, high))
        else:
            axes.axhline(recall, color=INK, linewidth=1, linestyle="--")
            axes.annotate(f"dense {recall:.1f}%", (0, recall), (4, 4), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="bottom")  # fmt: skip
    spare = iter(OTHERS * len(lines))
    ends = spread([sorted(points)[-1][1] for points in lines.values()], 7.5)
    for (label, points), height in zip(lines.items(), ends, strict=True):
        ratio, recall, low, high = np.array(sorted(points)).T
        colour = COLOURS.get(label) or next(spare)
        axes.fill_between(ratio, low, high, color=colour, alpha=0.25, linewidth=0)
        wide = 2.6 if label == "LeanK" else 1.6
        axes.plot(ratio, recall, color=colour, linewidth=wide, marker="o", markersize=2 * wide, zorder=1 + wide)
        axes.annotate(f"{label} {recall[-1]:.1f}%", (1.02, height), xycoords=("axes fraction", "data"), color=colour,
                      va="center", annotation_clip=False, weight="bold" if label == "LeanK" else "normal")  # fmt: skip
    axes.set(xlabel="K channels pruned, %", ylabel="recall, %", ylim=(0, 108), yticks=range(0, 101, 20))
    ratios = sorted({point[0] for points in lines.values() for point in points})
    crowded = 0.05 * (ratios[-1] - ratios[0])
    axes.set_xticks([r for r, after in zip(ratios, [*ratios[1:], np.inf], strict=True) if after - r > crowded])


def draw_recalls(files: Sequence[Path]) -> Figure:
    """Tables of recall, one above the other."""
    drawn = sheet(3.6 * len(files), 7.2)
    for axes, file in zip(drawn.subplots(len(files), squeeze=False)[:, 0], files, strict=True):
        draw_recall(axes, read_table(file))
        if len(files) > 1:
            axes.set_title(f"model={file.parent.name}", loc="left")
    return drawn


def bars(
    axes: Axes, labels: Sequence[str], values: Sequence[float], texts: Sequence[str], bold: Sequence[bool]
) -> None:
    """Horizontal bars from the top down, LeanK's (`bold`) in its colour, with a text at the end of each."""
    places = np.arange(len(labels))[::-1]
    axes.barh(places, values, height=0.62, color=[COLOURS["LeanK"] if b else TEXT for b in bold])
    for place, value, text in zip(places, values, texts, strict=True):
        axes.annotate(text, (value, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, labels)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def draw_generation(axes: Axes, table: Records) -> None:
    """Tokens per second at the common batch and at the largest that fits; the first row of each kind counts."""
    wanted = (("LeanK", "graph"), ("own cache, nothing pruned", "graph"), ("StaticCache", "graph"),
              ("DynamicCache", "eager"))  # fmt: skip
    words = {"LeanK": "LeanK", "own cache, nothing pruned": "nothing pruned"}
    labels, values, texts, bold = [], [], [], []
    for largest in (False, True):
        for cache, loop in wanted:
            for row in table:
                kind = (row["cache"], row["loop"], row.get("largest") == "True")
                if kind == (cache, loop, largest) and row["tokens_per_s"] and row["new"] == "128":
                    name = words.get(cache, f"transformers' {cache}")
                    labels.append(f"{name}, {'largest batch, ' if largest else 'batch '}{row['batch']}")
                    values.append(float(row["tokens_per_s"]))
                    texts.append(f"{values[-1]:,.0f}")
                    bold.append(cache == "LeanK")
                    break
    bars(axes, labels, values, texts, bold)
    axes.set_xlim(0, 1.2 * max(values))
    axes.set_title("Tokens per second, 4K tokens in the cache", loc="left")


def draw_attention(axes: Axes, table: Records) -> None:
    """Time of LeanK's attention per layer as a share of the fastest dense attention, and what its bytes allow."""
    labels, values, texts, limits, dense_texts = [], [], [], [], []
    for shape in dict.fromkeys(row["shape"] for row in table):
        layers = [row for row in table if row["shape"] == shape and row["method"] == "LeanK"]
        us, dense, limit = (np.mean([float(row[key]) for row in layers]) for key in ("us", "dense_us", "bytes"))
        whole = next(float(row["bytes"]) for row in table if row["shape"] == shape and row["method"] != "LeanK")
        labels.append(shape)
        values.append(float(us / dense))
        limits.append(float(limit / whole))
        texts.append(f"{us:,.0f} µs")
        dense_texts.append(f"{dense:,.0f} µs")
    bars(axes, labels, values, texts, [True] * len(labels))
    places = np.arange(len(labels))[::-1]
    axes.vlines(limits, places - 0.31, places + 0.31, color=COLOURS["lowest frequencies"], linewidth=2.5)
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    for place, text in zip(places, dense_texts, strict=True):
        axes.annotate(text, (1, place), (5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.2)
    axes.set_title("Attention per layer, batch x context\nDashed: fastest dense. Orange: limit by bytes", loc="left")


def draw_speed(folder: Path) -> Figure:
    """Generation and attention of one folder of benchmarks, one above the other."""
    drawn = sheet(6, 7.2)
    above, below = drawn.subplots(2)
    for axes, draw, name in ((above, draw_generation, "generation.csv"), (below, draw_attention, "attention.csv")):
        draw(axes, read_table(folder / name))
    return drawn


def draw_documents(table: Records) -> Figure:
    """A panel each for recall and, where the table has it, KL: a dot for each seed, a line through the means."""
    shown = ["recall", *(["kl"] if any(row["variant"] != "dense" and row.get("kl") for row in table) else [])]
    figure = sheet(3.2 * len(shown), 7.2)
    for axes, column in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        draw_column(axes, table, column)
    return figure


def draw_column(axes: Axes, table: Records, column: str) -> None:
    """One panel; recall has dense as a dashed line, KL a logarithmic axis."""
    plain(axes)
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        if row["variant"] != "dense" and row[column]:
            points[row["variant"]][int(row["documents"])].append(float(row[column]))
        elif column == "recall":
            axes.axhline(float(row[column]), color=INK, linewidth=1, linestyle="--", label="dense")
    for (variant, by_number), colour in zip(points.items(), PALETTE, strict=False):
        numbers = sorted(by_number)
        means = [float(np.mean(by_number[n])) for n in numbers]
        axes.plot(numbers, means, color=colour, linewidth=1.8, label=NAMES.get(variant, variant))
        dots = [(n, value) for n in numbers for value in by_number[n]]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, alpha=0.7)
    ticks = sorted({number for of in points.values() for number in of})
    axes.set(xscale="log", xlabel="training documents")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    if column == "recall":
        axes.set(ylabel="recall, %")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)  # above: dots fill the panel
    else:
        axes.set(ylabel="KL from dense, nats a token", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def to_svg(figure: Figure) -> str:
    """The figure as a file of its own: transparent, with text as text, in a tone between black and white."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue().replace(INK, TEXT)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["recall", "documents", "speed"])
    parser.add_argument(
        "source", type=Path, nargs="+", help="tables of recall, a table of documents, or folder of benchmarks"
    )
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.action != "recall" and len(args.source) > 1:
        parser.error(f"{args.action} takes one folder, not {len(args.source)}")
    with matplotlib.rc_context(LOOK):
        if args.action == "recall":
            figure = draw_recalls(args.source)
        else:
            figure = (
                draw_documents(read_table(args.source[0])) if args.action == "documents" else draw_speed(args.source[0])
            )
        write_text(args.out, to_svg(figure))


if __name__ == "__main__":
    main()
