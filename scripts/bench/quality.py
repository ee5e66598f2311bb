"""Scores of masks and methods as tables, from the rows of runs of python -m leank.eval.

    python -m scripts.bench.quality ratios DIR --out recall.csv --tasks ratios.csv
    python -m scripts.bench.quality turns DIR [DIR ...] --out multi_turn.csv
    python -m scripts.bench.quality picture docs/results/reference{,_mixed}/recall.csv --out docs/pictures/recall.svg

ratios     a line for each method and share of K channels pruned: recall (and points from dense and from LeanK's masks
           of the same ratio, paired by sample), KL from dense, top-1 agreement, bytes. Labels of methods end in their
           ratio, and masks of one kind in their seed: think_0.7, iap_97pct, kl_90_seed1. Seeds are averaged sample by
           sample. --tasks gets a line for each label and task, whatever the label. Prints the tables of a page.
           Methods that lack a sample of dense's are left out, and named
turns      recall of conversations (benchmark=multi_turn) by turn. A report counts turns as independent samples; here
           the mean of a conversation's turns is one number
picture    the README's picture of recall, of tables that `ratios` wrote: a transparent SVG, to be read on white and on
           black; of several tables, each has a panel with the name of its folder. Of a table with the columns
           method, budget, bytes and kl, such as docs/results/qwen15/first_runs.csv: KL against bytes, and
           beside it ruler_minus_dense, where it is there

Every interval is a 95% bootstrap interval. Tables by task, of any run, are those of python -m leank.eval report.
"""

import argparse
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank import stats
from leank.eval.report.style import INK, SETTINGS, plain, sheet
from leank.eval.rows import ResultRow, check_rows, read
from leank.files import write_text

ALL = "all"  # the tasks together
LABELS = {
    "leank": "LeanK", "kl": "LeanK", "nested": "LeanK", "l2steered": "L2, steered", "paper": "paper's objective",
    "paper240": "paper's objective", "static_norm": "static norm", "think": "ThinK", "iap": "IAP",
    "lowest_frequencies": "lowest frequencies", "duo_attention": "DuoAttention",
}  # fmt: skip
# Okabe and Ito's six that do not fade on white, then three more; an SVG in an <img> cannot take the colour of its page
COLOURS = {
    "LeanK": "#0072B2", "lowest frequencies": "#E69F00", "ThinK": "#009E73", "static norm": "#CC79A7",
    "random": "#D55E00", "paper's objective": "#56B4E9", "L2, steered": "#B3651A", "IAP": "#8A7FD1",
    "DuoAttention": "#A08C00",
}  # fmt: skip
OTHERS = ("#5E8C31", "#C2497B")  # of labels without a colour of their own
TEXT = "#7b8088"  # contrast 4 to 1 on white, 4.8 to 1 on #0d1117
LOOK = SETTINGS | {"font.size": 11, "axes.titlesize": 11, "svg.fonttype": "none", "svg.hashsalt": "leank"}
SAMPLE = ["task", "length", "sample", "seed"]  # what tells the rows of a method apart
FIGURES = ("recall", "kl", "top1")
Line = dict[str, object]
Cells = list[np.ndarray]  # values of each task and length
Wide = Mapping[str, pd.DataFrame]  # figure -> samples of dense x methods


