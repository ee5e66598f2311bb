r"""Scores of a benchmark whose replies a vLLM server writes, with each of its caches.

    python -m scripts.bench.serving_scores OUT --model MODEL --caches auto fp8 LAYOUT.safetensors \
        --evaluation benchmark=ruler 'benchmark.lengths=[4096,16384]' benchmark.samples=16

A cache is one of vLLM's `--kv-cache-dtype`, or a mask's file; each has an engine in a process of its own, one after the
other. --evaluation are settings of `python -m leank.eval`, which say the samples and the longest replies; methods
are none of them. Samples, prompts and scorers are those of the replay, and replies are greedy, but the server computes
every token itself: masks and layouts prefill dense, vLLM's own caches read what they have stored.

A row of OUT/results-CACHE.jsonl is a reply, as the replay's, so that `python -m leank.eval report OUT` has the tables
and paired intervals, auto is called dense, and a run that was cut off goes on. Its bytes are those of the pages that
vLLM counts for a request of the longest length, divided by that length and times the prompt's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from leank.shipped import resolve


def parsed() -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", default=resolve("reference"), help="a folder")
    parser.add_argument("--caches", nargs="+", default=["auto", "fp8"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default="{}", help="more of vllm.LLM, as JSON")
    parser.add_argument("--here", metavar="CACHE", help="this cache alone, in this process")
    parser.add_argument("--evaluation", nargs="+", default=[], metavar="SETTING", help="of python -m leank.eval")
    return parser.parse_args()


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

from leank.eval.benchmarks.base import Cell
from leank.eval.inference.prompts import encode, overhead
from leank.eval.methods import Method
from leank.eval.rows import Results
from leank.eval.run.build import build_job, composed
from leank.eval.run.job import Job
from leank.eval.run.replay import Answer
from leank.eval.serving import check
from scripts.bench.serving import engine


class Served(Method):
    """A cache of the server, which stands in a row where a method of the replay does."""

    def config(self) -> dict[str, object]:
        """What the replies depend on."""
        return {} if self.label == "dense" else {"served": self.label}


def replies(llm: Any, job: Job, tokenizer: Any, cell: Cell, method: Method, results: Results) -> list[float]:
    """Ask for the replies of a cell that are missing, all at once; returns their scores, 0 to 1."""
    from vllm import SamplingParams

    config, chat = llm.llm_engine.vllm_config, job.model.chat
    eos = config.model_config.try_get_generation_config().get("eos_token_id", tokenizer.eos_token_id)
    pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_tensors
    token_bytes = sum(tensor.size for tensor in pages) / config.cache_config.kv_cache_size_tokens
    rows = [job.benchmark.row(cell, sample, tokenizer, overhead(tokenizer, chat)) for sample in cell.samples]
    asked = []
    for row in rows:
        prompt = encode(tokenizer, row, chat, job.settings.specials)
        if (key := job.key(method, cell, row.id, prompt.specials)) not in results.keys:
            ends = [tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in row.ends]
            params = SamplingParams(
                temperature=0, detokenize=False, max_tokens=job.settings.max_new_tokens or row.max_new_tokens,
                min_tokens=job.settings.min_new_tokens or row.min_new_tokens,
                stop_token_ids=[*([eos] if isinstance(eos, int) else eos), *ends],
            )  # fmt: skip
            asked.append((key, row, prompt, params))
    outputs = llm.generate(
        [{"prompt_token_ids": prompt.ids} for _, _, prompt, _ in asked], [p for *_, p in asked], use_tqdm=False
    )
    scores = []
    for (key, row, prompt, _), output in zip(asked, outputs, strict=True):
        reply = output.outputs[0]
        answer = Answer(
            list(reply.token_ids), tokenizer.decode(reply.token_ids, skip_special_tokens=True),
            dict.fromkeys(("prefill", "seal", "question", "decode"), 0.0), len(reply.token_ids),
            reply.finish_reason == "length", len(asked), {"total": token_bytes * len(prompt.ids)},
            compressed=None if method.label == "dense" else True,
        )  # fmt: skip
        results.append(made := job.result(key, method, row, prompt, answer))
        scores.append(made["score"])
    return scores


def one(args: argparse.Namespace, cache: str) -> None:
    """Let one cache reply, in this process."""
    mask = Path(cache) if Path(cache).exists() else None
    own = [f"model.name={args.model}", f"model.dtype={args.dtype}", "method=[dense]"]
    job, tokenizer = build_job(composed([*args.evaluation, *own]))
    method = Served("dense" if cache == "auto" else cache if mask is None else mask.stem)
    most = job.settings.max_new_tokens or 512
    settings = {
        "model": args.model, "dtype": args.dtype, "skip_tokenizer_init": True, "enforce_eager": False,
        "block_size": 64, "kv_cache_dtype": "auto" if mask is not None else cache, "enable_prefix_caching": False,
        "max_model_len": max(cell.length or 0 for cell in job.benchmark.cells()) + most, **json.loads(args.settings),
    }  # fmt: skip
    with Results(args.out, f"-{method.label}") as results:
        llm = engine(mask, **settings)
        if mask is not None:
            check(llm)
        for cell in job.benchmark.cells():
            scores = replies(llm, job, tokenizer, cell, method, results)
            print(f"{method.label}, {cell.place}: {100 * sum(scores) / max(1, len(scores)):.1f}%", flush=True)


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    if args.here:
        one(args, args.here)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, "-m", "scripts.bench.serving_scores", str(args.out), "--model", args.model]
    own += ["--dtype", args.dtype, "--settings", args.settings, "--evaluation", *args.evaluation, "--here"]
    failed = [cache for cache in args.caches if subprocess.run([*own, cache]).returncode]
    sys.exit(f"no scores of {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
