"""A vLLM server with the plug-in: replies equal to those of `compressed_cache`, and a load of requests.

    python -m scripts.bench.serving same OUT cache         # transformers, one request at a time
    python -m scripts.bench.serving same OUT together      # vLLM, each prompt in one step
    python -m scripts.bench.serving same OUT preempted     # all that run are preempted now and then, and resumed
    python -m scripts.bench.serving same OUT prefixes      # with the prefix cache
    python -m scripts.bench.serving same OUT chunks        # prompts in steps of 128 tokens
    python -m scripts.bench.serving same OUT crowded       # 32 MiB for pages, which limit how many run at once
    python -m scripts.bench.serving same OUT stock         # the same without the mask
    python -m scripts.bench.serving same OUT               # the table of what OUT holds
    python -m scripts.bench.serving load http://127.0.0.1:8000 --requests 500

They run in an environment with vLLM (`make vllm-test` makes one), not in the one of the other benchmarks.

same  requests of mixed lengths arrive while others decode; replies are greedy, a logprob is that of a reply's token
load  streamed requests on a running `vllm.entrypoints.openai.api_server`, some of which are cancelled: none may be
      lost, no page may stay held. Prints how many ended by themselves, how many were cancelled, how long it took, and
      the share of pages held at the end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from leank import backbone
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.cache import compressed_cache
from leank.mask import ChannelMask
from leank.shipped import resolve

if TYPE_CHECKING:
    from aiohttp import ClientSession

REFERENCE = Path(resolve("reference"))
MASK = REFERENCE / "mask_70pct.safetensors"
TASKS = ("niah_single_2", "niah_multikey_2", "niah_multivalue", "vt")
LENGTHS = (800, 1200, 1600)
LAST = (8, 40, 150, 400, 2000, 2000, 2000)  # tokens that stay of a prompt, counted from its end
SINK, WINDOW, REPLY = 16, 144, 32
PREEMPT_EVERY = 12  # steps
WHOLE = {
    "enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 2**28,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "together": WHOLE,
    "preempted": {**WHOLE, "num_gpu_blocks_override": 160},
    "prefixes": {**WHOLE, "enable_prefix_caching": True},
    "chunks": {**WHOLE, "enable_chunked_prefill": True, "max_num_batched_tokens": 128},
    "crowded": {**WHOLE, "kv_cache_memory_bytes": 2**25},
    "stock": {**WHOLE, "kv_cache_memory_bytes": 2**25},
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
AT_ONCE = 32  # requests under way at a time
PATIENCE = 60  # seconds until the server has freed what cancelled requests held


# same


@dataclass(frozen=True)
class Served:
    """What became of one request.

    tokens: of the reply. logprobs: of each of these tokens. cached: tokens of the prompt from the prefix cache.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int


