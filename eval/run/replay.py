"""The replay: each sample is prefilled once, and every method builds its cache from that pass and decodes.

N methods cost one prefill and N short decodes. The first token of a reply comes from the dense pass. There are two
exceptions. With compress=before_question the question is read through the compressed cache, and the first token comes
from that. A method with a prefill of its own runs it, and its first token comes from that prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from leank.backbone import eos_ids
from leank.data_gen.sample import Sample
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.scoring import cut_at_stop
from leank.eval.cache import CompressedCache
from leank.eval.inference.decode import Stopped, greedy
from leank.eval.inference.models import windows_of
from leank.eval.inference.prefill import Prefill, extend, pad_left, prefill
from leank.eval.inference.prompts import Prompt, encode
from leank.eval.methods import Method
from leank.eval.run.answer import Answer, Decoded, Replies
from leank.eval.run.compression import Compression
from leank.eval.run.fidelity import Compared, Comparison, Course, Questions
from leank.eval.run.settings import Settings


def cache_bytes(cache: Cache, prompt: Prefill) -> list[dict[str, float]]:
    """Return the bytes held after each prompt, per part and in total, measured on the tensors.

    A dense cache is counted row by row, without padding and without its room for new tokens; of a compressed one every
    row has an equal share.
    """
    if isinstance(cache, CompressedCache):
        memory, rows = cache.memory(), len(prompt.logits)
        share = {name: float(size // rows) for name, size in {**asdict(memory), "total": memory.total}.items()}
        return [dict(share) for _ in range(rows)]
    return [{"dense": float(size), "total": float(size)} for size in prompt.bytes()]


class Replay:
    """Methods on one model: `answers(prompts, rows, methods)`.

    model: decides the device.
    tokenizer: of the model; `answers` needs its `decode` alone, and `pad_token_id` where `pad` is None.
    settings: of the replay.
    pad: id of the token that fills shorter prompts of a batch.

    Raises ValueError if the model's sliding windows would count padding as tokens.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings, pad: int | None = None
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.eos = eos_ids(model, tokenizer)
        self.pad = pad if pad is not None else (getattr(tokenizer, "pad_token_id", None) or 0)
        if settings.compress == "before_question" and settings.batch_size > 1 and _slides(model):
            raise ValueError(
                f"batch_size={settings.batch_size} with compress=before_question pads questions after their contexts, "
                "and the model's sliding windows would count padding as tokens; use batch_size=1"
            )

    def calibrate(self, methods: Sequence[Method], chat: bool | None = None) -> None:
        """Show calibration samples to the methods that want them. chat: see `ModelConfig.chat`."""

        def observe(sample: Sample, queries: int) -> Prefill:
            row = Row(sample.task, str(sample.index), sample.context, sample.question, sample.answers,
                      sample.max_new_tokens, "ruler_all", answer_prefix=sample.answer_prefix)  # fmt: skip
            ids, _ = pad_left(
                [encode(self.tokenizer, row, chat, self.settings.specials).ids], self.pad, self.model.device
            )
            return prefill(self.model, ids, None, 0, queries, self.settings.prefill_chunk)

        for method in methods:
            for choice in method.axes.values():
                choice.calibrate(observe, self.tokenizer, self.model.config.get_text_config(decoder=True))

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[Prompt], rows: Sequence[Row], methods: Sequence[Method]
    ) -> Iterator[tuple[Method, list[Answer]]]:
        """Yield each method with its answers; methods that can share a dense pass over the prompts do.

        Raises ValueError if compress=before_question meets a sample without a context.
        """
        reading = any(row.read for row in rows)
        split = reading or self.settings.compress == "before_question"
        first = [p.ids[: p.question] if split else p.ids for p in prompts]
        if split and min(map(len, first)) == 0:
            empty = rows[min(range(len(rows)), key=lambda i: len(first[i]))]
            raise ValueError(
                f"sample {empty.id} of {empty.task} has no context before its question; use compress=after_question"
            )
        rest = [p.ids[p.question :] if split else [] for p in prompts]
        most, least = self.bounds(rows)
        questions, texts = ([[] for _ in rows], rest) if reading else (rest, None)
        replies = Replies(rows, questions, most, least, texts)
        ids, real = pad_left(first, self.pad, self.model.device)
        course = None
        for method, prompt, spent in self.prefills(methods, ids, real, replies.room, self.settings.prefill_chunk):
            if course is None and (reading or self.settings.fidelity):
                course = self._course(prompt if method.prefill is None else None, ids, real, replies)
            answers = self._answers(method, prompt, replies, course, *spent)
            del prompt  # before the next pass
            yield method, answers

    def _course(self, prompt: Prefill | None, ids: Tensor, real: Tensor | None, replies: Replies) -> Course:
        """Return what all methods of a batch read: the texts, or dense's own replies. prompt: a dense pass, if any."""
        if prompt is None:
            prompt = prefill(self.model, ids, real, replies.room, 0, self.settings.prefill_chunk)
        if replies.texts is not None:
            return self._comparison.course(prompt, replies.questions, replies.texts, True)
        most = [min(n, self.settings.fidelity) for n in replies.most]
        least = [min(pair) for pair in zip(most, replies.least, strict=True)]
        tokens = self._decode(prompt.fork(), prompt, replace(replies, most=most, least=least)).tokens
        return self._comparison.course(prompt, replies.questions, tokens, False)

    @cached_property
    def _comparison(self) -> Comparison:
        return Comparison(self.model, self.pad)

    def _answers(
        self, method: Method, prompt: Prefill, replies: Replies, course: Course | None, prefilled: float, taken: int
    ) -> list[Answer]:
        """Seal the prompt in the cache, read the questions, decode. taken: bytes that the prefill allocated."""
        rows, count = replies.rows, len(replies.rows)
        start, allocated = self.now(), self._allocated()
        cache = method.cache(self.model, prompt)
        sealed = self.now() - start
        held, compression = cache_bytes(cache, prompt), Compression(method, cache, prompt)
        if method.prefill is not None and (course is None or replies.texts is not None):
            prompt.layers.clear()  # the cache has what it needs of them
            allocated -= taken  # the pass was this method's alone: what is left of it is the cache's, too
        if self._counts:
            grown = taken if "dense" in held[0] else self._allocated() - allocated
            held = [{**own, "allocated": float(grown // count)} for own in held]
        near: list[Compared] = [(None, None)] * count
        if course is not None and replies.texts is not None:
            start = self.now()
            near = self._comparison.fidelity(cache, prompt, course)
            broken = [None if found is None else found["non_finite"] for found, _ in near]
            decoded = Decoded.of_texts(replies.texts, broken, self.now() - start)
        else:
            decoded = self._decode(cache, prompt, replies)
        found = compression.found(decoded.fed)
        if course is not None and replies.texts is None:
            del cache, compression  # before the second cache, which begins where this one began
            near = self._comparison.fidelity(method.cache(self.model, prompt), prompt, course)
        seconds = {
            "prefill": prefilled,
            "seal": sealed,
            "question": decoded.question_seconds,
            "decode": decoded.seconds,
        }
        return [
            Answer(
                tokens=tokens,
                text="" if rows[row].read else str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
                seconds=seconds,
                steps=decoded.steps,
                batch=count,
                bytes=held[row],
                middle_tokens=found[row][0] if method.axes else None,
                compressed=found[row][1] if method.axes else None,
                dense_only=self._dense_only(method, replies, decoded, row),
                non_finite=decoded.broken[row],
                fidelity=near[row][0],
                score=near[row][1],
                selected_layer=None if prompt.selected_at is None else prompt.selected_at[row],
            )
            for row, tokens in enumerate(decoded.tokens)
        ]

    def _dense_only(self, method: Method, replies: Replies, decoded: Decoded, row: int) -> bool:
        """Whether the dense pass's logits alone decide a row's reply."""
        if replies.texts is not None or replies.questions[row] or method.prefill is not None:
            return False
        tokens, stopped = decoded.tokens[row], self.stops(replies.rows)
        one = len(tokens) == 0 or replies.most[row] == 1
        one = one or (len(tokens) == 1 and stopped is not None and stopped(row, tokens))
        return one and decoded.broken[row] is None

    def _decode(self, cache: Cache, prompt: Prefill, replies: Replies) -> Decoded:
        """Read the questions through the cache that holds the prompts, then decode greedily."""
        start, logits, spent = self.now(), prompt.logits, 0.0
        asked = Questions.of(prompt, replies.questions, self.pad)
        if asked.ids.shape[1]:
            logits = extend(self.model, cache, asked.ids, asked.real)
            spent = self.now() - start
        start, stopped = self.now(), self.stops(replies.rows)
        tokens, steps, broken = greedy(
            self.model,
            cache,
            logits,
            asked.real,
            asked.lengths,
            self.ends(replies.rows),
            replies.most,
            replies.least,
            stopped,
        )
        fed = [len(q) + min(steps, len(t)) for q, t in zip(replies.questions, tokens, strict=True)]
        return Decoded(tokens, steps, broken, fed, spent, self.now() - start)

    def prefills(
        self, methods: Sequence[Method], ids: Tensor, real: Tensor | None, room: int, chunk: int | None
    ) -> Iterator[tuple[Method, Prefill, tuple[float, int]]]:
        """Yield each method with its pass over the prompts, and the seconds and bytes of that pass.

        Methods that want column sums share one dense pass, all other methods a second one, so that no method's time
        contains column sums it does not use. A method with a prefill of its own shares none.
        """
        groups = [[m for m in methods if m.prefill is None and m.column_sums == sums] for sums in (False, True)]
        groups += [[m] for m in methods if m.prefill is not None]
        for group in filter(None, groups):
            start, allocated = self.now(), self._allocated()
            obs, one = max(method.obs_queries for method in group), group[0]
            prompt = one.run_prefill(self.model, ids, real, room, chunk, obs)
            spent = self.now() - start, self._allocated() - allocated
            for method in group:
                yield method, prompt, spent
            del prompt

    def bounds(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Return the most and the least tokens of each row's reply."""
        most = [0 if row.read else self.settings.max_new_tokens or row.max_new_tokens for row in rows]
        least = [min(n, self.settings.min_new_tokens or row.min_new_tokens) for n, row in zip(most, rows, strict=True)]
        return most, least

    def ends(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens that end a reply; the rows of a batch are of one task, and end alike."""
        return [*self.eos, *(self.tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in rows[0].ends)]

    def stops(self, rows: Sequence[Row]) -> Stopped | None:
        """Return whether a reply has reached a stop string, as a function of its row and tokens; None without any."""
        if not any(row.stop for row in rows):
            return None

        def stopped(row: int, tokens: list[int]) -> bool:
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            return bool(rows[row].stop) and cut_at_stop(text, rows[row].stop) != text

        return stopped

    @property
    def _counts(self) -> bool:
        """Whether the device counts the bytes that are allocated."""
        return self.model.device.type == "cuda"

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.model.device) if self._counts else 0

    def now(self) -> float:
        """Read the clock after the GPU has finished."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _slides(model: PreTrainedModel) -> bool:
    """Whether any layer's own attention has a sliding window."""
    return any(window is not None for window in windows_of(model.config.get_text_config(decoder=True)))
