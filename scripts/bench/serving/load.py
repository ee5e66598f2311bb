"""A load of short requests on a running server, some of which are cancelled: none may be lost, no page may stay held.

    python -m scripts.bench.serving.load http://127.0.0.1:8000 --requests 500

The server is `vllm.entrypoints.openai.api_server` with the reference model. Replies are streamed. Prints how many
requests ended by themselves, how many were cancelled, how long it took, and the share of pages held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter

import aiohttp

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
AT_ONCE = 32  # requests under way at a time
PATIENCE = 60  # seconds until the server has freed what cancelled requests held


async def ask(session: aiohttp.ClientSession, model: str, draw: random.Random) -> str:
    """Stream one reply, or hang up after some pieces of it; returns how it ended."""
    prompt = " ".join(draw.choices(WORDS, k=draw.randint(2, 300)))
    tokens, leave_after = draw.randint(2, 40), draw.choice([None, None, 0, 1, 5])
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    pieces, ended = 0, ""
    async with session.post("/v1/completions", json=body) as reply:
        if reply.status != 200:
            return f"status {reply.status}"
        async for line in reply.content:
            if leave_after is not None and pieces >= leave_after:
                return "cancelled"
            if line.startswith(b"data: {"):
                choice = json.loads(line[len(b"data: ") :])["choices"][0]
                pieces, ended = pieces + 1, choice["finish_reason"] or ended
    return f"finished by {ended}" if ended else "lost"


async def gauges(session: aiohttp.ClientSession) -> dict[str, float]:
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
    draw, limit, begin = random.Random(seed), asyncio.Semaphore(AT_ONCE), time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
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
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(load(args.url, args.requests, args.seed))))


if __name__ == "__main__":
    main()
