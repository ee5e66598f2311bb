"""The replay of several turns: the context is prefilled once, each method compresses it, and the questions follow."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from transformers import Cache

from leank.eval.benchmarks.row import Row
from leank.eval.cache import CompressedCache
from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import Prefill, PromptLayer, extend, joined, pad_left
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method
from leank.eval.run.answer import Answer
from leank.eval.run.compression import Compression
from leank.eval.run.replay import Replay, cache_bytes


def branch(cache: Cache) -> Cache:
    """A cache that continues this one, which stays as it is; dense branches share a buffer: use one at a time."""
    if isinstance(cache, CompressedCache):
        return copy.deepcopy(cache)
    return Cache(layers=[one.fork() if isinstance(one, PromptLayer) else copy.copy(one) for one in cache.layers])


class Conversations:
    """Conversations on one model: `answers(prompts, rows, methods)`, as of a `Replay`.

    replay: what prefills, decodes and keeps time.
    turns: questions about each context.
    one_cache: whether all turns of a conversation follow each other on one cache; else each has a copy of the context.
    """

    def __init__(self, replay: Replay, turns: int, one_cache: bool) -> None:
        self.replay, self.turns, self.one_cache = replay, turns, one_cache

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[Prompt], rows: Sequence[Row], methods: Sequence[Method]
    ) -> Iterator[tuple[Method, list[Answer]]]:
        """Yield each method with its answers, those of a conversation's turns one after the other.

        prompts, rows: of every turn of the first conversation, then of the second, and so on.
        """
        replay, every = self.replay, self.turns
        by_turn = [(prompts[turn::every], rows[turn::every]) for turn in range(every)]
        contexts = [prompt.ids[: prompt.question] for prompt in by_turn[0][0]]
        ids, real = pad_left(contexts, replay.pad, replay.model.device)
        most = max(replay.settings.max_new_tokens or row.max_new_tokens for row in rows)
        new = [max(len(prompt.ids) - prompt.question for prompt in of_turn) for of_turn, _ in by_turn]
        room = most + (sum(new) if self.one_cache else max(new))
        for method, prompt, (prefilled, _) in replay.prefills(methods, ids, real, room, replay.settings.prefill_chunk):
            found = self._turns(method, prompt, by_turn, prefilled)
            del prompt  # before the next pass
            yield method, [answer for conversation in zip(*found, strict=True) for answer in conversation]

    def _turns(
        self, method: Method, prompt: Prefill, by_turn: Sequence[tuple[Sequence[Prompt], Sequence[Row]]], spent: float
    ) -> list[list[Answer]]:
        """The answers of each turn, one of every conversation."""
        replay, start = self.replay, self.replay.now()
        cache = method.cache(replay.model, prompt)
        sealed = replay.now() - start
        held = cache_bytes(cache, prompt)
        compression = Compression(method, cache, prompt)
        real, lengths, found = prompt.real, prompt.lengths, []
        for prompts, rows in by_turn:
            start = replay.now()
            reading = cache if self.one_cache else branch(cache)
            new = [one.ids[one.question :] for one in prompts]
            question, there = pad_left(new, replay.pad, replay.model.device)
            mask = joined(real, there, cache.get_seq_length(), question)
            logits = extend(replay.model, reading, question, mask)
            so_far = lengths + torch.tensor([len(one) for one in new], device=lengths.device)
            question_seconds = replay.now() - start
            answering = branch(reading) if self.one_cache else reading
            start, (most, least) = replay.now(), replay.bounds(rows)
            tokens, steps, broken = greedy(
                replay.model, answering, logits, mask, so_far, replay.eos, most, least, replay.stops(rows)
            )
            seconds = {"prefill": spent, "seal": sealed, "question": question_seconds, "decode": replay.now() - start}
            fed = [n + min(steps, len(t)) for n, t in zip((so_far - prompt.lengths).tolist(), tokens, strict=True)]
            answers = []
            for row, (t, (middle, less)) in enumerate(zip(tokens, compression.found(fed, answering), strict=True)):
                kept, compressed = (middle, less) if method.axes else (None, None)
                text = str(replay.tokenizer.decode(t, skip_special_tokens=True))
                answers.append(
                    Answer(t, text, seconds, steps, len(rows), held[row], kept, compressed, non_finite=broken[row])
                )
            found.append(answers)
            if self.one_cache:
                real, lengths = mask, so_far
        return found
