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
    python -m scripts.bench.serving offline OUT --at-once 1 8 64 256 --lengths 2048 65536
    python -m scripts.bench.serving offline OUT --seconds 600 --cancel 0.4   # again and again, for ten minutes
    python -m scripts.bench.serving speed OUT --batches 1x4096 64x4096 8x32768
    python -m scripts.bench.serving speed OUT --stock --kv-cache-dtype fp8   # without the mask, K and V in 8 bits

They run in an environment with vLLM (`make vllm-test` makes one), not in the one of the other benchmarks.

same  requests of mixed lengths arrive while others decode; replies are greedy, a logprob is that of a reply's token
load  streamed requests on a running `vllm.entrypoints.openai.api_server`, some of which are cancelled: none may be
      lost, no page may stay held. Prints how many ended by themselves, how many were cancelled, how long it took, and
      the share of pages held at the end
offline
      a load on an engine in this process, one row per bound on the requests under way (`--stock` = without the mask).
      Requests arrive at random (Poisson), half of them behind a shared prefix, and some are cancelled. A fixed set of
      prompts is asked before, during and after the load; a wrong reply is one that differs although the model was sure.
      With `--seconds`, a bound has a load after the other, each with another seed and a row
speed a row per batch of prompts that are sent at once: the time until the first of them has a token, and the median
      time of the steps in which all of them decode (`--stock` = without the mask)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank.shipped import resolve

REFERENCE = Path(resolve("reference"))
MASK = REFERENCE / "mask_70pct.safetensors"
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
AT_ONCE = 32  # requests under way at a time


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line, `argv` or those of this process; ends the process where they do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["same", "load", "offline", "speed"])
    parser.add_argument("where", metavar="OUT|URL", help="load: of the server; else a folder")
    parser.add_argument("variant", nargs="?", choices=["cache", *VARIANTS], help="same")
    parser.add_argument("--requests", type=int, nargs="+", default=[200], help="offline: one, or one per --at-once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=32, help="of same, offline and speed")
    parser.add_argument("--dtype", default="float32", help="of same, offline and speed")
    parser.add_argument("--mask", type=Path, default=MASK, help="of same, offline and speed")
    parser.add_argument("--model", default=str(REFERENCE), help="offline, speed: a folder")
    parser.add_argument("--stock", action="store_true", help="offline, speed: without the mask")
    parser.add_argument("--settings", default="{}", help="more settings of vllm.LLM, as JSON")
    parser.add_argument("--at-once", type=int, nargs="+", default=[AT_ONCE], help="offline: requests under way")
    parser.add_argument(
        "--batches", nargs="+", default=["1x1024", "4x1024"], help="speed: requests x tokens of a prompt"
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[4], help="offline: requests that arrive in a second, as --requests"
    )
    parser.add_argument("--seconds", type=float, default=0, help="offline: of loads with other seeds, per --at-once")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="offline, speed: of K and V in vLLM's cache, such as fp8 with --stock"
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=(512, 2048), help="offline: tokens of a prompt")
    parser.add_argument("--reply", type=int, default=64, help="offline: most tokens of a reply")
    parser.add_argument("--cancel", type=float, default=0.2, help="offline: share of requests")
    args = parser.parse_args(argv)
    for name in ("requests", "rate"):
        given = len(getattr(args, name))
        if given != 1 and (args.action != "offline" or given != len(args.at_once)):
            parser.error(f"--{name} has {given} values: give one, or with offline one per value of --at-once")
    if args.kv_cache_dtype != "auto" and not args.stock:
        parser.error(f"--kv-cache-dtype {args.kv_cache_dtype}: the cache of a mask has the model's dtype; add --stock")
    return args


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import torch
from transformers import PreTrainedModel

from leank import backbone
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.cache import compressed_cache
from leank.eval.serving import check
from leank.eval.serving.settings import ServerSettings
from leank.mask import ChannelMask
from leank.versions import CACHE

