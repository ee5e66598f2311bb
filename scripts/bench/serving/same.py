"""Whether a server gives the tokens that `compressed_cache` gives: requests of mixed lengths that arrive at random.

    python -m scripts.bench.serving.same OUT cache         # transformers, one request at a time
    python -m scripts.bench.serving.same OUT together      # vLLM, each prompt in one step
    python -m scripts.bench.serving.same OUT preempted     # all that run are preempted now and then, and resumed
    python -m scripts.bench.serving.same OUT prefixes      # with the prefix cache
    python -m scripts.bench.serving.same OUT chunks        # prompts in steps of 128 tokens
    python -m scripts.bench.serving.same OUT crowded       # 32 MiB for pages, which limit how many run at once
    python -m scripts.bench.serving.same OUT stock         # the same without the mask
    python -m scripts.bench.serving.same OUT               # the table of what OUT holds

Replies are greedy; a logprob is that of a reply's token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from scripts.bench.serving.engine import MASK, Served, engine, serve
from transformers import PreTrainedModel

from leank import backbone
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.cache import compressed_cache
from leank.mask import ChannelMask

TASKS = ("niah_single_2", "niah_multikey_2", "niah_multivalue", "vt")
LENGTHS = (800, 1200, 1600)
LAST = (8, 40, 150, 400, 2000, 2000, 2000)  # tokens that stay of a prompt, counted from its end
SINK, WINDOW, REPLY = 16, 144, 32
PREEMPT_EVERY = 12  # steps
WHOLE = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 4096}
VARIANTS: dict[str, dict[str, Any]] = {
    "together": {**WHOLE, "kv_cache_memory_bytes": 2**28},
    "preempted": {**WHOLE, "num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 2**28},
    "prefixes": {**WHOLE, "enable_prefix_caching": True, "kv_cache_memory_bytes": 2**28},
    "chunks": {**WHOLE, "enable_chunked_prefill": True, "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 2**28},
    "crowded": {**WHOLE, "kv_cache_memory_bytes": 2**25},
    "stock": {**WHOLE, "kv_cache_memory_bytes": 2**25},
}


def requests(count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of RULER tasks, some cut at the front, and how many tokens each reply may have."""
    tokenizer, draw = backbone.load_tokenizer("reference"), random.Random(seed)
    benchmark = Ruler(tasks=TASKS, lengths=LENGTHS, samples=-(-count // (len(TASKS) * len(LENGTHS))), seed=seed)
    rows = [benchmark.row(cell, i, tokenizer, 0) for cell in benchmark.cells() for i in cell.samples]
    prompts = []
    for row in draw.sample(rows, count):
        ids = tokenizer(row.prompt + row.answer_prefix)["input_ids"]
        prompts.append(ids[-draw.choice(LAST) :])
    return prompts, [draw.randint(2, REPLY) for _ in prompts]


@torch.no_grad()
def by_cache(model: PreTrainedModel, mask: ChannelMask, prompt: list[int], tokens: int, ends: list[int]) -> Served:
    """The reply of `compressed_cache`; each token leaves the window by itself, as in a server."""
    cache = compressed_cache(model, mask, SINK, WINDOW, flush=1)
    ids, logprobs = torch.tensor([prompt]), []
    reply: list[int] = []
    while len(reply) < tokens and not (reply and reply[-1] in ends):
        logits = model(input_ids=ids, past_key_values=cache).logits[0, -1].float().log_softmax(-1)
        reply.append(int(logits.argmax()))
        logprobs.append(float(logits.max()))
        ids = torch.tensor([reply[-1:]])
    return Served(reply, logprobs, 0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests in one way; returns replies and counts."""
    prompts, tokens = requests(args.requests, args.seed)
    if args.variant == "cache":
        mask, loaded = ChannelMask.load(args.mask), backbone.load("reference", "float32", torch.device("cpu"))
        ends, model = backbone.eos_ids(loaded.model, loaded.tokenizer), loaded.model
        replies = [by_cache(model, mask, *request, ends) for request in zip(prompts, tokens, strict=True)]
        return {"replies": [vars(reply) for reply in replies]}
    settings = {"max_model_len": 2048, "max_num_seqs": 16, "block_size": args.block_size, "dtype": args.dtype}
    llm = engine(None if args.variant == "stock" else args.mask, **{**settings, **VARIANTS[args.variant]})
    every = PREEMPT_EVERY if args.variant == "preempted" else 0
    run = serve(llm, prompts, tokens, args.seed, at_once=4.0, preempt_every=every)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    counts = {"preempted": run.preempted, "together": run.together, "held": held}
    return {"replies": [vars(reply) for reply in run.served], **counts}


def compare(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Count equal replies; measure logprobs up to the first token that differs."""
    same, off, at_split = 0, 0.0, []
    for a, b in zip(wanted["replies"], found["replies"], strict=True):
        same += a["tokens"] == b["tokens"]
        for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)):
            gap = abs(a["logprobs"][i] - b["logprobs"][i])
            if x != y:
                at_split.append(gap)
                break
            off = max(off, gap)
    return {
        "requests": len(found["replies"]), "equal": same, "largest difference of logprobs": round(off, 6),
        "at the token that differs": [round(gap, 6) for gap in at_split],
        "tokens from the prefix cache": sum(reply["cached"] for reply in found["replies"]),
        "preemptions": found["preempted"], "most at once": found["together"], "pages held at the end": found["held"],
    }  # fmt: skip


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("variant", nargs="?", choices=["cache", *VARIANTS])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mask", type=Path, default=MASK)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.variant:
        (args.out / f"{args.variant}.json").write_text(json.dumps(measure(args)))
        return
    wanted = json.loads((args.out / "cache.json").read_text())
    for name in VARIANTS:
        if (args.out / f"{name}.json").is_file():
            print(name, json.dumps(compare(wanted, json.loads((args.out / f"{name}.json").read_text()))))


if __name__ == "__main__":
    main()
