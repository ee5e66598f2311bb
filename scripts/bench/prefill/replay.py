"""Seconds of one replay of several methods against as many separate runs (prefill, cache, decode each).

    python -m scripts.bench.prefill.replay --length 4096 --new-tokens 32
    python -m scripts.bench.prefill.replay --shape 8b --length 32768 --new-tokens 32      # random weights, on a GPU

Every answer is forced to --new-tokens; a separate run is model.generate() with the method's own cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from leank.eval.benchmarks.row import Row
from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.decode import greedy
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prefill import prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method, build_method
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from scripts.bench.common.shapes import llama8b
from scripts.bench.common.timing import wait


def methods(sink: int, window: int) -> list[Method]:
    """Dense, four static masks and one that is chosen per sample."""
    shared = {"sink": sink, "window": window}
    specs = {
        "lowest_70": {"name": "lowest_frequencies", "ratio": 0.7},
        "lowest_50": {"name": "lowest_frequencies", "ratio": 0.5},
        "random_70": {"name": "random", "ratio": 0.7},
        "random_50": {"name": "random", "ratio": 0.5},
        "think_60": {"name": "think", "ratio": 0.6},
    }
    return [build_method("dense"), *(build_method(label, {"channels": c}, shared) for label, c in specs.items())]


def model_of(shape: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and its tokenizer; the 8B shape has none."""
    if shape == "reference":
        settings = ModelConfig()
        return load_model(settings), load_config(settings)[1]
    return llama8b("cuda"), None


class _Numbers:
    """Stands in for a tokenizer."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, tokens: list[int], **options: object) -> str:
        """The ids as words."""
        return " ".join(map(str, tokens))


class Contest:
    """The same methods on the same prompt, in one replay and in separate runs.

    model: Any, because transformers types generate() for a protocol that its own models do not meet.
    ids: of the prompt. new: tokens that every answer is forced to.
    """

    def __init__(self, model: Any, tokenizer: Any, chosen: Sequence[Method], ids: list[int], new: int) -> None:
        self.model, self.chosen, self.ids, self.new = model, chosen, ids, new
        self.engine = Replay(model, tokenizer, Settings())

    def replayed(self) -> list[list[int]]:
        """Tokens of each method, from one replay."""
        row = Row("speed", "0", "", "", ("x",), self.new, "ruler_all", min_new_tokens=self.new)
        return [answers[0].tokens for _, answers in self.engine.answers([Prompt(self.ids, 0)], [row], self.chosen)]

    @torch.no_grad()
    def separate(self) -> list[list[int]]:
        """Tokens of each method, from a run of its own."""
        prompt = torch.tensor([self.ids], device=self.model.device)
        return [self._per_sample(m, prompt) if m.obs_queries else self._generated(m, prompt) for m in self.chosen]

    def _per_sample(self, one: Method, prompt: Tensor) -> list[int]:
        """A mask that needs the prompt's own queries takes the engine's pass, once."""
        dense = prefill(self.model, prompt, None, self.new, one.obs_queries)
        cache, n = one.cache(self.model, dense), [self.new]
        return greedy(self.model, cache, dense.logits, None, dense.lengths, self.engine.eos, n, n)[0][0]

    def _generated(self, one: Method, prompt: Tensor) -> list[int]:
        cache: Cache = DynamicCache(config=self.model.config)
        if one.channels is not None:
            keep = one.channels.keep_mask(None, self.model.config)  # type: ignore[arg-type]
            cache = compressed_cache(self.model, keep, one.sink, one.window, one.flush, one.backend)
        self.model.set_attn_implementation(ATTENTION)
        tokens = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
            max_new_tokens=self.new, min_new_tokens=self.new, pad_token_id=0,
        )  # fmt: skip
        return tokens[0, len(self.ids) :].tolist()


def fastest(work: Callable[[], list[list[int]]], repeats: int) -> tuple[float, list[list[int]]]:
    """Seconds of the fastest of `repeats` runs, and what the last one returned."""
    best, result = float("inf"), []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best, result


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=["reference", "8b"], default="reference")
    parser.add_argument("--length", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of this many counts")
    args = parser.parse_args(argv)
    model, tokenizer = model_of(args.shape)
    chosen = methods(16, 128) if args.shape == "reference" else methods(128, 1024)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (args.length,), generator=generator).tolist()
    both = Contest(model, tokenizer or _Numbers(), chosen, ids, args.new_tokens)
    if model.device.type == "cuda":
        both.replayed()  # loads kernels
    once, one_by_one = fastest(both.replayed, args.repeat), fastest(both.separate, args.repeat)
    report = {
        "length": args.length, "new_tokens": args.new_tokens, "methods": [m.label for m in chosen],
        "replay_s": once[0], "separate_s": one_by_one[0], "share": once[0] / one_by_one[0],
        "same_tokens": [a == b for a, b in zip(once[1], one_by_one[1], strict=True)],
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
