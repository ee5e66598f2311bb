"""A compressed cache of one sequence and one KV head in plain loops: what every backend computes. Read it first.

    sink     the first tokens, whole
    middle   the tokens between: kept channels alone, perhaps in fewer bits, perhaps not all tokens
    window   the last tokens, whole; its oldest `flush` move to the middle whenever it holds window + flush

    head = Head(Rules(sink=4, window=64, flush=32, channels=kept))
    for k, v, q in prompt:              # dense attention, while the prompt comes
        head.append(k, v)
        out = head.attend(q, scaling)
    head.compress()                     # the prompt becomes sink | middle | window
    for k, v, q in reply:               # a decoding step
        head.append(k, v)
        out = head.attend(q, scaling)
        head.flush()                    # and evict

Nothing here is fast, and nothing of the cache uses it. Tests compare every backend with it: pages, rings and kernels
must give the same outputs as these loops. G: query heads of the KV head; D: head_dim; n: tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """What a method has chosen for this head. A word in brackets is the axis of the method that sets the field.

    sink, window, flush: tokens
    channels: bool [D], kept channels of the middle's K; a head without any has no middle, neither K nor V (channels)
    values: bool [D], kept channels of the middle's V; None = all (channels)
    center: [D], what K is taken to be in its pruned channels, such as its mean; None = 0
    joins: whether tokens that leave the window join the middle, or are dropped (tokens)
    bits: (K, V) -> (K, V), each [n, D]: tokens that enter the middle together, as they are read; None = as given (bits)
    reads: (q [G, c], K [n, c]) -> bool [G, n]: what each query head reads of the middle; None = every token (reads)
    stays: scores [n] -> bool [n]: which tokens of the middle stay after a flush; None = all (tokens)
    absolute: whether the middle ends at multiples of `flush` alone, counted from the first token
    """

    sink: int
    window: int
    flush: int
    channels: Tensor
    values: Tensor | None = None
    center: Tensor | None = None
    joins: bool = True
    bits: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    reads: Callable[[Tensor, Tensor], Tensor] | None = None
    stays: Callable[[Tensor], Tensor] | None = None
    absolute: bool = False


@dataclass
class Token:
    """One token: K and V [D], in the middle their kept channels alone, and the attention that it has received."""

    k: Tensor
    v: Tensor
    score: float = 0.0


class Head:
    """The three parts, each a list of tokens from the oldest on; until `compress`, the window holds the prompt."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.sink: list[Token] = []
        self.middle: list[Token] = []
        self.window: list[Token] = []
        self.compressed = False

    def append(self, k: Tensor, v: Tensor) -> None:
        """Take in the next token, k and v [D]. A prompt that is shorter than the sink leaves room in it."""
        fills_sink = self.compressed and len(self.sink) < self.rules.sink
        (self.sink if fills_sink else self.window).append(Token(k, v))

    def compress(self, kept: Tensor | None = None) -> None:
        """Split the prompt; kept: bool [n], which of its tokens the middle may take, None = all.

        The prompt's middle is not rounded up to `flush`: the window has exactly `window` tokens, or as many as there
        are behind the sink. On the absolute grid it is rounded down.
        """
        prompt, self.compressed = self.window, True
        begin = min(self.rules.sink, len(prompt))
        end = max(begin, len(prompt) - self.rules.window)
        if self.rules.absolute:
            end = max(begin, end // self.rules.flush * self.rules.flush)
        self.sink, self.window = prompt[:begin], prompt[end:]
        self._enter([prompt[at] for at in range(begin, end) if kept is None or kept[at]])
        self.evict()

    def flush(self) -> None:
        """Move what is due from the window to the middle, then let the middle give up what it does not keep."""
        size, flush = self.rules.window, self.rules.flush
        while self.compressed and len(self.window) >= size + flush:
            leaving, self.window = self.window[:flush], self.window[flush:]
            if self.rules.joins:
                self._enter(leaving)
        if self.compressed:
            self.evict()

    def evict(self) -> None:
        """Drop the tokens of the middle that do not stay; a token that has gone is never seen again."""
        if self.rules.stays is not None and self.middle:
            stays = self.rules.stays(torch.tensor([token.score for token in self.middle], dtype=torch.float64))
            self.middle = [token for token, stay in zip(self.middle, stays.tolist(), strict=True) if stay]

    def attend(
        self, q: Tensor, scaling: float, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """softmax(q K) V over all three parts, [G, D]; q: [G, D], the queries of the token that was appended last.

        One softmax runs over the three parts. The weights that a token receives are added to its score.
        softcap, sink_logits: see `weights`
        """
        rules, keep = self.rules, self.rules.channels
        every = torch.ones_like(keep)
        kept_values = every if rules.values is None else rules.values
        parts = [(self.sink, every, every), (self.middle, keep, kept_values), (self.window, every, every)]
        parts = [part for part in parts if part[0]]
        logits = torch.cat(
            [q[:, channels] @ torch.stack([token.k for token in tokens]).T for tokens, channels, _ in parts], -1
        )
        seen = torch.ones_like(logits, dtype=torch.bool)
        middle = slice(len(self.sink), len(self.sink) + len(self.middle))
        if rules.center is not None:  # of pruned channels
            logits[:, middle] += (q[:, ~keep] @ rules.center[~keep].to(q.dtype))[:, None]
        if rules.reads is not None and self.middle:
            seen[:, middle] = rules.reads(q[:, keep], torch.stack([token.k for token in self.middle]))
        weight = weights(logits * scaling, seen, softcap, sink_logits)  # [G, n]
        out = torch.zeros_like(q)
        for tokens, _, values in parts:
            received, weight = weight[:, : len(tokens)], weight[:, len(tokens) :]
            out[:, values] += received @ torch.stack([token.v for token in tokens])
            for token, score in zip(tokens, received.sum(0).tolist(), strict=True):
                token.score += score
        return out

    def _enter(self, tokens: list[Token]) -> None:
        """Tokens enter the middle together: rounded, then without the pruned channels."""
        rules = self.rules
        if not tokens or not rules.channels.any():
            return
        k, v = torch.stack([token.k for token in tokens]), torch.stack([token.v for token in tokens])
        if rules.bits is not None:
            k, v = rules.bits(k, v)
        for token, own_k, own_v in zip(tokens, k, v, strict=True):
            stored = own_v if rules.values is None else own_v[rules.values]
            self.middle.append(Token(own_k[rules.channels], stored, token.score))


def weights(logits: Tensor, seen: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None) -> Tensor:
    """The softmax of scaled logits [G, n] over the tokens that are seen, bool [G, n].

    softcap: c, with which a logit x becomes c tanh(x / c) (Gemma 2); None = x stays x
    sink_logits: [G], a logit that takes its share of the weight and adds nothing to the output (GPT-OSS); None = none
    """
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink_logits is None:
        return logits.softmax(-1)
    return torch.cat([logits, sink_logits[:, None].to(logits.dtype)], -1).softmax(-1)[:, :-1]
