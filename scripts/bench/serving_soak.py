"""Minutes of load on an engine of vLLM, in which every reply is known: none may be lost, none may be another.

    python -m scripts.bench.serving_soak OUT --mask LAYOUT --block-size 64 --seconds 600
    python -m scripts.bench.serving_soak OUT --stock --seconds 60     # without a mask

A fixed set of requests is asked first, one at a time. Then rounds of requests drawn from this set follow each other. In
a round --at-once are under way, a share is cancelled at some token, and there are so few pages that some are preempted
and resumed. A cancelled reply counts as far as it came.

Half of the prompts are no longer than sink and window, share prefixes, and read the prefix cache. The others are
longer, begin in one step, and read none. So a prompt reads the same K and V whether there was a hit, a preemption or
neither, and in float32 on a CPU replies are equal to the last token. All replies are long enough to read the middle.

A line of OUT/soak.jsonl is a round:

    finished, cancelled, lost   requests, by how they ended
    other      replies with another token than alone; lead: by how many nats the best token led there, at most
    preempted  how often a request was; hits: tokens of prompts from the prefix cache
    held       pages that belong to requests at the end; blocks, block_bytes: of the cache, by the worker
    bytes      of the process at the end

It ends with status 1 if a reply was lost or another, or if pages stayed held.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leank.shipped import resolve


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--mask", default=Path(resolve("reference"), "mask_70pct.safetensors"), help="a mask's file")
    parser.add_argument("--stock", action="store_true", help="without the mask")
    parser.add_argument("--model", default=resolve("reference"), help="a folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600, help="of rounds; one that has begun is ended")
    parser.add_argument("--known", type=int, default=32, help="requests of the fixed set")
    parser.add_argument("--requests", type=int, default=100, help="of a round")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--cancel", type=float, default=0.3, help="share of requests")
    parser.add_argument("--longest", type=int, default=1200, help="tokens of a prompt")
    parser.add_argument("--reply", type=int, default=256, help="most tokens of a reply")
    parser.add_argument("--memory", type=float, default=32, help="MiB for pages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default="{}", help="more settings of vllm.LLM, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import psutil

from leank.eval.serving import check
from leank.eval.serving.settings import ServerSettings
from scripts.bench.serving import PREFIXES, Asked, departs, drive, engine, pages_held


def known(args: argparse.Namespace, ends: int, vocabulary: int) -> list[Asked]:
    """The fixed set of requests; ends: tokens of sink and window."""
    draw = random.Random(args.seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    prefixes, found = [ids(ends // 4) for _ in range(PREFIXES)], []
    for number in range(args.known):
        tokens = draw.randint(args.reply // 4, args.reply)
        if number % 2:
            found.append(Asked(ids(draw.randint(ends, args.longest)), tokens, probe=True, reads=False))
        else:
            prefix = draw.choice(prefixes)
            found.append(Asked(prefix + ids(draw.randint(1, ends - len(prefix))), tokens, probe=True))
    return found


def again(args: argparse.Namespace, of: Sequence[Asked], seed: int) -> tuple[list[Asked], list[Asked]]:
    """Requests of a round, and what is known of each."""
    draw = random.Random(seed)
    wanted = [draw.choice(of) for _ in range(args.requests)]
    leave = [draw.randrange(one.tokens) if draw.random() < args.cancel else None for one in wanted]
    return [
        replace(one, leave=at, times=[], reply=[], logprobs=[], cached=0, end="lost")
        for one, at in zip(wanted, leave, strict=True)
    ], wanted


def parts(wanted: Asked, found: Asked) -> float | None:
    """As `departs`, of as much of the reply as came; a reply that ended too early departs, too."""
    if found.end == "finished" and len(found.reply) != len(wanted.reply):
        return float("inf")
    came = len(found.reply)
    return departs(replace(wanted, reply=wanted.reply[:came], logprobs=wanted.logprobs[:came]), found)


def counting(scheduler: Any) -> list[str]:
    """A list that gets the name of a request each time that one is preempted."""
    names: list[str] = []
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        names.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = noted
    return names


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = None if args.stock else ServerSettings.find({"leank": {"mask": str(args.mask)}}, {})
    ends = 320 if settings is None else settings.sink + settings.window
    llm = engine(
        None if args.stock else args.mask,
        **{
            "model": args.model, "dtype": args.dtype, "block_size": args.block_size, "skip_tokenizer_init": True,
            "max_model_len": args.longest + args.reply, "max_num_seqs": args.at_once,
            "max_num_batched_tokens": 2 * (args.longest + args.reply), "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": int(args.memory * 2**20), **json.loads(args.settings),
        },
    )  # fmt: skip
    if settings is not None:
        check(llm)
    core = llm.llm_engine
    scheduler, cache = core.engine_core.engine_core.scheduler, core.vllm_config.cache_config
    fixed = known(args, ends, core.vllm_config.model_config.get_vocab_size())
    print(f"{len(fixed)} requests, one at a time", flush=True)
    seconds = drive(llm, fixed, 1)
    print(f"{sum(one.tokens for one in fixed)} tokens in {seconds:.0f} s", flush=True)
    preempted, begin, number, failed = counting(scheduler), time.monotonic(), 0, False
    with (args.out / "soak.jsonl").open("w") as file:
        while not number or time.monotonic() - begin < args.seconds:
            number += 1
            before, (asked, wanted) = len(preempted), again(args, fixed, args.seed + number)
            seconds = drive(llm, asked, args.at_once)
            leads = [lead for pair in zip(wanted, asked, strict=True) if (lead := parts(*pair)) is not None]
            blocks = {} if settings is None else {"block_bytes": llm.collective_rpc("leank_report")[0]["block_bytes"]}
            row = {
                "round": number, "seconds": round(seconds, 1), **Counter(one.end for one in asked),
                "other": len(leads), "lead": round(max(leads, default=0.0), 5),
                "compared": sum(len(one.reply) for one in asked), "preempted": len(preempted) - before,
                "hits": sum(one.cached for one in asked), "held": pages_held(llm), "blocks": cache.num_gpu_blocks,
                **blocks, "bytes": psutil.Process().memory_info().rss,
            }  # fmt: skip
            failed |= bool(leads or row["held"] or row.get("lost"))
            for to in (file, sys.stdout):
                print(json.dumps(row), file=to, flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
