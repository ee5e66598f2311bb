"""The replay: each sample is prefilled once, and every method builds its cache from that pass and decodes.

N methods cost one prefill and N short decodes. The first token of a reply comes from the dense pass. There are two
exceptions. With compress=before_question the question is read through the compressed cache, and the first token comes
from that. A method with a prefill of its own runs it, and its first token comes from that prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicSlidingWindowLayer

from data_gen.sample import Sample
from eval.benchmarks.row import Row
from eval.benchmarks.scoring import cut_at_stop
from eval.cache import CompressedCache
from eval.inference.decode import Stopped, greedy
from eval.inference.prefill import Prefill, extend, pad_left, prefill
from eval.inference.prompts import SPECIALS, Prompt, encode
from eval.methods import Method
from eval.run.compression import Compression
from leank_train.backbone import eos_ids
from leank_train.common.typed import BadConfig, Checked, Count, OneOf, Positive

COMPRESS = ("after_question", "before_question")


@dataclass(frozen=True)
class Settings(Checked):
    """Settings of the replay.

    compress: "after_question" compresses the whole prompt, "before_question" only what stands before the question.
    batch_size: samples of one task and length that are decoded together.
    prefill_chunk: prompt tokens per prefill call; None reads the prompt in one call.
    max_new_tokens, min_new_tokens: bounds of a reply that replace the benchmark's; None keeps the benchmark's.
    match: share of dense bytes, or label of a method, that every method is brought to; see eval.run.matched.
    shard: "i/n" does every n-th batch, beginning with batch i (0 is the first), for several GPUs or a Slurm array.
    specials: how special tokens in a sample's own text are read, see eval.inference.prompts.encode.
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
        """Number of this shard and number of shards. Raises ValueError if there is no such shard."""
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
    """One method's answer to one sample.

    tokens, text: the reply.
    seconds: prefill, seal, question and decode of the whole batch.
    steps: decoding steps of the batch.
    batch: samples in the batch.
    bytes: bytes held after the prompt, per part; this sample's share of the batch.
    middle_tokens: tokens between sink and window at the end of the reply; None for dense.
    compressed: whether less than the dense cache is held or read; None for dense.
    dense_only: whether the dense pass's logits alone decide the reply.
    non_finite: step (0: the first token) at which logits were NaN or infinite and the reply ended; None if never.
    selected_layer: layer that the prefill selected, -1 if it found none; None for a prefill that looks for none.
    """

    tokens: list[int]
    text: str
    seconds: dict[str, float]
    steps: int
    batch: int
    bytes: dict[str, float] = field(default_factory=dict)
    middle_tokens: int | None = None
    compressed: bool | None = None
    dense_only: bool = False
    non_finite: int | None = None
    selected_layer: int | None = None


def cache_bytes(cache: Cache, prompt: Prefill) -> dict[str, int]:
    """Return the bytes held after the prompt, per part and in total, measured on the tensors.

    A dense cache is counted without its room for new tokens.
    """
    if isinstance(cache, CompressedCache):
        memory = cache.memory()
        return {**asdict(memory), "total": memory.total}
    return {"dense": prompt.bytes(), "total": prompt.bytes()}


@dataclass(frozen=True)
class _Replies:
    """What the replies of a batch may be: per row the question that is still to be read, and the bounds of tokens."""

    rows: Sequence[Row]
    questions: list[list[int]]
    most: list[int]
    least: list[int]


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
        before = self.settings.compress == "before_question"
        most = [self.settings.max_new_tokens or row.max_new_tokens for row in rows]
        least = [min(n, self.settings.min_new_tokens or row.min_new_tokens) for n, row in zip(most, rows, strict=True)]
        first = [p.ids[: p.question] if before else p.ids for p in prompts]
        if before and min(map(len, first)) == 0:
            empty = rows[min(range(len(rows)), key=lambda i: len(first[i]))]
            raise ValueError(
                f"sample {empty.id} of {empty.task} has no context before its question; use compress=after_question"
            )
        replies = _Replies(rows, [p.ids[p.question :] if before else [] for p in prompts], most, least)
        ids, real = pad_left(first, self.pad, self.model.device)
        after = max(most) + max(map(len, replies.questions))
        for method, prompt, spent in self._prefills(methods, ids, real, after, self.settings.prefill_chunk):
            answers = self._answers(method, prompt, replies, *spent)
            del prompt  # before the next pass
            yield method, answers

    def _answers(
        self, method: Method, prompt: Prefill, replies: _Replies, prefilled: float, taken: int
    ) -> list[Answer]:  # fmt: skip
        """Seal the prompt in the cache, read the questions, decode. taken: bytes that the prefill allocated."""
        rows, device, before = replies.rows, self.model.device, self.settings.compress == "before_question"
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
            question, there = pad_left(replies.questions, self.pad, device)
            mask = _joined(mask, there, prompt.columns, question)
            logits = extend(self.model, cache, question, mask)
            lengths = lengths + torch.tensor([len(q) for q in replies.questions], device=device)
            asked = self._now() - start
        start, stopped = self._now(), self._stops(rows)
        tokens, steps, broken = greedy(
            self.model, cache, logits, mask, lengths, self.eos, replies.most, replies.least, stopped
        )
        seconds = {"prefill": prefilled, "seal": sealed, "question": asked, "decode": self._now() - start}
        share: dict[str, float] = {name: value // len(rows) for name, value in held.items()}
        found = compression.found([len(q) + min(steps, len(t)) for q, t in zip(replies.questions, tokens, strict=True)])
        answers = []
        for row, t in enumerate(tokens):
            middle, compressed = found[row] if method.axes else (None, None)
            one = len(t) == 0 or replies.most[row] == 1 or (len(t) == 1 and stopped is not None and stopped(row, t))
            dense = one and broken[row] is None and not before and method.prefill is None
            text = str(self.tokenizer.decode(t, skip_special_tokens=True))
            layer = None if prompt.selected_at is None else prompt.selected_at[row]
            answers.append(
                Answer(t, text, seconds, steps, len(rows), share, middle, compressed, dense, broken[row], layer)
            )
        return answers

    def _prefills(
        self, methods: Sequence[Method], ids: Tensor, real: Tensor | None, room: int, chunk: int | None
    ) -> Iterator[tuple[Method, Prefill, tuple[float, int]]]:
        """Yield each method with its pass over the prompts, and the seconds and bytes of that pass.

        Methods that want column sums share one dense pass, all other methods a second one, so that no method's time
        contains column sums it does not use. A method with a prefill of its own shares none.
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

    def _stops(self, rows: Sequence[Row]) -> Stopped | None:
        """Return whether a reply has reached a stop string, as a function of its row and tokens; None without any."""
        if not any(row.stop for row in rows):
            return None

        def stopped(row: int, tokens: list[int]) -> bool:
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            return bool(rows[row].stop) and cut_at_stop(text, rows[row].stop) != text

        return stopped

    def _allocated(self) -> int:
        device = self.model.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def _now(self) -> float:
        """Read the clock after the GPU has finished."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _slides(model: PreTrainedModel) -> bool:
    """Whether any layer's own attention has a sliding window."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)


def _joined(first: Tensor | None, then: Tensor | None, columns: int, then_ids: Tensor) -> Tensor | None:
    """Join which columns are real tokens of two neighbouring pieces; None stands for all. columns: of the first."""
    if first is None and then is None:
        return None
    ones = torch.ones_like(then_ids[:, :1], dtype=torch.bool)
    pieces = ((first, columns), (then, then_ids.shape[1]))
    return torch.cat([ones.expand(-1, width) if real is None else real for real, width in pieces], 1)