if TYPE_CHECKING:
    from aiohttp import ClientSession

TASKS = ("niah_single_2", "niah_multikey_2", "niah_multivalue", "vt")
LENGTHS = (800, 1200, 1600)
LAST = (8, 40, 150, 400, 2000, 2000, 2000)  # tokens that stay of a prompt, counted from its end
REPLY = 32
PREEMPT_EVERY = 12  # steps
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
PATIENCE = 60  # seconds until the server has freed what cancelled requests held
PROBES = 8  # prompts whose replies are compared before, during and after a load
PREFIXES = 4  # shared prefixes, each half as long as the shortest prompt
STEPS = 60  # in which all requests of a batch decode
SURE = 0.5  # nats by which the best token leads the second; rounding changes no such token


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

    common: dict[str, Any] = {"model": str(REFERENCE), "dtype": "float32", "enforce_eager": True, "block_size": 32}
    if mask is not None and torch.cuda.is_available():
        common["attention_config"] = {"backend": "CUSTOM"}
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
    counts = {"preempted": len(preempted), "together": together, "held": pages_held(llm)}
    return [done[i] for i in range(len(prompts))], counts


def pages_held(llm: Any) -> int:
    """How many pages of an engine belong to requests."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


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
def by_cache(
    model: PreTrainedModel, mask: ChannelMask, ends: tuple[int, int], prompt: list[int], tokens: int, stops: list[int]
) -> Served:
    """The reply of `compressed_cache`; tokens leave the window as in a server: one by one, or page by page.

    ends: tokens of sink and window. tokens: most of the reply. stops: tokens that end it.
    """
    cache = compressed_cache(model, mask, *ends, **({"flush": 1} if mask.precision is None else {"grid": "absolute"}))
    ids, logprobs = torch.tensor([prompt]), []
    reply: list[int] = []
    while len(reply) < tokens and not (reply and reply[-1] in stops):
        logits = model(input_ids=ids, **{CACHE: cache}).logits[0, -1].float().log_softmax(-1)
        reply.append(int(logits.argmax()))
        logprobs.append(float(logits.max()))
        ids = torch.tensor([reply[-1:]])
    return Served(reply, logprobs, 0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests in one way; returns replies and counts."""
    prompts, tokens = requests(args.requests[0], args.seed)
    if args.variant == "cache":
        mask, loaded = ChannelMask.load(args.mask), backbone.load("reference", "float32", torch.device("cpu"))
        found = ServerSettings.find({"leank": {"mask": str(args.mask)}}, {})
        assert found is not None
        stops, ends = backbone.eos_ids(loaded.model, loaded.tokenizer), (found.sink, found.window)
        replies = [by_cache(loaded.model, mask, ends, *request, stops) for request in zip(prompts, tokens, strict=True)]
        return {"replies": [vars(reply) for reply in replies]}
    settings = {"max_model_len": 2048, "max_num_seqs": 16, "block_size": args.block_size, "dtype": args.dtype}
    settings |= {**VARIANTS[args.variant], **json.loads(args.settings)}
    llm = engine(None if args.variant == "stock" else args.mask, **settings)
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
    """Stream one reply, or hang up after some pieces of it; returns how it ended.

    Raises aiohttp.ClientError where the server does not answer.
    """
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
                piece = json.loads(line[len(b"data: ") :])
                if "choices" not in piece:  # the server says what went wrong
                    return "error"
                pieces, how = pieces + 1, piece["choices"][0]["finish_reason"] or how
    return f"finished by {how}" if how else "lost"


async def gauges(session: ClientSession) -> dict[str, float]:
    """The server's gauges of running and waiting requests and of pages held.

    Raises aiohttp.ClientError where the server does not answer.
    """
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    async with session.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for name in names
    }


