"""The replay: each sample is prefilled once; every method builds its cache from that pass, decodes, and is scored.

N methods cost one prefill and N short decodes. The first answer token always comes from the dense pass (with
compress=before_question, where the question is read through the compressed cache, from that). Methods that choose a
prefill of their own run it, and their first token comes from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from eval.benchmarks.row import Row
from eval.benchmarks.scoring import cut_at_stop
from eval.cache import CompressedCache
from eval.inference.decode import greedy
from eval.inference.prefill import Prefill, extend, pad_left, prefill
from eval.inference.prompts import SPECIALS, Prompt, encode
from eval.methods import Method
from eval.run.compression import Compression
from leank_train.backbone import eos_ids
from leank_train.common.typed import BadConfig, Checked, Count, OneOf, Positive

COMPRESS = ("after_question", "before_question")


@dataclass(frozen=True)
class Settings(Checked):
    """shard: "i/n" does every n-th batch, from number i (0 is the first), for several GPUs or a Slurm array.
    compress: whether a method compresses after the whole prompt or before the question. match: bytes that every method
    is brought to, see eval.run.matched. batch_size: samples of one task and length at a time; prefill_chunk: prompt
    tokens at a time, None = all. max_new_tokens, min_new_tokens: instead of the benchmark's. specials: see
    eval.inference.prompts.encode.
    """

    compress: Annotated[str, OneOf(*COMPRESS)] = "after_question"
    batch_size: Positive = 1
    prefill_chunk: Positive | None = None
    max_new_tokens: Positive | None = None
    min_new_tokens: Count | None = None
    match: float | str | None = None
    shard: str = "0/1"
    specials: Annotated[str, OneOf(*SPECIALS)] = "text"

    @property
    def place(self) -> tuple[int, int]:
        """Number of this shard, number of shards. Raises ValueError if there is no such shard."""
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ValueError(f"shard={self.shard!r} is no shard; the first of four is shard=0/4, the last shard=3/4")
        return int(number), int(count)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.place
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")


@dataclass
class Answer:
    """One method's answer to one sample. Seconds are those of the whole batch; bytes are this sample's share.

    middle_tokens: between sink and window at the end of the reply; compressed: whether less than all of what dense has
    is held or read; None = the dense method. dense_only: whether the reply is decided by the dense pass's logits alone.
    non_finite: the step (0: the first token) at which logits were NaN or infinite and the reply ended, None = at none.
    """

    tokens: list[int]
    text: str
    seconds: dict[str, float]
    steps: int
    batch: int
    bytes: dict[str, int] = field(default_factory=dict)
    middle_tokens: int | None = None
    compressed: bool | None = None
    dense_only: bool = False
    non_finite: int | None = None


def cache_bytes(cache: Cache, prompt: Prefill) -> dict[str, int]:
    """Bytes held after the prompt, by part, from the tensors; where nothing is compressed, room for new tokens is not
    counted.
    """
    if isinstance(cache, CompressedCache):
        memory = cache.memory()
        return {**asdict(memory), "total": memory.total}
    return {"dense": prompt.bytes(), "total": prompt.bytes()}


class Replay:
    """Methods on one model: `answers(prompts, rows, methods)`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: Settings, pad: int | None = None) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.eos = eos_ids(model, tokenizer)
        self.pad = pad if pad is not None else (getattr(tokenizer, "pad_token_id", None) or 0)
        if settings.compress == "before_question" and settings.batch_size > 1 and _slides(model):
            raise ValueError(
                f"batch_size={settings.batch_size} with compress=before_question pads questions after their contexts, "
                "and the model's sliding windows would count padding as tokens; use batch_size=1"
            )

    def calibrate(self, methods: Sequence[Method], chat: bool | None = None) -> None:
        """Let methods that want to see samples see them."""

        def observe(sample: Any, queries: int) -> Prefill:
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
        """One dense pass over the prompts for all methods that share it, then each method's answers, in turn."""
        before = self.settings.compress == "before_question"
        room = [self.settings.max_new_tokens or row.max_new_tokens for row in rows]
        least = [min(n, self.settings.min_new_tokens or row.min_new_tokens) for n, row in zip(room, rows, strict=True)]
        first = [p.ids[: p.question] if before else p.ids for p in prompts]
        then = [p.ids[p.question :] if before else [] for p in prompts]
        if before and min(map(len, first)) == 0:
            empty = rows[min(range(len(rows)), key=lambda i: len(first[i]))]
            raise ValueError(
                f"sample {empty.id} of {empty.task} has no context before its question; use compress=after_question"
            )
        device = self.model.device
        ids, real = pad_left(first, self.pad, device)
        after, chunk = max(room) + max(map(len, then)), self.settings.prefill_chunk
        for method, prompt, (prefilled, taken) in self._prefills(methods, ids, real, after, chunk):
            start, allocated = self._now(), self._allocated()
            cache = method.cache(self.model, prompt)
            sealed = self._now() - start
            held, compression = cache_bytes(cache, prompt), Compression(method, cache, prompt)
            if method.prefill is not None:
                prompt.layers.clear()  # the cache has what it needs of them
            if device.type == "cuda":
                held["allocated"] = taken if "dense" in held else self._allocated() - allocated
            logits, mask, lengths, asked, start = prompt.logits, prompt.real, prompt.lengths, 0.0, self._now()
            if before:
                question, there = pad_left(then, self.pad, device)
                mask = _joined(mask, there, prompt.columns, question)
                logits = extend(self.model, cache, question, mask)
                lengths = lengths + torch.tensor([len(t) for t in then], device=device)
                asked = self._now() - start
            start = self._now()
            stopped = self._stops(rows)
            tokens, steps, broken = greedy(self.model, cache, logits, mask, lengths, self.eos, room, least, stopped)
            decoded = self._now() - start
            found = compression.found([len(q) + min(steps, len(t)) for q, t in zip(then, tokens, strict=True)])
            del cache, prompt, compression  # before the next pass
            seconds = {"prefill": prefilled, "seal": sealed, "question": asked, "decode": decoded}
            share = {name: value // len(rows) for name, value in held.items()}
            answers = []
            for row, t in enumerate(tokens):
                text = self.tokenizer.decode(t, skip_special_tokens=True)
                middle, compressed = found[row] if method.axes else (None, None)
                one = len(t) == 0 or room[row] == 1 or (len(t) == 1 and stopped is not None and stopped(row, t))
                dense = one and broken[row] is None and not before and method.prefill is None
                marks = (middle, compressed, dense, broken[row])
                answers.append(Answer(t, text, seconds, steps, len(rows), share, *marks))
            yield method, answers

    def _prefills(
        self, methods: Sequence[Method], ids: Tensor, real: Tensor | None, room: int, chunk: int | None
    ) -> Iterator[tuple[Method, Prefill, tuple[float, int]]]:
        """Each method with its pass over the prompts, and that pass's seconds and bytes.

        Two dense passes are shared: one by the methods that want column sums, so that none pays for what it does not
        ask, and one by the others. A method's own pass is its alone.
        """
        groups = [[m for m in methods if m.prefill is None and m.column_sums == sums] for sums in (False, True)]
        groups += [[m] for m in methods if m.prefill is not None]
        for group in filter(None, groups):
            start, allocated = self._now(), self._allocated()
            obs, one = max(method.obs_queries for method in group), group[0]
            if one.prefill is None:
                prompt = prefill(self.model, ids, real, room, obs, chunk, one.column_sums)
            else:
                prompt = one.prefill.run(self.model, ids, real, room, obs, chunk)
            spent = self._now() - start, self._allocated() - allocated
            for method in group:
                yield method, prompt, spent
            del prompt

    def _stops(self, rows: Sequence[Row]) -> Any:
        if not any(row.stop for row in rows):
            return None

        def stopped(row: int, tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            return bool(rows[row].stop) and cut_at_stop(text, rows[row].stop) != text

        return stopped

    def _allocated(self) -> int:
        device = self.model.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _slides(model: PreTrainedModel) -> bool:
    """Whether any layer's own attention has a sliding window."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)


def _joined(first: Tensor | None, then: Tensor | None, columns: int, then_ids: Tensor) -> Tensor | None:
    """Real columns of two pieces in a row, the first of `columns`; None = all."""
    if first is None and then is None:
        return None
    ones = torch.ones_like(then_ids[:, :1], dtype=torch.bool)
    pieces = ((first, columns), (then, then_ids.shape[1]))
    return torch.cat([ones.expand(-1, width) if real is None else real for real, width in pieces], 1)
