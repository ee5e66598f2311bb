r"""Methods against the share of K channels pruned: recall, KL from dense, top-1 agreement and bytes.

    python -m scripts.bench.quality.ratios outputs/eval/reference_ratios --out docs/results/reference/recall.csv \
        --tasks docs/results/reference/ratios.csv

It reads the rows of an evaluation. Labels of methods end in their ratio, and masks of one kind in their seed:
think_0.7, iap_97pct, kl_90_seed1. --out gets a line for each method and ratio; seeds are averaged sample by sample.
--tasks gets a line for each label and task, whatever the label. Differences are paired by sample, with dense and with
LeanK's masks (the KL objective) of the same ratio; every interval is a 95% bootstrap interval. Printed are the tables
of a page. Methods that lack a sample of dense's are left out, and named.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from leank import bootstrap
from leank.cli import again, ending
from leank.eval.rows.result_row import ResultRow, check_one_model, check_rows
from leank.eval.rows.results import read
from leank.files import write_text

LABELS = {
    "leank": "LeanK", "kl": "LeanK", "l2steered": "L2, steered", "paper": "paper's objective",
    "paper240": "paper's objective", "static_norm": "static norm", "think": "ThinK", "iap": "IAP",
    "lowest_frequencies": "lowest frequencies", "duo_attention": "DuoAttention",
}  # fmt: skip
ALL = "all"  # the tasks together
Sample = tuple[str, int | None, str, int]  # task, length, sample and seed of the benchmark
Rows = Mapping[Sample, ResultRow]  # of one method
Value = Callable[[ResultRow], float]
Cells = list[list[float]]  # values by task and length
Line = Mapping[str, object]


def recall(row: ResultRow) -> float:
    """Recall of a row in %."""
    return 100 * row["score"]


def kl(row: ResultRow) -> float:
    """KL from dense in nats a token; NaN where it was not measured."""
    found = row.get("fidelity")
    return np.nan if found is None or found["kl"] is None else found["kl"]


def top1(row: ResultRow) -> float:
    """Agreement with dense in %; NaN where it was not measured."""
    found = row.get("fidelity")
    return np.nan if found is None or found["top1"] is None else 100 * found["top1"]


def held(row: ResultRow) -> float:
    """Bytes of the cache after the prompt."""
    return row["cache_bytes"]["total"]


FIGURES: dict[str, Value] = {"recall": recall, "kl": kl, "top1": top1}


def named(method: str) -> tuple[str, str, str] | None:
    """Label, ratio in % and seed ("" without one) that a method's name says; None if `LABELS` lacks it."""
    found = re.fullmatch(r"(.+?)_(0\.\d+|\d+(?:pct)?)(?:_seed(\d+))?", method)
    if found is None or found[1] not in LABELS:
        return None
    share = found[2].removesuffix("pct")
    return LABELS[found[1]], f"{100 * float(share):g}" if "." in share else share, found[3] or ""


def by_method(rows: Iterable[ResultRow]) -> tuple[dict[str, Rows], list[str]]:
    """Rows of the methods that have every sample of dense's, dense first, and the labels of the others.

    Raises ValueError for rows without dense.
    """
    of: dict[str, dict[Sample, ResultRow]] = defaultdict(dict)
    for row in rows:
        of[row["method"]][row["task"], row["length"], row["sample"], row["seed"]] = row
    if "dense" not in of:
        raise ValueError("no row is of dense, which every method is compared with")
    whole = {method: own for method, own in of.items() if own.keys() >= of["dense"].keys()}
    return {"dense": whole["dense"], **whole}, [method for method in of if method not in whole]


def means(value: Value, seeds: Iterable[Rows], samples: Iterable[Sample]) -> dict[Sample, float]:
    """A value of each sample, averaged over seeds."""
    seeds = list(seeds)
    return {sample: sum(value(own[sample]) for own in seeds) / len(seeds) for sample in samples}


def strata(values: Mapping[Sample, float], minus: Mapping[Sample, float] | None = None) -> Cells:
    """Values by task and length, less those of `minus`."""
    found: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for sample, value in values.items():
        found[sample[:2]].append(value - (minus[sample] if minus else 0))
    return list(found.values())


def figures(asked: Mapping[str, Cells]) -> Generator[bootstrap.Strata, bootstrap.Ends, dict[str, object]]:
    """Each figure's mean and interval to six digits, for `bootstrap.together`; without those that some sample lacks."""
    out: dict[str, object] = {}
    for name, cells in asked.items():
        if all(np.isfinite(cell).all() for cell in cells):
            low, high = yield cells
            out |= {name: short(bootstrap.mean(cells)), f"{name}_low": short(low), f"{name}_high": short(high)}
    return {name.removeprefix("recall_"): value for name, value in out.items()}


def short(value: float) -> float:
    """Six significant digits; KL of methods differs by powers of ten."""
    return float(f"{value:.6g}")


