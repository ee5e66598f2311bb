"""From a cache that holds the prompt: decoding, and reading given tokens as decoding would.

**Decoding.** The first token's logits are given. A step in Python launches over a thousand kernels and waits for none
of them. Where the cache allows it (`capturable`), the steps after the first are replays of one captured CUDA graph.

**Reading** gives the hidden state after each token, as if they came one by one. `read` gives the cache many tokens at
once, and a compressed layer takes them in pieces that find what each would find alone (`eval.cache.layer.pieces`).
`read_as_decoded` feeds one token at a time where steps can be captured, through the kernels of decoding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.cache.graph import CAPTURE_FOR, DecodeLoop, capturable
from leank.eval.inference.prefill import positions_of
from leank.eval.inference.sampling import Draws
from leank.versions import CACHE

AT_ONCE = 256  # tokens that are read in one call; the limit bounds the hidden states and scores held
Stopped = Callable[[int, list[int]], bool]


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    cache: Cache,
    logits: Tensor,
    real: Tensor | None,
    lengths: Tensor,
    eos: Sequence[int],
    max_new_tokens: Sequence[int],
    min_new_tokens: Sequence[int],
    stopped: Stopped | None = None,
    draws: Draws | None = None,
) -> tuple[list[list[int]], int, list[int | None]]:
    """Answers of B rows without the end-of-text token; without draws as model.generate(do_sample=False) gives them.

    logits: [B, vocabulary] of the first token; lengths: int [B], real tokens of each prompt
    real: bool [B, T], False = padding of the prompt, None = no padding
    eos: end-of-text token ids; max_new_tokens, min_new_tokens: per row
    stopped: stopped(row, tokens), whether an answer is complete
    draws: what decides the tokens; None takes the likeliest
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
    written: list[list[int]] = [[] for _ in range(rows)]
    steps = 0
    for step in range(longest):
        if len(ends) and bool((least > step).any()):
            forbid = (least > step)[:, None] & torch.zeros_like(logits, dtype=torch.bool).index_fill(1, ends, True)
            logits = logits.masked_fill(forbid, -torch.inf)
        tokens.append(logits.argmax(-1) if draws is None else draws.tokens(logits, step))
        bad = ~done & ~logits.amax(-1).isfinite()  # of -inf alone, which forbids a token, none is the largest
        broken = broken.masked_fill(bad, step)
        done = done | bad | torch.isin(tokens[-1], ends) | (limit <= step + 1)
        if stopped is not None:
            for row, token in enumerate(tokens[-1].tolist()):
                written[row].append(token)
            ended = done.tolist()
            done = torch.tensor([ended[row] or stopped(row, written[row]) for row in range(rows)], device=device)
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


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Feed ids [B, n] to a cache with the result of one by one; real: bool [B, all columns so far], None = no padding.

    Returns the decoder's hidden states after each token, [B, n, hidden].
    """
    starts = range(0, ids.shape[1], AT_ONCE)
    found = []
    for start, part in zip(starts, ids.split(AT_ONCE, 1), strict=True):
        behind = ids.shape[1] - start - part.shape[1]
        found.append(states(model, cache, part, None if real is None else real[:, : real.shape[1] - behind]))
    return torch.cat(found, 1)


@torch.no_grad()
def read_as_decoded(
    model: PreTrainedModel,
    cache: Cache,
    ids: Tensor,
    real: Tensor | None,
    lengths: Tensor,
    block: int,
    each: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, bool]:
    """What `read` returns, by captured decoding steps, one token of every row at a time; by `read` if none can be.

    ids: int [B, n], n >= 1; real: bool [B, columns before ids], None = no padding; lengths: int [B], real tokens before
    block: tokens, at every multiple of which, and at the end, `each` is called with the number of tokens read
    Returns the hidden states, and whether every token was a step.
    """
    count, columns = ids.shape[1], cache.get_seq_length()
    mask = None if real is None else torch.cat([real, torch.ones_like(ids, dtype=torch.bool)], 1)
    loop, found = DecodeLoop(model, cache, lengths[:, None], head=False), []

    def told(done: int) -> None:
        if done == count or done % block == 0:
            each(done)

    for step in range(count):
        if step and not capturable(cache):
            break
        if step and count - step > CAPTURE_FOR and not loop.captured:
            loop.capture()
        after = loop.step(ids[:, step : step + 1], None if mask is None else mask[:, : columns + step + 1])
        found.append(after[:, None].clone())
        told(step + 1)
    stepped = len(found)
    start = stepped
    while start < count:
        end = min(count, (start // block + 1) * block)
        found.append(read(model, cache, ids[:, start:end], None if mask is None else mask[:, : columns + end]))
        start = end
        told(end)
    return torch.cat(found, 1), stepped == count


@torch.no_grad()
def states(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Feed ids [B, n] to a cache in one call; the other parameters and the result are those of `read`."""
    out = model.base_model(
        input_ids=ids,
        attention_mask=real,
        position_ids=positions_of(ids, real, cache.get_seq_length()),
        use_cache=True,
        **{CACHE: cache},
    )
    return out.last_hidden_state
