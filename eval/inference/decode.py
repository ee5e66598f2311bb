"""Greedy decoding from a cache that already holds the prompt; the first token's logits are given.

A step in Python launches over a thousand kernels and waits for none of them. Where the cache allows it (`capturable`),
the steps after the first are replays of one captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.cache.graph import CAPTURE_FOR, DecodeLoop, capturable

Stopped = Callable[[int, list[int]], bool]


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    cache: Cache,
    logits: Tensor,
    real: Tensor | None,
    lengths: Tensor,
    eos: Sequence[int],
    max_new_tokens: Sequence[int],
    min_new_tokens: Sequence[int],
    stopped: Stopped | None = None,
) -> tuple[list[list[int]], int, list[int | None]]:
    """Answers of B rows, as model.generate(do_sample=False) gives them, without the end-of-text token.

    logits: [B, vocabulary]: logits of the first token.
    real: bool [B, T] or None: False marks padding of the prompt; None is no padding.
    lengths: int [B]: real tokens of each prompt.
    eos: end-of-text token ids.
    max_new_tokens, min_new_tokens: int per row.
    stopped: stopped(row, tokens) or None, default None: whether an answer is complete.

    Returns the tokens of each row, the number of decoding steps, and for each row the step at which its logits were NaN
    or infinite (0 is the first token), where its answer ends, or None.
    """
    rows, device = len(logits), logits.device
    ends = torch.tensor(list(eos), dtype=torch.long, device=device)
    least = torch.tensor(list(min_new_tokens), device=device)
    longest = max(max_new_tokens)
    limit = torch.tensor(list(max_new_tokens), device=device)
    mask = None if real is None else torch.cat([real, real.new_ones(rows, longest)], 1)
    columns = cache.get_seq_length()
    loop = DecodeLoop(model, cache, lengths[:, None])
    done = limit <= 0
    broken = torch.full((rows,), longest, device=device)
    tokens: list[Tensor] = []
    steps = 0
    for step in range(longest):
        if len(ends) and bool((least > step).any()):
            forbid = (least > step)[:, None] & torch.zeros_like(logits, dtype=torch.bool).index_fill(1, ends, True)
            logits = logits.masked_fill(forbid, -torch.inf)
        tokens.append(logits.argmax(-1))
        bad = ~done & ~logits.amax(-1).isfinite()  # of -inf alone, which forbids a token, none is the largest
        broken = broken.masked_fill(bad, step)
        done = done | bad | torch.isin(tokens[-1], ends) | (limit <= step + 1)
        if stopped is not None:
            done = done | torch.tensor(
                [stopped(row, [int(t[row]) for t in tokens]) for row in range(rows)], device=device
            )
        if bool(done.all()):
            break
        if steps and longest - step > CAPTURE_FOR and not loop.captured and capturable(cache):
            loop.capture()
        logits = loop.step(tokens[-1][:, None], None if mask is None else mask[:, : columns + step + 1])
        steps += 1
    failed = broken.tolist()
    answers = torch.stack(tokens, 1).tolist() if tokens else [[] for _ in range(rows)]
    bounds = map(min, max_new_tokens, failed)
    cut = [_before(set(eos), answer[:most]) for answer, most in zip(answers, bounds, strict=True)]
    return cut, steps, [None if end == longest else end for end in failed]


def _before(ends: set[int], answer: list[int]) -> list[int]:
    """An answer up to the first of these tokens."""
    return answer[: next((i for i, token in enumerate(answer) if token in ends), len(answer))]