def table(of: Mapping[str, Rows]) -> list[dict[str, object]]:
    """Lines of --out: dense first, then by label and ratio.

    recall, difference (to dense), minus_leank and difference_seedN are points, kl is nats a token, top1 %, bytes the
    share of dense; kl and top1 are missing where a row has none.
    """
    kinds: dict[tuple[str, str], dict[str, Rows]] = defaultdict(dict)  # rows of every seed by label and ratio
    for method, own in of.items():
        if (kind := named(method)) is not None:
            kinds[kind[:2]][kind[2]] = own
    order, dense = list(dict.fromkeys(LABELS.values())), of["dense"]
    base, size = means(recall, [dense], dense), bootstrap.mean(strata(means(held, [dense], dense)))
    heads: list[dict[str, object]] = []
    asked: list[dict[str, Cells]] = []
    tails: list[dict[str, object]] = []
    for label, ratio in [("dense", ""), *sorted(kinds, key=lambda at: (order.index(at[0]), float(at[1])))]:
        seeds = kinds[label, ratio] if ratio else {"": dense}
        values = {name: means(value, seeds.values(), dense) for name, value in FIGURES.items()}
        asked.append({name: strata(some) for name, some in values.items()})
        if ratio:
            asked[-1]["difference"] = strata(values["recall"], base)
        if label != "LeanK" and (best := kinds.get(("LeanK", ratio))):
            asked[-1]["minus_leank"] = strata(values["recall"], means(recall, best.values(), dense))
        share = bootstrap.mean(strata(means(held, seeds.values(), dense))) / size
        heads.append({"label": label, "ratio": ratio, "seeds": len(seeds), "samples": len(dense)})
        tails.append({"bytes": round(share, 4)})
        for seed in sorted(filter(None, seeds)):
            alone = strata(means(recall, [seeds[seed]], dense), base)
            tails[-1][f"difference_seed{seed}"] = short(bootstrap.mean(alone))
    found = bootstrap.together(map(figures, asked))
    return [head | middle | tail for head, middle, tail in zip(heads, found, tails, strict=True)]


def task_table(of: Mapping[str, Rows]) -> list[dict[str, object]]:
    """Lines of --tasks: of every method, the tasks together and each alone; figures as in `table`."""
    heads: list[dict[str, object]] = []
    asked: list[dict[str, Cells]] = []
    for task in (ALL, *dict.fromkeys(sample[0] for sample in of["dense"])):
        samples = [sample for sample in of["dense"] if task in (ALL, sample[0])]
        base = means(recall, [of["dense"]], samples)
        size = bootstrap.mean(strata(means(held, [of["dense"]], samples)))
        for method, own in of.items():
            asked.append({name: strata(means(value, [own], samples)) for name, value in FIGURES.items()})
            asked[-1]["difference"] = strata(means(recall, [own], samples), base)
            share = bootstrap.mean(strata(means(held, [own], samples))) / size
            heads.append({"method": method, "task": task, "samples": len(samples), "bytes": round(share, 4)})
    return [head | found for head, found in zip(heads, bootstrap.together(map(figures, asked)), strict=True)]


def _points(line: Line) -> str:
    """The difference with its interval, then that of each seed."""
    seeds = [f"{value:+.1f}" for key, value in line.items() if key.startswith("difference_seed")]
    mean = f"{line['difference']:+.2f} [{line['difference_low']:.2f}, {line['difference_high']:.2f}]"
    return mean + (f" ({', '.join(seeds)})" if len(seeds) > 1 else "")


def _behind(line: Line) -> str:
    """The difference to LeanK's masks of the same ratio."""
    if "minus_leank" not in line:
        return ""
    return f"{line['minus_leank']:+.2f} [{line['minus_leank_low']:.2f}, {line['minus_leank_high']:.2f}]"


def _distance(line: Line) -> str:
    """KL and agreement, where they were measured."""
    return f"{line['kl']:.2g}; {line['top1']:.2f}%" if "kl" in line else ""


def page(lines: Sequence[Line]) -> str:
    """The tables of a page as Markdown: a line for each ratio, a column for each label."""
    cells = {(line["label"], line["ratio"]): line for line in lines if line["ratio"]}
    labels = list(dict.fromkeys(label for label, _ in cells))
    ratios = sorted({str(ratio) for _, ratio in cells}, key=float)
    out = [f"dense: recall {lines[0]['recall']:.2f} [{lines[0]['low']:.2f}, {lines[0]['high']:.2f}]"]
    for title, shown in (
        ("recall minus dense, points (by seed)", _points),
        ("recall minus LeanK's at the same ratio, points", _behind),
        ("KL from dense, nats a token; top-1 agreement", _distance),
        ("cache, of dense", lambda line: f"{100 * line['bytes']:.0f}%"),
    ):
        body = [[f"{r}%", *(shown(cells[a, r]) if (a, r) in cells else "" for a in labels)] for r in ratios]
        out += [
            "",
            title,
            "",
            pd.DataFrame(body, columns=["K pruned", *map(str, labels)], dtype=object).to_markdown(
                index=False, disable_numparse=True
            ),
        ]
    return "\n".join(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of an evaluation")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tasks", type=Path)
    given = parser.parse_args(argv)
    with ending("ratios", lambda: f"the rows are as they were; again: {again('scripts.bench.quality.ratios')}"):
        rows = list(read(given.folder))
        check_rows(rows)
        check_one_model(rows)
        of, lacking = by_method(rows)
        lines = table(of)
        write_text(given.out, pd.DataFrame(lines, dtype=object).to_csv(index=False))
        if given.tasks:
            write_text(given.tasks, pd.DataFrame(task_table(of), dtype=object).to_csv(index=False))
        print(page(lines))
        if lacking:
            print(f"\nleft out, as samples lack: {', '.join(lacking)}")


if __name__ == "__main__":
    main()
