r"""Scores of a benchmark whose replies a vLLM server writes, with each of its caches.

    python -m scripts.bench.serving_scores OUT --model MODEL --caches auto fp8 LAYOUT.safetensors \
        --evaluation benchmark=ruler 'benchmark.lengths=[4096,16384]' benchmark.samples=16

A cache is one of vLLM's `--kv-cache-dtype`, or a mask's file; each has an engine in a process of its own, one after the
other. --evaluation are settings of `python -m leank.eval`, which say the samples and the longest replies; methods
are none of them. Samples, prompts and scorers are those of the replay, and replies are greedy, but the server computes
every token itself: masks and layouts prefill dense, vLLM's own caches read what they have stored.

A row of OUT/results-CACHE.jsonl is a reply, as the replay's but without times, so that `python -m leank.eval report
OUT` has the tables and paired intervals. auto is called dense. A run that was cut off goes on; other --settings want
another OUT. A row's bytes are its prompt's share of all pages, where they hold as many tokens as vLLM says that they
admit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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

from leank.eval.benchmarks.base import Cell, Row
from leank.eval.inference.prompts import Prompt, encode, overhead
from leank.eval.methods import Method
from leank.eval.rows import Results, key_of, read
from leank.eval.run.build import build_job, composed
from leank.eval.run.job import Job
from leank.eval.run.replay import Answer
from leank.eval.serving import check
from scripts.bench.serving import engine

Asked = tuple[Row, Prompt, int]  # a sample, its tokens, and the most tokens of its reply


@dataclass(frozen=True)
class Served(Method):
    """A cache of the server, which stands in a row where a method of the replay does; mask: digest of its file."""

    mask: str | None = None

    @classmethod
    def of(cls, cache: str) -> Self:
        """The cache of this name, or of a mask's file."""
        file = Path(cache)
        return cls(label(cache), mask=hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else None)

    def config(self) -> dict[str, object]:
        """What the replies depend on, beside the engine's settings."""
        found: dict[str, object] = {} if self.label == "dense" else {"served": self.label}
        return found if self.mask is None else {**found, "mask": self.mask}


def label(cache: str) -> str:
    """What a cache is called in tables."""
    return "dense" if cache == "auto" else Path(cache).stem if Path(cache).exists() else cache


def asked_for(job: Job, tokenizer: Any) -> dict[Cell, list[Asked]]:
    """All samples of an evaluation. Raises ValueError for settings that a server's replies would not follow."""
    settings, found = job.settings, dict[Cell, list[Asked]]()
    for wrong, what in (
        (
            settings.sampling.temperature > 0,
            f"sampling.temperature={settings.sampling.temperature}; replies are greedy",
        ),
        (settings.compress != "after_question", f"compress={settings.compress}; a server knows no question"),
        (settings.numbered_shard != (0, 1), f"shard={settings.shard}; give --caches that are not in OUT"),
    ):
        if wrong:
            raise ValueError(what)
    for cell in job.benchmark.cells():
        made = [job.benchmark.row(cell, name, tokenizer, overhead(tokenizer, job.model.chat)) for name in cell.samples]
        if cell.turns > 1 or any(row.read for row in made):
            raise ValueError(f"benchmark={job.benchmark.name}: it has conversations or texts, and no single replies")
        prompts = [encode(tokenizer, row, job.model.chat, settings.specials) for row in made]
        most = [settings.max_new_tokens or row.max_new_tokens for row in made]
        found[cell] = list(zip(made, prompts, most, strict=True))
    return found


def pool_bytes(llm: Any, mask: bool) -> int:
    """Bytes of all pages. The two groups of a mask name the same memory; vLLM's layers have some each."""
    if mask:
        return int(
            llm.collective_rpc("leank_report")[0]["block_bytes"]
            * llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        )
    pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_tensors
    return sum(tensor.size for tensor in pages)


def reply_to(
    llm: Any, job: Job, tokenizer: Any, cell: Cell, samples: Sequence[Asked], method: Served, results: Results,
    token_bytes: float,
) -> None:  # fmt: skip
    """Ask for the replies of a cell that are missing, all at once, and store them.

    token_bytes: of the pages, for a token of a request
    """
    from vllm import SamplingParams

    found = llm.llm_engine.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    eos = tokenizer.eos_token_id if found is None else found
    keys = [job.key(method, cell, row.id, prompt.specials) for row, prompt, _ in samples]
    lacking = [(key, *one) for key, one in zip(keys, samples, strict=True) if key not in results.keys]
    params = [
        SamplingParams(
            temperature=0, detokenize=False, max_tokens=most,
            min_tokens=job.settings.min_new_tokens or row.min_new_tokens,
            stop_token_ids=[
                *([eos] if isinstance(eos, int) else eos),
                *(tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in row.ends),
            ],
        ) for _, row, _, most in lacking
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt.ids} for _, _, prompt, _ in lacking], params, use_tqdm=False)
    for (key, row, prompt, _), output in zip(lacking, outputs, strict=True):
        reply = output.outputs[0]
        answer = Answer(
            list(reply.token_ids), tokenizer.decode(reply.token_ids, skip_special_tokens=True),
            dict.fromkeys(("prefill", "seal", "question", "decode"), 0.0), len(reply.token_ids),
            reply.finish_reason == "length", len(lacking), {"total": token_bytes * len(prompt.ids)},
            compressed=None if method.label == "dense" else True,
        )  # fmt: skip
        made = job.result(key, method, row, prompt, answer)
        made["seconds"] = dict.fromkeys(made["seconds"])  # not measured
        results.append(made)


def one(args: argparse.Namespace, cache: str) -> None:
    """Let one cache reply, in this process."""
    mask = Path(cache) if Path(cache).exists() else None
    own = [f"model.name={args.model}", f"model.dtype={args.dtype}", "method=[dense]"]
    job, tokenizer = build_job(composed([*args.evaluation, *own]))
    method, wanted = Served.of(cache), asked_for(job, tokenizer)
    settings = {
        "model": args.model, "dtype": args.dtype, "skip_tokenizer_init": True, "enforce_eager": False,
        "block_size": 64, "kv_cache_dtype": "auto" if mask is not None else cache, "enable_prefix_caching": False,
        "max_model_len": max(len(prompt.ids) + most for samples in wanted.values() for _, prompt, most in samples),
        **json.loads(args.settings),
    }  # fmt: skip
    with Results(args.out, f"-{method.label}") as results:
        llm = engine(mask, **settings)
        if mask is not None:
            check(llm)
        token_bytes = pool_bytes(llm, mask is not None) / llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        for cell, samples in wanted.items():
            reply_to(llm, job, tokenizer, cell, samples, method, results, token_bytes)
            keys = {job.key(method, cell, row.id, prompt.specials) for row, prompt, _ in samples}
            scores = [row["score"] for row in read(results.path) if key_of(row) in keys]
            print(f"{method.label}, {cell.place}: {100 * sum(scores) / len(scores):.1f}%", flush=True)


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    if args.here:
        one(args, args.here)
        return
    for name, count in Counter(map(label, args.caches)).items():
        if count > 1:
            sys.exit(f"--caches: {count} of them are called {name}; give each file a name of its own")
    args.out.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, "-m", "scripts.bench.serving_scores", str(args.out), "--model", args.model]
    own += ["--dtype", args.dtype, "--settings", args.settings, "--evaluation", *args.evaluation, "--here"]
    failed = [cache for cache in args.caches if subprocess.run([*own, cache]).returncode]
    sys.exit(f"no scores of {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
