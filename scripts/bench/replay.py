"""Seconds of one replay of several methods against as many separate runs (prefill, cache, decode each).

    python -m scripts.bench.replay --length 4096 --new-tokens 32
    python -m scripts.bench.replay --shape 8b --length 32768 --new-tokens 32      # random weights, on a GPU

Every answer is forced to --new-tokens; a separate run is model.generate() with the method's own cache.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import DynamicCache

from eval.benchmarks.row import Row
from eval.cache import compressed_cache
from eval.cache.hook import ATTENTION
from eval.inference.models import ModelConfig, load_config, load_model
from eval.inference.prefill import prefill
from eval.inference.prompts import Prompt
from eval.methods import Method, method
from eval.run.replay import Replay, Settings
from scripts.bench.shapes import llama8b


def methods(sink: int, window: int) -> list[Method]:
    """Dense, four static masks and one of each sample."""
    shared = {"sink": sink, "window": window}
    specs = {
        "lowest_70": {"name": "lowest_frequencies", "ratio": 0.7},
        "lowest_50": {"name": "lowest_frequencies", "ratio": 0.5},
        "random_70": {"name": "random", "ratio": 0.7},
        "random_50": {"name": "random", "ratio": 0.5},
        "think_60": {"name": "think", "ratio": 0.6},
    }
    return [method("dense"), *(method(label, {"channels": c}, shared) for label, c in specs.items())]


def model_of(shape: str) -> tuple[Any, Any]:
    """(model, tokenizer or None)."""
    if shape == "reference":
        settings = ModelConfig()
        return load_model(settings), load_config(settings)[1]
    return llama8b("cuda"), None


class _Numbers:
    """Stands in for a tokenizer."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=["reference", "8b"], default="reference")
    parser.add_argument("--length", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of this many counts")
    args = parser.parse_args()
    model, tokenizer = model_of(args.shape)
    chosen = methods(16, 128) if args.shape == "reference" else methods(128, 1024)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (args.length,), generator=generator).tolist()
    row = Row("speed", "0", "", "", ("x",), args.new_tokens, "ruler_all", min_new_tokens=args.new_tokens)
    engine = Replay(model, tokenizer or _Numbers(), Settings())

    def replayed() -> list[list[int]]:
        return [answers[0].tokens for _, answers in engine.answers([Prompt(ids, 0)], [row], chosen)]

    @torch.no_grad()
    def separate() -> list[list[int]]:
        out = []
        prompt = torch.tensor([ids], device=model.device)
        for one in chosen:
            cache = DynamicCache(config=model.config)
            if one.label == "think_60":  # its mask needs the prompt's own queries: the engine's pass, used once
                dense = prefill(model, prompt, None, args.new_tokens, one.obs_queries)
                out.append(engine_decode(one, dense))
                continue
            if one.channels is not None:
                keep = one.channels.keep_mask(None, model.config)  # type: ignore[arg-type]
                cache = compressed_cache(model, keep, one.sink, one.window, one.flush, one.backend)
            model.set_attn_implementation(ATTENTION)
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
                max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, pad_token_id=0,
            )  # fmt: skip
            out.append(tokens[0, len(ids) :].tolist())
        return out

    def engine_decode(one: Method, dense: Any) -> list[int]:
        from eval.inference.decode import greedy

        n = [args.new_tokens]
        cache = one.cache(model, dense)
        return greedy(model, cache, dense.logits, None, dense.lengths, engine.eos, n, n)[0][0]

    def fastest(work: Any) -> tuple[float, Any]:
        best, result = float("inf"), None
        for _ in range(args.repeat):
            start = time.perf_counter()
            result = work()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best, result

    if model.device.type == "cuda":
        replayed()
    once, one_by_one = fastest(replayed), fastest(separate)
    report = {
        "length": args.length, "new_tokens": args.new_tokens, "methods": [m.label for m in chosen],
        "replay_s": once[0], "separate_s": one_by_one[0], "share": once[0] / one_by_one[0],
        "same_tokens": [a == b for a, b in zip(once[1], one_by_one[1], strict=True)],
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
