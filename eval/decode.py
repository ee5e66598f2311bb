"""Greedy decoding from a cache whose prompt is already in it; the first token's logits are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

Stopped = Callable[[int, list[int]], bool]


def eos_ids(model: PreTrainedModel, tokenizer: Any = None) -> list[int]:
    """End-of-text tokens, as generate() takes them: the generation config's, else the tokenizer's."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


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
) -> tuple[list[list[int]], int]:
    """Answers of B rows, as model.generate(do_sample=False) gives them, without the end-of-text token.

    logits [B, vocabulary] of the first token; real [B, T] bool of the prompt, None = no padding; lengths [B] real
    tokens of each prompt; max_new_tokens, min_new_tokens: of each row; stopped(row, tokens): whether it is complete.
    Returns the tokens and the number of decoding steps.
    """
    rows, device = len(logits), logits.device
    ends = torch.tensor(list(eos), dtype=torch.long, device=device)
    least = torch.tensor(list(min_new_tokens), device=device)
    longest = max(max_new_tokens)
    limit = torch.tensor(list(max_new_tokens), device=device)
    mask = None if real is None else torch.cat([real, real.new_ones(rows, longest)], 1)
    columns = cache.get_seq_length()
    done = limit <= 0
    tokens: list[Tensor] = []
    steps = 0
    for step in range(longest):
        if len(ends) and bool((least > step).any()):
            forbid = (least > step)[:, None] & torch.zeros_like(logits, dtype=torch.bool).index_fill(1, ends, True)
            logits = logits.masked_fill(forbid, -torch.inf)
        tokens.append(logits.argmax(-1))
        done = done | torch.isin(tokens[-1], ends) | (limit <= step + 1)
        if stopped is not None:
            done = done | torch.tensor(
                [stopped(row, [int(t[row]) for t in tokens]) for row in range(rows)], device=device
            )
        if bool(done.all()):
            break
        logits = model(
            input_ids=tokens[-1][:, None],
            attention_mask=None if mask is None else mask[:, : columns + step + 1],
            position_ids=(lengths + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        steps += 1
    answers = torch.stack(tokens, 1).tolist() if tokens else [[] for _ in range(rows)]
    cut = []
    for answer, most in zip(answers, max_new_tokens, strict=True):
        answer = answer[:most]
        cut.append(answer[: next((i for i, token in enumerate(answer) if token in set(eos)), len(answer))])
    return cut, steps
