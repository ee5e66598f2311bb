"""Greedy decoding from a cache whose prompt is already in it; the first token's logits are given.

A step in Python launches over a thousand kernels and waits for none of them; where the cache allows it (`capturable`),
the steps after the first are replays of one captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.cache import CompressedCache, CompressedLayer

Stopped = Callable[[int, list[int]], bool]
CAPTURE_FOR = 16  # steps still to come at which capturing, which costs two or three, has paid


def capturable(cache: Cache) -> bool:
    """Whether a step can be captured now: the Triton kernel reads every layer, and every row is longer than the sink.

    False before the first step, which chooses what reads a layer and compiles it.
    """
    if not isinstance(cache, CompressedCache):
        return False
    return all(isinstance(layer, CompressedLayer) and layer.capturable for layer in cache.layers)


class Loop:
    """Feeds a cache one token a row and step; positions [B, 1]: of the next token."""

    def __init__(self, model: PreTrainedModel, cache: Cache, positions: Tensor) -> None:
        self.model, self.cache, self.positions = model, cache, positions.clone()
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        """Whether steps are replays."""
        return self._graph is not None

    @torch.no_grad()
    def step(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [B, vocabulary] after tokens [B, 1]; mask [B, columns], this token's included, None = no padding.

        Once captured, in memory that the next step overwrites.
        """
        if self._graph is None:
            return self._forward(tokens, mask)
        self._tokens.copy_(tokens)
        self._graph.replay()
        if isinstance(self.cache, CompressedCache):
            self.cache.advance()
        return self._logits

    def _forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions.add_(1)
        return out.logits[:, -1]

    def capture(self) -> None:
        """Make the steps that follow replays of a captured one; a first step must have compiled the kernels.

        Captured steps take no mask: a compressed cache remembers its padding. Nothing is appended to the cache here.
        Raises torch.OutOfMemoryError if the graph does not fit.
        """
        if isinstance(self.cache, CompressedCache):
            self.cache.advance(0)  # a flush may have outdated a work table, which cannot be made while capturing
        self._tokens = torch.zeros_like(self.positions)
        graph = torch.cuda.CUDAGraph()
        try:
            # the outer context: a capture that fails leaves its own stream the current one
            with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self._logits = self._forward(self._tokens)
        except RuntimeError as error:  # ending a failed capture raises an error of its own, with that one's words
            if "out of memory" in f"{error} {error.__context__}".lower():
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        self._graph = graph


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

    logits [B, vocabulary] of the first token; real [B, T] bool of the prompt, None = no padding; lengths [B] real
    tokens of each prompt; max_new_tokens, min_new_tokens: of each row; stopped(row, tokens): whether it is complete.
    Returns the tokens, the number of decoding steps, and of each row the step (0: the first token) at which no token
    was best because logits were NaN or infinite, None = at none; its answer ends there.
    """
    rows, device = len(logits), logits.device
    ends = torch.tensor(list(eos), dtype=torch.long, device=device)
    least = torch.tensor(list(min_new_tokens), device=device)
    longest = max(max_new_tokens)
    limit = torch.tensor(list(max_new_tokens), device=device)
    mask = None if real is None else torch.cat([real, real.new_ones(rows, longest)], 1)
    columns = cache.get_seq_length()
    loop = Loop(model, cache, lengths[:, None])
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
    cut = []
    for answer, most, end in zip(answers, max_new_tokens, failed, strict=True):
        answer = answer[: min(most, end)]
        cut.append(answer[: next((i for i, token in enumerate(answer) if token in set(eos)), len(answer))])
    return cut, steps, [None if end == longest else end for end in failed]