async def load(url: str, count: int, seed: int) -> dict[str, object]:
    """Send the load; returns counts of how requests ended, and the gauges afterwards, if there is a server still."""
    import aiohttp

    draw, limit, begin = random.Random(seed), asyncio.Semaphore(AT_ONCE), time.monotonic()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]

        async def one(own: random.Random) -> str:
            async with limit:
                try:
                    return await ask(session, model, own)
                except aiohttp.ClientError:
                    return "not answered"

        ends = Counter(await asyncio.gather(*(one(random.Random(draw.random())) for _ in range(count))))
        seconds, held = time.monotonic() - begin, {}
        with suppress(aiohttp.ClientError):
            held = await gauges(session)
            while any(held.values()) and time.monotonic() - begin - seconds < PATIENCE:
                await asyncio.sleep(0.5)
                held = await gauges(session)
    return {"requests": count, **ends, "seconds": round(seconds, 1), **held}


# offline


@dataclass(frozen=True)
class Load:
    """A load of requests.

    count: of requests
    at_once: how many may be under way
    rate: requests that arrive in a second, 0 = all at once
    shortest, longest: tokens of a prompt, whose logarithm is uniform
    reply: most tokens of a reply
    cancel: share of the requests that are cancelled at some token
    """

    count: int
    at_once: int
    rate: float
    shortest: int
    longest: int
    reply: int
    cancel: float = 0.2


@dataclass
class Asked:
    """A request, and what has become of it.

    prompt: token ids
    tokens: of the whole reply
    due: seconds after the start at which it arrives
    leave: tokens of the reply after which it is cancelled, None = never
    probe: whether its reply is compared
    reads: whether it may read the prefix cache
    times: seconds after the start at which its tokens came
    reply, logprobs: its tokens so far, and for a probe the two best tokens at each
    cached: tokens of the prompt from the prefix cache
    end: how it ended
    """

    prompt: list[int]
    tokens: int
    due: float = 0.0
    leave: int | None = None
    probe: bool = False
    reads: bool = True
    times: list[float] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    cached: int = 0
    end: str = "lost"


def drive(llm: Any, asked: Sequence[Asked], at_once: int) -> float:
    """Send requests when they are due and step until all have ended; returns the seconds that took."""
    from vllm import SamplingParams

    core, begin, left = llm.llm_engine, time.monotonic(), sorted(range(len(asked)), key=lambda i: -asked[i].due)
    open_: dict[str, Asked] = {}
    while left or open_:
        now = time.monotonic() - begin
        while left and len(open_) < at_once and asked[left[-1]].due <= now:
            one = asked[left[-1]]
            top = 2 if one.probe else None
            params = SamplingParams(
                temperature=0, max_tokens=one.tokens, ignore_eos=True, logprobs=top, detokenize=False,
                skip_reading_prefix_cache=not one.reads,
            )  # fmt: skip
            core.add_request(str(left[-1]), {"prompt_token_ids": one.prompt}, params)
            open_[str(left.pop())] = one
        if not open_:
            time.sleep(max(0.0, asked[left[-1]].due - now))
            continue
        outputs, now = core.step(), time.monotonic() - begin
        for output in outputs:
            one, reply = open_[output.request_id], output.outputs[0]
            one.times += [now] * (len(reply.token_ids) - len(one.reply))
            one.reply, one.logprobs, one.cached = (
                list(reply.token_ids),
                reply.logprobs or [],
                output.num_cached_tokens or 0,
            )
            one.end = "finished" if output.finished else one.end
        for name, one in list(open_.items()):
            if one.end == "lost" and one.leave is not None and len(one.reply) >= one.leave:
                core.abort_request([name])
                one.end = "cancelled"
            if one.end != "lost":
                del open_[name]
    return time.monotonic() - begin