def checked(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """The rows. Raises ValueError for a damaged one, and for rows of several runs, whose mean would mean nothing."""
    rows = list(rows)
    check_rows(rows)
    for field in ("model", "benchmark", "compress"):
        if len(found := sorted({row[field] for row in rows})) > 1:
            raise ValueError(f"these rows are of several values of {field!r} ({', '.join(found)}); give those of one")
    return rows


def write_table(path: Path, lines: Sequence[Line]) -> None:
    """Write lines as CSV; integers stay such beside empty cells."""
    write_text(path, pd.DataFrame(lines, dtype=object).to_csv(index=False))


def named(method: str) -> tuple[str, str, str] | None:
    """Label, ratio in % and seed ("" without one) that a method's name says; None if `LABELS` lacks it."""
    found = re.fullmatch(r"(.+?)_(0\.\d+|\d+(?:pct)?)(?:_seed(\d+))?", method)
    if found is None or found[1] not in LABELS:
        return None
    share = found[2].removesuffix("pct")
    return LABELS[found[1]], f"{100 * float(share):g}" if "." in share else share, found[3] or ""


def widened(rows: Iterable[ResultRow]) -> tuple[Wide, list[str]]:
    """Figures by sample and method, of the methods that have every sample of dense's; the labels of the others.

    recall and top1 are %, kl is nats a token (NaN where none was measured), bytes those of the cache after the prompt.
    Raises ValueError for rows without dense.
    """
    near = [(row, row.get("fidelity") or {"kl": None, "top1": None}) for row in rows]
    table = pd.DataFrame([
        {"method": row["method"], **{name: row[name] for name in SAMPLE}, "recall": 100 * row["score"],  # type: ignore[literal-required]
         "kl": np.nan if of["kl"] is None else of["kl"], "top1": np.nan if of["top1"] is None else 100 * of["top1"],
         "bytes": row["cache_bytes"]["total"]} for row, of in near
    ])  # fmt: skip
    methods = [*dict.fromkeys(table["method"])]
    if "dense" not in methods:
        raise ValueError("no row is of dense, which every method is compared with")
    by = table.groupby(["method", *SAMPLE], sort=False, dropna=False).mean()  # over a sample's replies
    asked = by.loc["dense"].index
    wide = {name: pd.DataFrame({m: by[name].loc[m].reindex(asked) for m in methods}) for name in (*FIGURES, "bytes")}
    lacking = [method for method in methods if wide["bytes"][method].isna().any()]
    whole = ["dense", *(method for method in methods if method not in ("dense", *lacking))]
    return {name: values[whole] for name, values in wide.items()}, lacking


def strata(values: pd.Series) -> Cells:
    """Values by task and length."""
    return [cell.to_numpy() for _, cell in values.groupby(level=["task", "length"], sort=False, dropna=False)]


def short(value: float) -> float:
    """Six significant digits; KL of methods differs by powers of ten."""
    return float(f"{value:.6g}")


def with_intervals(lines: Sequence[tuple[Line, Mapping[str, pd.Series], Line]]) -> list[Line]:
    """Lines of (first columns, figures, last columns), each figure as mean, low and high; without those with a NaN."""
    asked = {
        (at, name): strata(values)
        for at, (_, figures, _) in enumerate(lines) for name, values in figures.items() if values.notna().all()
    }  # fmt: skip
    found: list[Line] = [{} for _ in lines]
    for ((at, name), cells), (low, high) in zip(asked.items(), stats.intervals(asked.values()), strict=True):
        ends = ("low", "high") if name == "recall" else (f"{name}_low", f"{name}_high")
        found[at] |= {name: short(stats.mean(cells)), ends[0]: short(low), ends[1]: short(high)}
    return [first | middle | last for (first, _, last), middle in zip(lines, found, strict=True)]


def share_of_dense(wide: Wide, methods: Sequence[str]) -> float:
    """Bytes of methods, averaged by sample, as a share of dense's."""
    held = stats.mean(strata(wide["bytes"][[*methods]].mean(axis=1)))
    return round(held / stats.mean(strata(wide["bytes"]["dense"])), 4)


def by_ratio(wide: Wide) -> list[Line]:
    """Lines of ratios' --out: dense first, then by label and ratio.

    recall, difference (to dense), minus_leank and difference_seedN are points, kl is nats a token, top1 %, bytes the
    share of dense; kl and top1 are missing where a row has none.
    """
    kinds: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # methods by label and ratio, then by seed
    for method in wide["recall"]:
        if (kind := named(method)) is not None:
            kinds[kind[:2]][kind[2]] = method
    order, dense = list(dict.fromkeys(LABELS.values())), wide["recall"]["dense"]
    lines = []
    for label, ratio in [("dense", ""), *sorted(kinds, key=lambda at: (order.index(at[0]), float(at[1])))]:
        seeds = kinds[label, ratio] if ratio else {"": "dense"}
        figures = {name: wide[name][[*seeds.values()]].mean(axis=1, skipna=False) for name in FIGURES}
        if ratio:
            figures["difference"] = figures["recall"] - dense
        if label != "LeanK" and (best := kinds.get(("LeanK", ratio))):
            figures["minus_leank"] = figures["recall"] - wide["recall"][[*best.values()]].mean(axis=1)
        last: Line = {"bytes": share_of_dense(wide, [*seeds.values()])}
        for seed in sorted(filter(None, seeds)):
            last[f"difference_seed{seed}"] = short(stats.mean(strata(wide["recall"][seeds[seed]] - dense)))
        lines.append(({"label": label, "ratio": ratio, "seeds": len(seeds), "samples": len(dense)}, figures, last))
    return with_intervals(lines)


def by_ratio_and_task(wide: Wide) -> list[Line]:
    """Lines of ratios' --tasks: of every method, the tasks together and each alone; figures as in `by_ratio`."""
    lines: list[tuple[Line, dict[str, pd.Series], Line]] = []
    for task in (ALL, *wide["recall"].index.unique("task")):
        some = {name: values if task == ALL else values.xs(task, level="task", drop_level=False)
                for name, values in wide.items()}  # fmt: skip
        for method in some["recall"]:
            figures = {name: some[name][method] for name in FIGURES}
            figures["difference"] = figures["recall"] - some["recall"]["dense"]
            first: Line = {"method": method, "task": task, "samples": len(some["recall"])}
            lines.append(({**first, "bytes": share_of_dense(some, [method])}, figures, {}))
    return with_intervals(lines)


def ratios_page(lines: Sequence[Line]) -> str:
    """The tables of a page as Markdown: a line for each ratio, a column for each label."""

    def points(line: Line, name: str) -> str:
        return f"{line[name]:+.2f} [{line[f'{name}_low']:.2f}, {line[f'{name}_high']:.2f}]" if name in line else ""

    def by_seed(line: Line) -> str:
        seeds = [f"{value:+.1f}" for key, value in line.items() if key.startswith("difference_seed")]
        return f" ({', '.join(seeds)})" if len(seeds) > 1 else ""

    shown: dict[str, Callable[[Line], str]] = {
        "recall minus dense, points (by seed)": lambda line: points(line, "difference") + by_seed(line),
        "recall minus LeanK's at the same ratio, points": lambda line: points(line, "minus_leank"),
        "KL from dense, nats a token; top-1 agreement": lambda line: (
            f"{line['kl']:.2g}; {line['top1']:.2f}%" if "kl" in line else ""
        ),
        "cache, of dense": lambda line: f"{line['bytes']:.0%}",
    }
    dense, *pruned = lines
    out = [f"dense: recall {dense['recall']:.2f} [{dense['low']:.2f}, {dense['high']:.2f}]"]
    for title, cell in shown.items():
        cells = pd.DataFrame([{"K pruned": float(str(line["ratio"])), "label": line["label"], "": cell(line)}
                              for line in pruned])  # fmt: skip
        table = cells.pivot(index="K pruned", columns="label", values="")[[*cells["label"].unique()]].fillna("")
        out += [title, str(table.to_markdown(disable_numparse=True))]
    return "\n\n".join(out)


# by turn


def by_turn(rows: Iterable[ResultRow]) -> list[Line]:
    """A line for each mode, task and method: recall by turn and in all (%), its 95% interval, the cache's share."""
    table = pd.DataFrame([
        {"mode": str(row["meta"]["mode"]), "method": row["method"], "turn": int(row["meta"]["turn"]),
         "task": row["task"].removesuffix(f"_{row['meta']['mode']}"), "recall": 100 * row["score"],
         "conversation": f"{row['length']} {row['seed']} {row['sample'].rpartition('.')[0]}",
         "bytes": row["cache_bytes"]["total"]} for row in rows if {"turn", "mode"} <= row["meta"].keys()
    ])  # fmt: skip
    if table.empty:
        raise ValueError("no row is of benchmark=multi_turn; give the directory of such a run")
    sizes = table.groupby(["mode", "method", "task"])["bytes"].mean()
    lines: list[Line] = []
    for (mode, method), own in table.groupby(["mode", "method"]):
        for name, some in [(ALL, own), *own.groupby("task", sort=False)]:
            turns = some.groupby(["turn", "task"])["recall"].mean().groupby(level="turn").mean()
            talks = some.groupby(["task", "conversation"], sort=False)["recall"].mean()
            each = [of.to_numpy() for _, of in talks.groupby(level="task", sort=False)]
            low, high = stats.interval(each)
            tasks = [*some["task"].unique()]
            dense = [sizes.get((mode, "dense", task), np.nan) for task in tasks]
            share = float(sizes[mode, method][tasks].mean() / np.mean(dense))
            found = {f"turn {turn}": value for turn, value in turns.items()}
            found |= {"all": stats.mean(each), "low": low, "high": high}
            lines.append({
                "mode": mode, "task": name, "method": method, **{key: round(value, 1) for key, value in found.items()},
                "conversations": len(talks), "share of dense": None if np.isnan(share) else round(share, 3),
            })  # fmt: skip
    return lines


# the picture


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


def draw_recall(axes: Axes, table: pd.DataFrame) -> None:
    """Recall against pruning ratio: a line with its band per label, the label at its end, dense as a dashed line."""
    plain(axes)
    lines: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in table.to_dict("records"):
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


def draw_budgets(axes: Axes, table: pd.DataFrame, figure: str) -> None:
    """A figure against bytes: a line through the means of a method's budgets, with its seeds as dots; others as points.

    figure: "kl", on a logarithmic axis, which has no place for dense, or a difference from dense in points
    """
    plain(axes)
    logarithmic = figure == "kl"
    table = table[table[figure] != ""]
    table = table.assign(shown=table[figure].astype(float), share=100 * table["bytes"].astype(float))
    table = table[(table["shown"] > 0) if logarithmic else (table["method"] != "dense")]
    colours = iter(COLOURS.values())
    for method, mine in table[table["budget"] != ""].groupby("method", sort=False):
        means, colour = mine.groupby("budget")[["share", "shown"]].mean(), next(colours)
        axes.plot(means["share"], means["shown"], color=colour, linewidth=1.6, label=str(method).replace("_", " "))
        axes.scatter(mine["share"], mine["shown"], 12, color=colour)
    others = table[table["budget"] == ""]
    axes.scatter(others["share"], others["shown"], 26, color=INK, marker="D")
    at = np.log10(others["shown"]) if logarithmic else others["shown"]
    heights = spread(at.tolist(), 0.05 * float(np.ptp(at)))
    for name, share, height in zip(others["method"], others["share"], heights, strict=True):
        place = (share, 10**height if logarithmic else height)
        axes.annotate(name, place, (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(xlabel="% of the dense cache's bytes", ylabel="points, less dense's")
    if logarithmic:
        axes.set(ylabel="KL from dense, nats a token", yscale="log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))  # mathtext is off
        axes.legend(loc="best")


def to_svg(figure: Figure) -> str:
    """The figure as a file of its own: transparent, with text as text, in a tone between black and white."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue().replace(INK, TEXT)


def picture(tables: Sequence[Path], out: Path) -> None:
    """Draw tables one below the other: those that `ratios` wrote, and those of budgets, KL beside points if there."""
    found = [pd.read_csv(file, dtype=str, keep_default_na=False) for file in tables]
    panels = [
        [name for name in ("kl", "ruler_minus_dense") if name in table] if "budget" in table else ["recall"]
        for table in found
    ]
    with matplotlib.rc_context(LOOK):
        figure = sheet(3.6 * len(tables), 7.2 if max(map(len, panels)) == 1 else 11)
        for part, file, table, shown in zip(
            figure.subfigures(len(tables), squeeze=False)[:, 0], tables, found, panels, strict=True
        ):
            for axes, name in zip(part.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
                draw_recall(axes, table) if name == "recall" else draw_budgets(axes, table, name)
            if len(tables) > 1:
                part.axes[0].set_title(f"model={file.parent.name}", loc="left")
        write_text(out, to_svg(figure))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["ratios", "turns", "picture"])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR",
                        help="of runs of python -m leank.eval; picture: tables")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="a CSV file; picture: an SVG file")
    parser.add_argument("--tasks", type=Path, help="ratios: a CSV file by task")
    args = parser.parse_args(argv)
    if args.table == "picture":
        picture(args.folders, args.out)
        return
    rows = checked(row for folder in args.folders for row in read(folder))
    if args.table == "turns":
        write_table(args.out, by_turn(rows))
        return
    wide, lacking = widened(rows)
    lines = by_ratio(wide)
    write_table(args.out, lines)
    if args.tasks:
        write_table(args.tasks, by_ratio_and_task(wide))
    print(ratios_page(lines))
    if lacking:
        print(f"\nleft out, as samples lack: {', '.join(lacking)}")


if __name__ == "__main__":
    main()
