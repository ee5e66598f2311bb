"""vLLM's caches side by side where decoding bounds a server: 16, 8 and fewer bits, masks and layouts of bits.

    python -m scripts.bench.serving_rivals OUT --model MODEL
    python -m scripts.bench.serving_rivals OUT --model MODEL --caches auto fp8 15 20 --gpus 4
    python -m scripts.bench.serving_rivals OUT --model MODEL --loads 64x2048+4096 0x32768+1024 --batches

Each cache has an engine in a process of its own, one after the other, or one on each of --gpus at a time. A cache is
what `--kv-cache-dtype` of vLLM takes (auto is the model's dtype); a mask's file; or a number: SmolLM2's layout of so
many percent of the bytes, whose heads are drawn at random into the model's shape, for times and tokens, which do not
depend on what a layout was learned on. --settings are more settings of vllm.LLM, as JSON; with
`{"load_format": "dummy"}` a model needs no weights.

A line of OUT/rivals.jsonl is a cache at one load. `tokens` is what the cache admits.

batches   64x4096: prompts that are sent at once. first: seconds to the first token of any; step: the median step in
          which all of them decode
loads     64x2048+4096: prompts of 2,048 tokens with replies of 4,096, all sent at once; 0x: as many as the cache holds.
          tokens_s: tokens of replies in a second, over the whole load; between: p50 and p99 of the seconds between two
          tokens of a reply; first: those until its first token; most: requests that were under way at once
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from leank.shipped import resolve

CACHES = ("auto", "fp8", "int4_per_token_head", "turboquant_4bit_nc", "15", "20", "31")
BATCHES = ("64x4096", "8x32768", "1x130000")


def parsed() -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", default=resolve("reference"), help="a folder")
    parser.add_argument("--caches", nargs="+", default=CACHES)
    parser.add_argument("--batches", nargs="*", default=BATCHES)
    parser.add_argument("--loads", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--gpus", type=int, default=1, help="how many engines run at a time, each on a GPU of its own")
    parser.add_argument("--here", action="store_true", help="the first cache alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import torch

from leank.eval.serving import check
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.shape import kv_shape
from scripts.bench.serving import STEPS, engine, speed

LAYOUTS = Path(resolve("reference")).parent / "masks/smollm2/bits"


def layout_like(percent: int, shape: Sequence[int], seed: int = 0) -> ChannelMask:
    """A layout of this shape [L, H, D] from the heads of SmolLM2's layout of so many percent, drawn with replacement.

    D is a multiple of its 64 channels: K of a head is that of D / 64 of them, V that of the first; they keep channels,
    or none does, as V takes bytes only where K has channels.
    """
    found = ChannelMask.load(LAYOUTS / f"{percent}pct_seed41.safetensors").precision
    assert found is not None
    layers, heads, dim = shape
    own = found.key_bits.shape[-1]
    if dim % own:
        raise ValueError(f"{percent}: heads of {dim} channels are not made of SmolLM2's, which have {own}; give a file")
    draw, bits = torch.Generator().manual_seed(seed), found.key_bits.flatten(0, 1)
    some = (bits > 0).any(-1)
    first = torch.randint(len(bits), (layers, heads), generator=draw)
    parts = [bits[first]]
    for _ in range(dim // own - 1):
        among = bits[some]
        more = among[torch.randint(len(among), (layers, heads), generator=draw)]
        parts.append(more * some[first][..., None])
    precision = Precision(torch.cat(parts, -1), found.value_bits.flatten()[first])
    return ChannelMask(precision.keep, precision=precision)


def mask_of(cache: str, model: str, out: Path) -> Path | None:
    """The file of the mask that a cache is, None = it is one of vLLM's own."""
    if cache.isdecimal():
        from transformers import AutoConfig

        path = out / f"layout_{cache}.safetensors"
        layout_like(int(cache), kv_shape(AutoConfig.from_pretrained(model).get_text_config(decoder=True))).save(path)
        return path
    return Path(cache) if Path(cache).exists() else None


