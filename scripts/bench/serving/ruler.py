"""RULER through vLLM: what it costs that later chunks and prefix hits read a pruned middle.

    python -m scripts.bench.serving.ruler OUT whole        # every prompt in one step, as in the paper
    python -m scripts.bench.serving.ruler OUT chunks       # in steps of 512 tokens
    python -m scripts.bench.serving.ruler OUT hits         # the context is in the prefix cache, the question follows
    python -m scripts.bench.serving.ruler OUT dense        # without the mask
    python -m scripts.bench.serving.ruler OUT              # the table of what OUT holds

Each appends its scores to OUT/VARIANT.jsonl and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from leank import backbone
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.benchmarks.scoring import score_row
from leank.stats import interval
from scripts.bench.serving.engine import MASK, engine, serve

TASKS = ("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt")
CHUNK = 512
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 8192},
    "chunks": {"enable_chunked_prefill": True, "enable_prefix_caching": False, "max_num_batched_tokens": CHUNK},
    "hits": {"enable_chunked_prefill": False, "enable_prefix_caching": True, "max_num_batched_tokens": 8192},
}
VARIANTS["dense"] = VARIANTS["whole"]


def measure(args: argparse.Namespace, out: Path) -> None:
    """Append the scores that `out` lacks, eight samples at a time."""
    tokenizer = backbone.load_tokenizer("reference")
    benchmark = Ruler(tasks=TASKS, lengths=(args.length,), samples=args.samples, seed=args.seed)
    have = {(line["task"], line["sample"]) for line in lines(out)}
    todo = [(cell, i) for i in range(args.samples) for cell in benchmark.cells() if (cell.task, i) not in have]
    if not todo:
        return
    mask = None if args.variant == "dense" else args.mask
    llm = engine(mask, max_model_len=8192, max_num_seqs=8, kv_cache_memory_bytes=2**30, **VARIANTS[args.variant])
    for start in range(0, len(todo), 8):
        some = todo[start : start + 8]
        rows = [benchmark.row(cell, str(i), tokenizer, 0) for cell, i in some]
        if args.variant == "hits":
            contexts = [tokenizer(row.context)["input_ids"] for row in rows]
            serve(llm, contexts, [1] * len(rows))
        prompts = [tokenizer(row.prompt + row.answer_prefix)["input_ids"] for row in rows]
        served = serve(llm, prompts, [row.max_new_tokens for row in rows], at_once=4).served
        with out.open("a") as file:
            for (cell, i), row, of in zip(some, rows, served, strict=True):
                reply = str(tokenizer.decode(of.tokens, skip_special_tokens=True))
                line = {"task": cell.task, "sample": i, "score": score_row(row, reply), "cached": of.cached}
                print(json.dumps(line), file=file)


def lines(path: Path) -> list[dict[str, Any]]:
    """The scores of a file, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(out: Path) -> None:
    """Print recall by task, and the difference from whole prompts with its 95% interval, on samples that all have."""
    found = {name: {(x["task"], x["sample"]): x for x in lines(out / f"{name}.jsonl")} for name in VARIANTS}
    found = {name: scores for name, scores in found.items() if scores}
    both = set.intersection(*(set(scores) for scores in found.values()))
    of_task = {task: sorted(i for t, i in both if t == task) for task in TASKS}
    print(f"| prompts | {' | '.join(f'{t} ({len(s)})' for t, s in of_task.items())} | difference | tokens hit |")
    print("|---" * (len(TASKS) + 3) + "|")
    for name, scores in found.items():
        points = {task: [100 * scores[task, i]["score"] for i in of_task[task]] for task in TASKS}
        cells = [f"{sum(p) / len(p):.1f}" for p in points.values()]
        paired = [[100 * (scores[t, i]["score"] - found["whole"][t, i]["score"]) for i in of_task[t]] for t in TASKS]
        low, high = interval(paired)
        mean = sum(sum(p) / len(p) for p in paired) / len(paired)
        hit = sum(scores[key]["cached"] for key in both) / len(both)
        print(f"| {name} | {' | '.join(cells)} | {mean:+.1f} [{low:+.1f}, {high:+.1f}] | {hit:.0f} |")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("variant", nargs="?", choices=list(VARIANTS))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=7011)
    parser.add_argument("--mask", type=Path, default=MASK)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.variant:
        measure(args, args.out / f"{args.variant}.jsonl")
    else:
        table(args.out)


if __name__ == "__main__":
    main()
