"""Quality of a mask against the number of training documents: trains, scores and tabulates a grid of runs.

    python -m scripts.bench.documents train OUT --jobs 14 --grid kl,l2 100,960,16 5 --grid one_document 2000 1
    python -m scripts.bench.documents score OUT --jobs 16
    python -m scripts.bench.documents table OUT --csv docs/results/reference/documents.csv
    python -m scripts.bench.pictures documents docs/results/reference/documents.csv docs/pictures/documents.svg

`train` runs +experiment=reference_90pct once for each of --grid VARIANTS DOCUMENTS SEEDS (seeds 1 to SEEDS), in this
order, --jobs at a time in processes that load libraries once. Documents are those of both stages together; stage 2 has
a sixth of the steps. A step has four documents, or one where there are fewer than 80. OUT/runs/NAME is a run directory,
OUT/logs/NAME.log its output. The variants:

kl               as the experiment is
l2               objective=l2 in both stages; lambda is steered as in kl
usual_momentum   Adam's 0.9 at any number of steps (`steering.momentum` gives short stages less)
one_document     one document per step, four times the steps
stopping         early stopping: 3 looks at held-out documents without a gain end a stage

`score` replays --samples of each of the eight NIAH tasks at --length with every mask that is there, and `table` makes a
line for each mask of which all samples were scored. Each goes on with what OUT holds, and --seconds is the time after
which `train` starts no further run and `score` is to be ended.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from leank import stats
from leank.data_gen.amount import amount
from leank.eval.rows.result_row import ResultRow
from leank.eval.rows.results import Results, read
from leank_train.objective import steering
from scripts.bench.quality import write_table

VARIANTS = ("kl", "l2", "usual_momentum", "one_document", "stopping")
FEW = 80  # documents below which a step has one instead of TOGETHER
TOGETHER = 4
TASKS = 8  # that are scored, each at every length
LOOKS = 25  # of a stage with early stopping, if it looked from its first step on
Cell = tuple[str, int | None, int]  # task, length and seed
Samples = Mapping[Cell, Mapping[str, ResultRow]]  # of each cell, rows by sample


@dataclass(frozen=True)
class Training:
    """One run of the grid.

    variant: one of `VARIANTS`. documents: of both stages. seed: of data and order.
    """

    variant: str
    documents: int
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder, and of its method in rows: kl_100_seed1."""
        return f"{self.variant}_{self.documents}_seed{self.seed}"

    @property
    def together(self) -> int:
        """Documents per step."""
        return 1 if self.documents < FEW or self.variant == "one_document" else TOGETHER

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of stage 1 and of stage 2."""
        both = self.documents // self.together
        return both - round(both / 6), round(both / 6)

    @property
    def overrides(self) -> list[str]:
        """The command line of the run."""
        first, second = self.steps
        more = {
            "l2": ["stage1.objective=l2", "stage2.objective=l2"],
            "usual_momentum": [f"stage1.lr={steering.learning_rate(first)!r}"],  # the same rate; a number means 0.9
            "stopping": [
                f"stage{i}.{key}={value}"
                for i, steps in ((1, first), (2, second))
                for key, value in (("patience", 3), ("heldout_every", max(1, steps // LOOKS)))
            ],
        }.get(self.variant, [])
        return [
            "+experiment=reference_90pct", f"seed={self.seed}", f"data.documents={self.together}",
            f"stage1.steps={first}", f"stage2.steps={second}", "logger=none", "validation.samples=0", *more,
        ]  # fmt: skip


def configured(package: str, name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a command line of `leank_train` (conf.train, train) or `eval` (conf.eval, eval)."""
    with initialize_config_dir(str(files(package)), version_base="1.3"):
        return compose(name, overrides=[*overrides])


def train_one(training: Training, more: Sequence[str], out: Path, stop: float) -> str:
    """Train in OUT/runs/NAME unless its mask is there or the clock is past `stop`; return a line about it."""
    folder, log, begin = out / "runs" / training.name, out / "logs" / f"{training.name}.log", time.time()
    if (folder / "mask.safetensors").exists():
        return f"{training.name}: was there"
    if begin > stop:
        return f"{training.name}: left out"
    from leank_train.train import run

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        try:
            run(configured("leank.conf.train", "train", [*training.overrides, *more]), folder)
        except Exception:
            traceback.print_exc()
            return f"{training.name}: failed, see {log}"
    return f"{training.name}: {time.time() - begin:.1f} s"