def drawn(load: Load, vocabulary: int, seed: int) -> tuple[list[Asked], list[list[int]]]:
    """The requests of a load in the order of their arrival, and the prefixes that half of them share."""
    draw, due = random.Random(seed), 0.0

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    prefixes = [ids(load.shortest // 2) for _ in range(PREFIXES)]
    found = []
    for _ in range(load.count):
        due += draw.expovariate(load.rate) if load.rate else 0
        length = round(load.shortest * (load.longest / load.shortest) ** draw.random())
        prefix = draw.choice(prefixes) if draw.random() < 0.5 else []
        tokens = draw.randint(2, load.reply)
        leave = draw.randrange(tokens) if draw.random() < load.cancel else None
        found.append(Asked(prefix + ids(length - len(prefix)), tokens, due, leave))
    return found, prefixes


def lead(best: dict[int, Any]) -> float:
    """By how many nats the best token leads the second; best: logprobs by token."""
    first, second = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
    return first - second


def departs(wanted: Asked, found: Asked) -> float | None:
    """How sure the model was, in nats, of the first token that is another one in `found`; None = none is."""
    tokens = zip(wanted.reply, found.reply, wanted.logprobs, strict=True)
    return next((lead(best) for ours, theirs, best in tokens if ours != theirs), None)


def alone(llm: Any) -> list[Asked]:
    """The probes, each asked when the engine has nothing else to do."""
    probes = [Asked(prompt, REPLY, probe=True) for prompt in requests(PROBES, 1)[0]]
    drive(llm, probes, 1)
    return probes


def under_load(llm: Any, load: Load, before: Sequence[Asked], seed: int = 0) -> dict[str, Any]:
    """Put a load on an engine; returns its row of the table, with times in seconds.

    before: the probes, as the engine answered them before any load
    """
    scheduler, config = llm.llm_engine.engine_core.engine_core.scheduler, llm.llm_engine.vllm_config
    asked, prefixes = drawn(load, config.model_config.get_vocab_size(), seed)
    during, after = ([Asked(one.prompt, REPLY, probe=True) for one in before] for _ in range(2))
    drive(llm, [Asked(prefix, 1) for prefix in prefixes], 1)
    for i, one in enumerate(during):
        one.due = asked[i * load.count // len(during)].due
    seconds = drive(llm, [*asked, *during], load.at_once)
    drive(llm, after, 1)
    splits = [departs(a, b) for found in (during, after) for a, b in zip(before, found, strict=True)]
    first = [one.times[0] - one.due for one in asked if one.times]
    between = [b - a for one in asked for a, b in pairwise(one.times)]
    held = pages_held(llm)
    scheduler.reset_prefix_cache()
    return {
        **vars(load), "tokens admitted": config.cache_config.kv_cache_size_tokens,
        "seconds": round(seconds, 2), **Counter(one.end for one in [*asked, *during]),
        "first token p50, p99": _percentiles(first), "between tokens p50, p99": _percentiles(between),
        "reply tokens/s": round(sum(len(one.reply) for one in asked) / seconds, 1),
        "prompt tokens/s": round(sum(len(one.prompt) for one in asked if one.times) / seconds, 1),
        "share of prompts from the prefix cache": round(
            sum(one.cached for one in asked) / sum(len(one.prompt) for one in asked), 4
        ),
        "pages held at the end": held, "replies compared": len(splits),
        "other replies": sum(gap is not None for gap in splits),
        "largest lead where replies part": round(max([gap for gap in splits if gap is not None], default=0.0), 3),
        "wrong replies": sum(gap is not None and gap > SURE for gap in splits),
        "sure tokens": sum(lead(best) > SURE for one in before for best in one.logprobs),
        "bytes on the device": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "most bytes of the process": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip


def speed(llm: Any, count: int, length: int) -> dict[str, Any]:
    """Send prompts at once; returns the row of this batch, with times in seconds."""
    config, draw = llm.llm_engine.vllm_config, random.Random(0)
    vocabulary, step = config.model_config.get_vocab_size(), config.scheduler_config.max_num_batched_tokens
    tokens = STEPS + count * (1 + length // step) + 1  # so none is done before all have begun
    asked = [Asked([draw.randrange(10, vocabulary) for _ in range(length)], tokens) for _ in range(count)]
    drive(llm, asked, count)
    begin, end = max(one.times[0] for one in asked), min(one.times[-1] for one in asked)
    steps = [b - a for a, b in pairwise(asked[0].times) if begin <= a and b <= end]
    return {
        "requests": count, "prompt": length, "tokens admitted": config.cache_config.kv_cache_size_tokens,
        "first token": round(min(one.times[0] for one in asked), 4), "steps": len(steps),
        "step": round(float(torch.tensor(steps).median()), 5),
    }  # fmt: skip


def _percentiles(values: list[float]) -> list[float]:
    return [round(float(x), 4) for x in torch.tensor(values).quantile(torch.tensor([0.5, 0.99]))] if values else []


def form(args: argparse.Namespace) -> str:
    """What is measured, as names of files say it: mask, stock, or stock with the dtype of its cache."""
    return "_".join(
        ["stock" if args.stock else "mask", *([] if args.kv_cache_dtype == "auto" else [args.kv_cache_dtype])]
    )


def batches(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The batches of `speed`: (requests, tokens of a prompt) each."""
    return [(int(count), int(length)) for count, length in (batch.split("x") for batch in args.batches)]


def loads(args: argparse.Namespace) -> list[Load]:
    """The loads of `offline`, one per bound on the requests under way."""
    shortest, longest = args.lengths
    counts, rates = ([x[0]] * len(args.at_once) if len(x) == 1 else x for x in (args.requests, args.rate))
    return [
        Load(count, at_once, rate, shortest, longest, args.reply, args.cancel)
        for count, at_once, rate in zip(counts, args.at_once, rates, strict=True)
    ]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of `vllm.LLM` for `offline` and `speed`; what --settings says comes last."""
    sent = batches(args) if args.action == "speed" else []
    longest = max([args.lengths[1], *(length + STEPS + 2 * count * (1 + length // 512) for count, length in sent)])
    return {
        "model": args.model, "dtype": args.dtype, "block_size": args.block_size, "skip_tokenizer_init": True,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_model_len": max(longest, max(LENGTHS) + 512) + args.reply + REPLY,
        "max_num_seqs": max([*args.at_once, *(count for count, _ in sent)]),
        **json.loads(args.settings),
    }  # fmt: skip


def loaded(args: argparse.Namespace) -> None:
    """Print a row for each batch, or for each bound on the requests under way, and write it to OUT."""
    llm = engine(None if args.stock else args.mask, **settings(args))
    if not args.stock:
        check(llm)
    out, of = Path(args.where), {"stock": args.stock, "kv_cache_dtype": args.kv_cache_dtype}
    step = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    for count, length in batches(args) if args.action == "speed" else ():
        speed(llm, 1, min(length, 2 * step + length % step))  # what the steps of such a prompt compile
        row = json.dumps({**of, **speed(llm, count, length)})
        (out / f"speed_{form(args)}_{count}x{length}.json").write_text(row)
        print(row, flush=True)
    before = alone(llm) if args.action == "offline" else []
    for load in loads(args) if args.action == "offline" else ():
        begin, seed = time.monotonic(), args.seed
        with (out / f"load_{form(args)}_{load.at_once}.json").open("w") as file:
            while seed == args.seed or time.monotonic() - begin < args.seconds:
                row = json.dumps({**of, "seed": seed, **under_load(llm, load, before, seed)})
                print(row, file=file, flush=True)
                print(row, flush=True)
                seed += 1


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    if args.action == "load":
        print(json.dumps(asyncio.run(load(args.where, args.requests[0], args.seed))))
        return
    out = Path(args.where)
    out.mkdir(parents=True, exist_ok=True)
    if args.action in ("offline", "speed"):
        loaded(args)
        return
    if args.variant:
        (out / f"{args.variant}.json").write_text(json.dumps(measure(args)))
        return
    found = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    for name in VARIANTS:
        if name in found:
            print(name, json.dumps(compare(found["cache"], found[name])))


if __name__ == "__main__":
    main()
