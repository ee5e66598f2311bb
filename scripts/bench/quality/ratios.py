"""Methods against the share of K channels pruned: recall, KL from dense, top-1 agreement and bytes.

    python -m scripts.bench.quality.ratios outputs/eval/reference_ratios --out docs/results/reference/recall.csv

It reads the rows of an evaluation. Labels of methods end in their ratio, and masks of one kind in their seed:
think_0.7, iap_97pct, kl_90_seed1. The CSV has a line for each method and ratio; seeds are averaged sample by sample.
Differences are paired with dense; every interval is a 95% bootstrap interval. Printed are the tables of a page. Methods
that lack a sample of dense's are left out of both, and named.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_gen.ending import again, ending, in_one_line
from eval.rows.result_row import ResultRow, check_one_model, check_rows
from eval.rows.results import read
from leank_train.common import bootstrap
from leank_train.common.escape import csv_rows, markdown_table
from leank_train.common.files import write_text

LABELS = {
    "leank": "LeanK", "kl": "LeanK", "l2steered": "L2, steered", "paper": "paper's objective",
    "paper240": "paper's objective", "static_norm": "static norm", "think": "ThinK", "iap": "IAP",
    "lowest_frequencies": "lowest frequencies", "duo_attention": "DuoAttention",
}  # fmt: skip
Sample = tuple[str, int | None, str, int]  # task, length, sample and seed of the benchmark
Rows = Mapping[Sample, ResultRow]  # of one method
Line = Mapping[str, object]


def named(method: str) -> tuple[str, str, str] | None:
    """Label, ratio in % and seed ("" without one) that a method's name says; None if `LABELS` lacks it."""
    found = re.fullmatch(r"(.+?)_(0\.\d+|\d+(?:pct)?)(?:_seed(\d+))?", method)
    if found is None or found[1] not in LABELS:
        return None
    share = found[2].removesuffix("pct")
    return LABELS[found[1]], f"{100 * float(share):g}" if "." in share else share, found[3] or ""


def table(rows: Iterable[ResultRow]) -> tuple[list[dict[str, object]], list[str]]:
    """Lines of the CSV, dense first, then by label and ratio; and the methods that lack samples.

    recall, difference (to dense) and difference_seedN are points, kl is nats a token, top1 %, bytes the share of dense;
    kl and top1 are missing where a row has none. Raises ValueError for rows without dense.
    """
    of: dict[str, dict[Sample, ResultRow]] = defaultdict(dict)
    for row in rows:
        of[row["method"]][row["task"], row["length"], row["sample"], row["seed"]] = row
    if "dense" not in of:
        raise ValueError("no row is of dense, which every method is compared with")
    kinds: dict[tuple[str, str], dict[str, Rows]] = defaultdict(dict)  # rows of every seed by label and ratio
    lacking = []
    for method, own in of.items():
        if (found := named(method)) is not None:
            if own.keys() >= of["dense"].keys():
                kinds[found[:2]][found[2]] = own
            else:
                lacking.append(method)
    order, dense = list(dict.fromkeys(LABELS.values())), of["dense"]
    lines = [_line("dense", "", {"": dense}, dense)]
    for label, ratio in sorted(kinds, key=lambda kind: (order.index(kind[0]), float(kind[1]))):
        lines.append(_line(label, ratio, kinds[label, ratio], dense))
    return lines, lacking


def _line(label: str, ratio: str, seeds: Mapping[str, Rows], dense: Rows) -> dict[str, object]:
    """One line of the CSV. seeds: the rows of every seed. dense: the samples that count, as dense answers them."""

    def strata(value: Callable[[ResultRow, ResultRow], float], of: Iterable[Rows] = seeds.values()) -> bootstrap.Strata:
        """A value of each sample, averaged over seeds, by task and length."""
        found: dict[tuple[str, int | None], list[float]] = defaultdict(list)
        for sample, base in dense.items():
            values = [value(own[sample], base) for own in of]
            found[sample[:2]].append(sum(values) / len(values))
        return list(found.values())

    asked = {"recall": strata(lambda row, _: 100 * row["score"])}
    if ratio:
        asked["difference"] = strata(_gain)
    near = {"kl": strata(lambda row, _: _near(row)[0]), "top1": strata(lambda row, _: 100 * _near(row)[1])}
    asked |= {name: found for name, found in near.items() if all(np.isfinite(cell).all() for cell in found)}
    out: dict[str, object] = {"label": label, "ratio": ratio, "seeds": len(seeds), "samples": len(dense)}
    for (name, values), (low, high) in zip(asked.items(), bootstrap.intervals(asked.values()), strict=True):
        means = {name: bootstrap.mean(values), f"{name}_low": low, f"{name}_high": high}
        out |= {key.removeprefix("recall_"): _short(value) for key, value in means.items()}
    sizes = [bootstrap.mean(strata(lambda row, _: row["cache_bytes"]["total"], of)) for of in (seeds.values(), [dense])]
    out["bytes"] = round(sizes[0] / sizes[1], 4)
    for seed, own in sorted(seeds.items()):
        if seed:
            out[f"difference_seed{seed}"] = _short(bootstrap.mean(strata(_gain, [own])))
    return out


def _short(value: float) -> float:
    """Six significant digits; KL of methods differs by powers of ten."""
    return float(f"{value:.6g}")


def _gain(row: ResultRow, dense: ResultRow) -> float:
    """Points of recall above dense."""
    return 100 * (row["score"] - dense["score"])


def _near(row: ResultRow) -> tuple[float, float]:
    """KL from dense and top-1 agreement of a row; NaN where there are none."""
    found = row.get("fidelity")
    if found is None or found["kl"] is None or found["top1"] is None:
        return np.nan, np.nan
    return found["kl"], found["top1"]


def _points(line: Line) -> str:
    """The difference with its interval, then that of each seed."""
    seeds = [f"{value:+.1f}" for key, value in line.items() if key.startswith("difference_seed")]
    mean = f"{line['difference']:+.2f} [{line['difference_low']:.2f}, {line['difference_high']:.2f}]"
    return mean + (f" ({', '.join(seeds)})" if len(seeds) > 1 else "")


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
        ("KL from dense, nats a token; top-1 agreement", _distance),
        ("cache, of dense", lambda line: f"{100 * line['bytes']:.0f}%"),
    ):
        body = [[f"{r}%", *(shown(cells[a, r]) if (a, r) in cells else "" for a in labels)] for r in ratios]
        out += ["", title, "", markdown_table(["K pruned", *map(str, labels)], body)]
    return "\n".join(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of an evaluation")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(argv)
    try:
        rows = list(read(given.folder))
        check_rows(rows)
        check_one_model(rows)
        lines, lacking = table(rows)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"ratios: {in_one_line(str(error))}")
    write_text(given.out, csv_rows(lines))
    print(page(lines))
    if lacking:
        print(f"\nleft out, as samples lack: {', '.join(lacking)}")


if __name__ == "__main__":
    with ending("ratios", lambda: f"the rows are as they were; again: {again('scripts.bench.quality.ratios')}"):
        main()
