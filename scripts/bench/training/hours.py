"""The hours of an experiment, from the seconds that `scripts.bench.training.step` measured at some lengths."""

from __future__ import annotations

import argparse
import math
from importlib.resources import files
from typing import TypedDict

import numpy as np
from hydra import compose, initialize_config_dir

from leank.data_gen.amount import amount
from leank.files import write_json
from scripts.bench.common.timing import device_name

Results = dict[int, dict[str, dict[str, float]]]  # length -> run -> seconds, first, peak_gb


class Hours(TypedDict):
    """What an experiment takes; hours.json has the device and the shape besides.

    lengths: the shortest and the longest of the experiment.
    pairs: (context, answer) pairs of the experiment.
    measured: lengths that the seconds are fitted through.
    runs: run -> its figures.
    """

    experiment: str
    lengths: list[int]
    pairs: int
    measured: list[int]
    fit: str
    runs: dict[str, dict[str, float]]


def hours(results: Results, experiment: str) -> Hours | None:
    """Hours of the steps of an experiment, from seconds fitted over lengths and averaged over the lengths it draws.

    Returns None where fewer than three lengths are measured, or not the shortest and longest: nothing is extrapolated.
    """
    with initialize_config_dir(str(files("leank.conf.train")), version_base="1.3"):
        config = compose("train", [f"+experiment={experiment}"])
    measured, low, high = sorted(results), config.data.min_length, config.data.max_length
    if len(measured) < 3 or measured[0] > low or measured[-1] < high:
        return None
    pairs = config.stage1.steps + config.stage2.steps  # the paper has one (context, answer) pair per step
    drawn = np.arange(low, high + 1)  # uniform
    rows: dict[str, dict[str, float]] = {}
    for name in set.intersection(*(set(found) for found in results.values())):
        questions = asked(name)
        steps = math.ceil(pairs / questions)
        rows[name] = {"pairs_a_step": questions, "steps": steps}
        for key, of in (("", "seconds"), ("first_", "first")):
            fit = np.polyfit(measured, [results[length][name][of] for length in measured], 2)
            mean = float(np.polyval(fit, drawn).mean())
            rows[name] |= {f"{key}mean_seconds": mean, f"{key}hours": mean * steps / 3600}
    return {
        "experiment": experiment, "lengths": [low, high], "pairs": pairs, "measured": measured,
        "fit": "quadratic through the points" if len(measured) == 3 else "quadratic, least squares",
        "runs": dict(sorted(rows.items(), reverse=True)),
    }  # fmt: skip


def asked(name: str) -> int:
    """Questions per document of a run: 4 of "ours, 4, kl", and 1 of every run that is not of this project."""
    return int(name.split(", ")[1]) if name.startswith("ours") else 1


def write_hours(found: Hours, args: argparse.Namespace) -> None:
    """Write OUT/hours.json and print it."""
    write_json(args.out / "hours.json", {"device": device_name(), "shape": args.shape, **found})
    shortest, longest = found["lengths"]
    print(f"{amount(found['pairs'], 'pair')} at {shortest} to {longest} tokens ({found['fit']}, {found['measured']}):")
    for name, row in found["runs"].items():
        print(f"{name:26s} {row['mean_seconds']:7.3f} s x {amount(int(row['steps']), 'step')} = {row['hours']:6.3f} h; "
              f"every step the first at its length: {row['first_hours']:6.3f} h", flush=True)  # fmt: skip