def shares(masks: Mapping[str, str], cells: int, jobs: int) -> list[tuple[dict[str, str], str]]:
    """Share the scoring among about `jobs` processes: masks of each, and its shard of the samples, a cell or several.

    Each process takes its masks seed by seed, so that where the clock ends it, seeds are missing and not variants.
    """
    order = sorted(masks, key=lambda name: (name.rpartition("_seed")[2], name))
    shards, groups = min(cells, jobs), max(1, jobs // cells)
    return [
        ({name: masks[name] for name in order[g::groups]}, f"{i}/{shards}")
        for g in range(groups)
        for i in range(shards)
    ]


def score_shard(masks: Mapping[str, str], overrides: Sequence[str], out: Path, shard: str) -> str:
    """Replay one shard of the samples with some masks; return a line about it."""
    from leank.eval.inference.models import load_model
    from leank.eval.run.build import build_job

    config = configured("leank.conf.eval", "eval", [*overrides, f"shard={shard}"])
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    methods = {name: {"channels": {"name": "leank", "mask": mask}} for name, mask in masks.items()}
    plain["method"] = {"dense": {}, **methods}
    job, tokenizer = build_job({str(key): value for key, value in plain.items()})
    part = f"-{shard.replace('/', '-of-')}-{next(iter(masks), 'dense')}"  # its own file
    with Results(out / "rows", part) as results:
        work = job.missing(results.keys)
        new = job.run(results, load_model(job.model), tokenizer) if work else 0
    return f"shard {shard}: {amount(new, 'new row')}"


def difference(dense: Samples, of: Samples) -> dict[str, object] | None:
    """Recall of a method, what it is above dense with the 95% interval, KL and agreement; None unless it is complete.

    dense, of: rows of dense and of the method. What dense was not asked is left out.
    """
    if any(not of.get(cell, {}).keys() >= asked.keys() for cell, asked in dense.items()):
        return None
    apart = [[100 * (of[cell][s]["score"] - row["score"]) for s, row in asked.items()] for cell, asked in dense.items()]
    low, high = stats.interval(apart)
    rows = [[of[cell][s] for s in asked] for cell, asked in dense.items()]
    recall = stats.mean([[100 * row["score"] for row in some] for some in rows])
    found: dict[str, object] = {
        "samples": sum(map(len, rows)), "recall": recall, "minus_dense": stats.mean(apart), "low": low,
        "high": high,
    }  # fmt: skip
    near = [[row["fidelity"] for row in some] for some in rows]
    for key, scale in (("kl", 1.0), ("top1", 100.0)):
        values = [[np.nan if f is None or f[key] is None else scale * f[key] for f in some] for some in near]  # type: ignore[literal-required]
        mean = stats.mean(values)
        found[key] = None if np.isnan(mean) else mean
    return found


def table(out: Path) -> list[dict[str, object]]:
    """A line for dense and for each mask whose samples are complete, by variant, documents and seed."""
    rows: dict[str, dict[Cell, dict[str, ResultRow]]] = defaultdict(lambda: defaultdict(dict))
    for row in read(out / "rows"):
        rows[row["method"]][row["task"], row["length"], row["seed"]][row["sample"]] = row
    dense = rows.pop("dense", {})
    if not dense:
        raise ValueError(f"{out / 'rows'} has no row of dense; score the masks first")
    lines: list[dict[str, object]] = [{"variant": "dense", **(difference(dense, dense) or {})}]
    for name, of in rows.items():
        variant, documents, seed = name.rsplit("_", 2)
        training = Training(variant, int(documents), int(seed.removeprefix("seed")))
        if found := difference(dense, of):
            metrics = json.loads((out / "runs" / name / "metrics.json").read_text())
            lines.append({
                "variant": variant, "documents": training.documents, "seed": training.seed,
                "steps": "+".join(map(str, training.steps)), "documents_a_step": training.together, **found,
                **metrics["separation"], "seconds": metrics["seconds"]["training"],
                **{f"{stage}_{key}": look[at] for stage, look in metrics.get("heldout", {}).items()
                   for key, at in (("best_at", "step"), ("ended_at", "ended"))},
            })  # fmt: skip
    order = [*VARIANTS]
    return lines[:1] + sorted(lines[1:], key=lambda x: (order.index(str(x["variant"])), x["documents"], x["seed"]))


def trainings(grid: Sequence[tuple[str, str, str]]) -> list[Training]:
    """The runs of --grid, each once, in order. Raises ValueError for one that cannot be trained as it says."""
    found: dict[Training, None] = {}
    for variants, numbers, seeds in grid:
        for number, variant in (
            (int(number), variant) for number in numbers.split(",") for variant in variants.split(",")
        ):
            if variant not in VARIANTS:
                raise ValueError(f"{variant} is no variant; choose among {', '.join(VARIANTS)}")
            for seed in range(1, int(seeds) + 1):
                training = Training(variant, number, seed)
                if not min(training.steps) or number % training.together:
                    raise ValueError(f"documents={number} do not fill steps of {training.together} in both stages")
                found[training] = None
    return list(found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `grid` is a list of trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "score", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--grid", nargs=3, action="append", default=[], metavar=("VARIANTS", "DOCUMENTS", "SEEDS"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="tokens of the scored samples")
    parser.add_argument("--samples", type=int, default=100, help="of each task and length")
    parser.add_argument("--seed", type=int, default=7002, help="of the scored samples")
    parser.add_argument("--csv", type=Path, help="where `table` writes")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the runs")
    args = parser.parse_args(argv)
    try:
        args.trainings = trainings(args.grid)
    except ValueError as error:
        parser.error(f"--grid: {error}")
    if (args.action == "table") != (args.csv is not None):
        parser.error("--csv FILE goes with `table`")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args, begin = parse(argv), time.time()
    if args.action == "table":
        write_table(args.csv, table(args.out))
        return
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        if args.action == "train":
            stop = begin + args.seconds
            work = [pool.submit(train_one, training, args.set, args.out, stop) for training in args.trainings]
        else:
            masks = {file.parent.name: str(file) for file in sorted(args.out.glob("runs/*/mask.safetensors"))}
            overrides = [
                "+experiment=reference_masks", f"benchmark.lengths={args.length}",
                f"benchmark.samples={args.samples}", f"benchmark.seed={args.seed}", f"batch_size={args.samples}",
                *args.set,
            ]  # fmt: skip
            parts = shares(masks, TASKS * len(args.length), args.jobs)
            work = [pool.submit(score_shard, some, overrides, args.out, shard) for some, shard in parts]
        for done in as_completed(work):
            print(f"{time.time() - begin:6.1f} s  {done.result()}", flush=True)


if __name__ == "__main__":
    main()