def engine(mask: Path | None, **settings: Any) -> Any:
    """Start vLLM in this process; a process can start one engine.

    mask: None = without the plug-in. settings: of vLLM's `LLM`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    additional = {"leank": {"mask": str(mask)}} if mask is not None else {}
    from vllm import LLM

    common = {"model": str(REFERENCE), "dtype": "float32", "enforce_eager": True, "block_size": 32}
    return LLM(additional_config=additional, **{**common, **settings})


def serve(llm: Any, prompts: Sequence[list[int]], tokens: Sequence[int], preempt_every: int) -> Any:
    """Let four requests arrive before each step; return `Served` of each, and counts.

    prompts: token ids. tokens: most tokens of each reply, which also ends at the model's end of text.
    preempt_every: steps after which all that run are preempted, 0 = only when pages run out.
    """
    from vllm import SamplingParams

    core, sent, steps, together = llm.llm_engine, 0, 0, 0
    done: dict[int, Served] = {}
    scheduler = core.engine_core.engine_core.scheduler
    preempted: set[tuple[str, int]] = set()
    while len(done) < len(prompts):
        idle = not core.has_unfinished_requests()
        for _ in range(min(4 + idle, len(prompts) - sent)):
            params = SamplingParams(temperature=0, max_tokens=tokens[sent], logprobs=0)
            core.add_request(str(sent), {"prompt_token_ids": prompts[sent]}, params)
            sent += 1
        steps += 1
        if preempt_every and not steps % preempt_every:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        for output in core.step():
            if output.finished:
                reply = output.outputs[0]
                ids = list(reply.token_ids)
                logprobs = [found[token].logprob for token, found in zip(ids, reply.logprobs, strict=True)]
                done[int(output.request_id.split("-")[0])] = Served(ids, logprobs, output.num_cached_tokens or 0)
        together = max(together, len(scheduler.running))
        preempted |= {(r.request_id, r.num_preemptions) for r in scheduler.requests.values() if r.num_preemptions}
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return [done[i] for i in range(len(prompts))], {"preempted": len(preempted), "together": together, "held": held}


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
        ends = backbone.eos_ids(loaded.model, loaded.tokenizer)
        replies = [by_cache(loaded.model, mask, *request, ends) for request in zip(prompts, tokens, strict=True)]
        return {"replies": [vars(reply) for reply in replies]}
    settings = {"max_model_len": 2048, "max_num_seqs": 16, "block_size": args.block_size, "dtype": args.dtype}
    llm = engine(None if args.variant == "stock" else args.mask, **{**settings, **VARIANTS[args.variant]})
    found, counts = serve(llm, prompts, tokens, PREEMPT_EVERY if args.variant == "preempted" else 0)
    return {"replies": [vars(reply) for reply in found], **counts}


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


# load


async def ask(session: ClientSession, model: str, draw: random.Random) -> str:
    """Stream one reply, or hang up after some pieces of it; returns how it ended."""
    prompt = " ".join(draw.choices(WORDS, k=draw.randint(2, 300)))
    tokens, leave_after = draw.randint(2, 40), draw.choice([None, None, 0, 1, 5])
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    pieces, how = 0, ""
    async with session.post("/v1/completions", json=body) as reply:
        if reply.status != 200:
            return f"status {reply.status}"
        async for line in reply.content:
            if leave_after is not None and pieces >= leave_after:
                return "cancelled"
            if line.startswith(b"data: {"):
                choice = json.loads(line[len(b"data: ") :])["choices"][0]
                pieces, how = pieces + 1, choice["finish_reason"] or how
    return f"finished by {how}" if how else "lost"


async def gauges(session: ClientSession) -> dict[str, float]:
    """The server's gauges of running and waiting requests and of pages held."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    async with session.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for name in names
    }


async def load(url: str, count: int, seed: int) -> dict[str, object]:
    """Send the load; returns counts of how requests ended, and the gauges afterwards."""
    import aiohttp

    draw, limit, begin = random.Random(seed), asyncio.Semaphore(AT_ONCE), time.monotonic()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]

        async def one(own: random.Random) -> str:
            async with limit:
                return await ask(session, model, own)

        ends = await asyncio.gather(*(one(random.Random(draw.random())) for _ in range(count)))
        seconds, held = time.monotonic() - begin, await gauges(session)
        while any(held.values()) and time.monotonic() - begin - seconds < PATIENCE:
            await asyncio.sleep(0.5)
            held = await gauges(session)
    return {"requests": count, **Counter(ends), "seconds": round(seconds, 1), **held}


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["same", "load"])
    parser.add_argument("where", metavar="OUT|URL", help="same: folder; load: of the server")
    parser.add_argument("variant", nargs="?", choices=["cache", *VARIANTS], help="same")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=32, help="same")
    parser.add_argument("--dtype", default="float32", help="same")
    parser.add_argument("--mask", type=Path, default=MASK, help="same")
    args = parser.parse_args()
    if args.action == "load":
        print(json.dumps(asyncio.run(load(args.where, args.requests, args.seed))))
        return
    out = Path(args.where)
    out.mkdir(parents=True, exist_ok=True)
    if args.variant:
        (out / f"{args.variant}.json").write_text(json.dumps(measure(args)))
        return
    found = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    for name in VARIANTS:
        if name in found:
            print(name, json.dumps(compare(found["cache"], found[name])))


if __name__ == "__main__":
    main()
