"""What the benchmarks of serving share: an engine in this process, and requests that arrive at random.

They run in an environment with vLLM (`make vllm-test` makes one), not in the one of the other benchmarks.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leank.shipped import resolve

REFERENCE = Path(resolve("reference"))
MASK = REFERENCE / "mask_70pct.safetensors"


@dataclass(frozen=True)
class Served:
    """What became of one request.

    tokens: of the reply
    logprobs: of each of these tokens
    cached: tokens of the prompt that came from the prefix cache
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Outcome:
    """What became of all requests.

    served: each
    preempted: how often one was preempted
    together: most requests that ran in one step
    """

    served: list[Served]
    preempted: int
    together: int


def engine(mask: Path | None, **settings: Any) -> Any:
    """Start vLLM in this process; a process can start one engine.

    mask: None = without the plug-in
    settings: of vLLM's `LLM`
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    additional = {"leank": {"mask": str(mask)}} if mask is not None else {}
    from vllm import LLM

    common = {"model": str(REFERENCE), "dtype": "float32", "enforce_eager": True, "block_size": 32}
    return LLM(additional_config=additional, **{**common, **settings})


def serve(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    seed: int = 0,
    at_once: float = 1.0,
    preempt_every: int = 0,
) -> Outcome:
    """Let requests arrive at random while others decode.

    prompts: token ids of each prompt
    tokens: most tokens of each reply; a reply also ends at the model's end of text
    at_once: requests that arrive before each step, on average
    preempt_every: steps after which all that run are preempted, 0 = only when pages run out
    """
    from vllm import SamplingParams

    draw, core, sent, steps, together = random.Random(seed), llm.llm_engine, 0, 0, 0
    done: dict[int, Served] = {}
    scheduler = core.engine_core.engine_core.scheduler
    preempted: set[tuple[str, int]] = set()
    while len(done) < len(prompts):
        idle = not core.has_unfinished_requests()
        arriving = sum(draw.random() < at_once / 4 for _ in range(4)) + idle
        for _ in range(min(arriving, len(prompts) - sent)):
            params = SamplingParams(temperature=0, max_tokens=tokens[sent], logprobs=0)
            core.add_request(str(sent), {"prompt_token_ids": list(prompts[sent])}, params)
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
    return Outcome([done[i] for i in range(len(prompts))], len(preempted), together)
