"""KL of vLLM's next-token distributions to those of its own 16-bit cache, while it decodes along a text.

    python -m scripts.bench.serving_kl OUT --model MODEL --texts FILE ... --caches auto fp8 LAYOUT.safetensors

Of every text, tokens --skip to --skip + --length are taken. All but the last --steps of them are one step of prefill,
which masks and layouts compute dense, and vLLM's own caches over what they have stored; the others are decoded one by
one, whatever the model would have said. A cache is one of vLLM's `--kv-cache-dtype`, or a mask's file; the others are
compared to `auto`, the first. Each has an engine in a process of its own, one after the other.

A line of OUT/kl.jsonl is a cache: of each text the mean negative log-likelihood `nll` of its tokens, the mean `kl` in
nats, its 99th percentile `p99` and largest value `most`, and how often the most probable token is the `same`; of all
texts `kl` and its standard error `kl_se` over positions. OUT/stock.pt has the distributions of `auto`: 0.6 GB for 1,000
positions of 150,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leank.shipped import resolve


def parsed() -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", default=resolve("reference"), help="a folder")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="files")
    parser.add_argument("--caches", nargs="+", default=["auto", "fp8"])
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default="{}", help="more of vllm.LLM, as JSON")
    parser.add_argument("--here", action="store_true", help="the first cache alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import torch
from torch import Tensor

from leank.eval.serving import check
from scripts.bench.serving import engine


class Forced:
    """Lets a model say given tokens, and keeps the distributions that it would have drawn from.

    It takes the place of `compute_logits` of a vLLM model, for one request at a time.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.found: list[Tensor] = []

    def patch(self, model: Any) -> None:
        """Take the place of a model's logits; without tokens to say, they stay as they are."""
        inner = model.compute_logits

        def compute_logits(*args: Any, **more: Any) -> Any:
            logits = inner(*args, **more)
            if logits is None or not self.tokens:
                return logits
            assert len(logits) == 1, "one request at a time"
            self.found.append(logits[0].float().log_softmax(-1))
            said = torch.full_like(logits, -1e9)
            said[0, self.tokens.pop(0)] = 0
            return said

        model.compute_logits = compute_logits


def along(llm: Any, forced: Forced, ids: Sequence[int], steps: int) -> Tensor:
    """Log-probabilities [steps - 1, vocabulary] of a text's last tokens but the first of them, which prefill gives."""
    from vllm import SamplingParams

    forced.tokens, forced.found = list(ids[-steps:]), []
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(ids[:-steps])}
    reply = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(reply) == list(ids[-steps:])
    return torch.stack(forced.found[1:])


def compared(own: Tensor, stock: Tensor, ids: Tensor) -> tuple[dict[str, float], Tensor]:
    """The figures of a text, and the KL of each position: log-probabilities own, stock [n, vocabulary]; ids [n]."""
    kl = (stock.exp() * (stock - own)).sum(-1)
    return {
        "nll": -own.gather(1, ids[:, None]).mean().item(),
        "kl": kl.mean().item(),
        "p99": kl.quantile(0.99).item(),
        "most": kl.max().item(),
        "same": (stock.argmax(-1) == own.argmax(-1)).float().mean().item(),
    }, kl


def one(args: argparse.Namespace, cache: str) -> None:
    """Measure one cache in this process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = {}
    for path in args.texts:
        ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][args.skip : args.skip + args.length]
        if len(ids) < args.length:
            raise ValueError(f"{path} has fewer than --skip + --length tokens, {args.skip + args.length}")
        texts[path.name] = ids
    mask = Path(cache) if Path(cache).exists() else None
    settings = {
        "model": args.model, "dtype": args.dtype, "skip_tokenizer_init": True, "enforce_eager": False,
        "block_size": 64, "kv_cache_dtype": "auto" if mask is not None else cache, "enable_prefix_caching": False,
        "max_model_len": args.length + 1, "max_num_batched_tokens": max(8192, args.length), "max_num_seqs": 1,
        **json.loads(args.settings),
    }  # fmt: skip
    llm, forced = engine(mask, **settings), Forced()
    if mask is not None:
        check(llm)
    llm.apply_model(forced.patch)
    found = {name: along(llm, forced, ids, args.steps) for name, ids in texts.items()}
    if cache == "auto":
        torch.save({name: x.cpu() for name, x in found.items()}, args.out / "stock.pt")
    stock = torch.load(args.out / "stock.pt", mmap=True)
    row: dict[str, Any] = {"cache": mask.stem if mask is not None else cache}
    every = []
    for name, own in found.items():
        ids = torch.tensor(texts[name][1 - args.steps :], device=own.device)
        figures, kl = compared(own, stock[name].to(own.device), ids)
        row[name] = {key: round(value, 6) for key, value in figures.items()}
        every.append(kl)
    kl = torch.cat(every)
    row |= {"kl": round(kl.mean().item(), 6), "kl_se": round(kl.std().item() / len(kl) ** 0.5, 6)}
    with (args.out / "kl.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name in ("cache", "kl", "kl_se")}), flush=True)


def main() -> None:
    """Command line; see the module's docstring."""
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.here:
        one(args, args.caches[0])
        return
    if args.caches[0] != "auto" and not (args.out / "stock.pt").is_file():
        sys.exit("--caches must begin with auto, which the others are compared to")
    own = [sys.executable, "-m", "scripts.bench.serving_kl", *sys.argv[1:], "--here", "--caches"]
    failed = [cache for cache in args.caches if subprocess.run([*own, cache], env=dict(os.environ)).returncode]
    sys.exit(f"no figures of {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