def load(llm: Any, count: int, prompt: int, reply: int) -> dict[str, Any]:
    """Send requests at once and step until all have ended; returns the row of this load, with times in seconds.

    count: of requests, 0 = as many as the cache admits
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core, draw = llm.llm_engine, random.Random(0)
    config = core.vllm_config
    count = count or max(1, config.cache_config.kv_cache_size_tokens // (prompt + reply))
    params = SamplingParams(
        temperature=0, max_tokens=reply, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    vocabulary, came = config.model_config.get_vocab_size(), dict[str, list[float]]()
    for number in range(count):
        ids = [draw.randrange(10, vocabulary) for _ in range(prompt)]
        core.add_request(str(number), {"prompt_token_ids": ids}, params)
    begin, most = time.monotonic(), 0
    while core.has_unfinished_requests():
        outputs, now = core.step(), time.monotonic() - begin
        most = max(most, len(outputs))
        for output in outputs:
            came.setdefault(output.request_id, []).extend([now] * len(output.outputs[0].token_ids))
    seconds = time.monotonic() - begin
    between = torch.cat([torch.tensor(times).diff() for times in came.values()])
    first = torch.tensor([times[0] for times in came.values()])
    ends = torch.tensor([0.5, 0.99])
    return {
        "requests": count, "prompt": prompt, "reply": reply, "most": most, "seconds": round(seconds, 2),
        "tokens_s": round(sum(map(len, came.values())) / seconds, 1),
        "first": [round(float(x), 4) for x in first.quantile(ends)],
        # quantile() takes 16M numbers at most
        "between": [round(float(between.kthvalue(1 + int(x * (len(between) - 1)))[0]), 5) for x in ends],
    }  # fmt: skip


def one(args: argparse.Namespace, cache: str) -> None:
    """Measure one cache in this process."""
    mask = mask_of(cache, args.model, args.out)
    batches = [tuple(map(int, batch.split("x"))) for batch in args.batches]
    loads = [tuple(map(int, one.replace("+", "x").split("x"))) for one in args.loads]
    longest = max([prompt + STEPS + 2 * count * (1 + prompt // 512) for count, prompt in batches], default=0)
    settings = {
        "model": args.model, "dtype": args.dtype, "skip_tokenizer_init": True, "enforce_eager": False,
        "block_size": 64, "kv_cache_dtype": "auto" if mask is not None else cache, "enable_prefix_caching": False,
        "max_model_len": max([longest, *(prompt + reply for _, prompt, reply in loads)]) + 1,
        "max_num_seqs": max([256 * bool(loads), *(count for count, _ in batches)]),
        **json.loads(args.settings),
    }  # fmt: skip
    begin = time.monotonic()
    llm = engine(mask, **settings)
    if mask is not None:
        check(llm)
    config = llm.llm_engine.vllm_config.cache_config
    common = {"cache": cache, "tokens": config.kv_cache_size_tokens, "start": round(time.monotonic() - begin, 1)}
    if mask is not None:
        common["middle_bytes"] = round(ChannelMask.load(mask).middle_bytes, 4)
    step = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    for count, length in batches:
        speed(llm, 1, min(length, 2 * step + length % step))  # what the steps of such a prompt compile
        found = speed(llm, count, length)
        keep = {new: found[old] for new, old in (("first", "first token"), ("step", "step"), ("steps", "steps"))}
        _write(args.out, {**common, "requests": count, "prompt": length, **keep})
    for count, prompt, reply in loads:
        _write(args.out, {**common, **load(llm, count, prompt, reply)})


def _write(out: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    with (out / "rivals.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.here:
        one(args, args.caches[0])
        return
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(args.gpus):
        free.put(gpu)

    def run(cache: str) -> int:
        gpu = free.get()
        own = [sys.executable, "-m", "scripts.bench.serving_rivals", *sys.argv[1:], "--here", "--caches", cache]
        devices = {"CUDA_VISIBLE_DEVICES": str(gpu)} if args.gpus > 1 else {}
        with (args.out / f"{Path(cache).stem}.log").open("w") as log:
            done = subprocess.run(own, env={**os.environ, **devices}, stdout=log, stderr=subprocess.STDOUT)
        free.put(gpu)
        print(f"{cache}: {'done' if not done.returncode else f'ended with {done.returncode}, see its log'}", flush=True)
        return done.returncode

    with ThreadPoolExecutor(args.gpus) as pool:
        failed = [cache for cache, code in zip(args.caches, pool.map(run, args.caches), strict=True) if code]
    rows = [json.loads(line) for line in (args.out / "rivals.jsonl").read_text().splitlines()]
    for row in sorted(rows, key=lambda row: (row["prompt"], row["requests"])):
        print(json.dumps(row))
    sys.exit(f"no figures of {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
