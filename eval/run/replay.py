"""The replay: each sample is prefilled once, and every method builds its cache from that pass and decodes.

N methods cost one prefill and N short decodes. The first token of a reply comes from the dense pass. There are two
exceptions. With compress=before_question the question is read through the compressed cache, and the first token comes
from that. A method with a prefill of its own runs it, and its first token comes from that prefill.

A conversation has several turns: the context is prefilled once, each method compresses it, and the questions follow.

With by_position no method writes a reply: dense does once, and every method reads it (`eval.run.fidelity`).
"""

import copy
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from leank.backbone import eos_ids
from leank.data_gen.amount import amount
from leank.data_gen.task import Sample
from leank.eval.benchmarks.base import Row, cut_at_stop
from leank.eval.cache import CompressedCache
from leank.eval.cache.graph import stores
from leank.eval.cache.storage.codecs import PageSegment
from leank.eval.inference.decode import Stopped, decode
from leank.eval.inference.models import windows_of
from leank.eval.inference.prefill import Prefill, PromptLayer, extend, pad_left, prefill
from leank.eval.inference.prompts import SPECIALS, Prompt, encode
from leank.eval.inference.sampling import GREEDY, Draws, Sampling
from leank.eval.methods import Method
from leank.eval.methods.memory import dense_bytes, planned_bytes
from leank.eval.rows import Fidelity
from leank.eval.run.fidelity import Compared, Comparison, Continuation, Questions
from leank.typed import BadConfig, Checked, Count, OneOf, Positive

log = logging.getLogger("eval")

COMPRESS = ("after_question", "before_question")
MARGIN = 16  # last tokens of a reply in which a stop string is looked for, at least
BETWEEN = 20.0  # seconds between two lines of progress
DENSE = Method("dense")


@dataclass(frozen=True)
class Settings(Checked):
    """Settings of the replay."""

    # "after_question" compresses the whole prompt, "before_question" only what stands before the question
    compress: Annotated[str, OneOf(*COMPRESS)] = "after_question"
    batch_size: Positive = 1  # samples of one task and length that are decoded together
    prefill_chunk: Positive | None = None  # prompt tokens per prefill call; None reads the prompt in one call
    # max_new_tokens, min_new_tokens: bounds of a reply that replace the benchmark's; None keeps the benchmark's
    max_new_tokens: Positive | None = None
    min_new_tokens: Count | None = None
    sampling: Sampling = GREEDY  # how replies are drawn, and how many of each sample
    # tokens of dense's reply at which every method's next-token distribution is compared with dense's, see
    # eval.run.fidelity; 0 compares none
    fidelity: Count = 0
    # tokens of a block: every method reads dense's reply (or the text) as it would decode it, in place of writing one,
    # and is compared with dense in every block, see eval.run.fidelity; 0 lets every method write its own
    by_position: Count = 0
    # share of dense bytes, or label of a method, that every method is brought to; see eval.run.build
    match: float | str | None = None
    # "i/n" does every n-th batch, beginning with batch i (0 is the first), for several machines or a Slurm array
    shard: str = "0/1"
    devices: Annotated[int, Ge(1), Le(1024)] = 1  # GPUs that share the batches, a process each; on a CPU, processes
    # how special tokens in a sample's own text are read, see eval.inference.prompts.encode
    specials: Annotated[str, OneOf(*SPECIALS)] = "text"

    @property
    def numbered_shard(self) -> tuple[int, int]:
        """Number of this shard and number of shards. Raises ValueError if there is no such shard."""
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ValueError(f"shard={self.shard!r} is no shard; the first of four is shard=0/4, the last shard=3/4")
        return int(number), int(count)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.numbered_shard
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.by_position:
            wrong = [
                (f"fidelity={self.fidelity}", "the whole of dense's reply is compared; leave it out", self.fidelity),
                (f"sampling.replies={self.sampling.replies}", "one reply of a sample is read; take more samples",
                 self.sampling.replies > 1),
                (f"compress={self.compress}", "use compress=after_question", self.compress == "before_question"),
            ]  # fmt: skip
            for what, cure, there in wrong:
                if there:
                    raise BadConfig(f"{what} beside by_position={self.by_position}: {cure}")


@dataclass
class Answer:
    """One method's answer to one sample."""

    tokens: list[int]  # tokens, text: the reply
    text: str
    seconds: dict[str, float]  # prefill, seal (building the cache), question and decode of the whole batch
    steps: int  # decoding steps of the batch
    limited: bool  # whether nothing but the most tokens of a reply ended it
    batch: int  # samples in the batch
    # bytes held after the prompt, per part; this sample's share of the batch
    bytes: dict[str, float] = field(default_factory=dict)
    middle_tokens: int | None = None  # tokens between sink and window at the end of the reply; None for dense
    compressed: bool | None = None  # whether less than the dense cache is held or read; None for dense
    dense_only: bool = False  # whether the dense pass's logits alone decide the reply
    # step (0: the first token) at which logits were NaN or infinite and the reply ended; None if never
    non_finite: int | None = None
    # how near the next-token distributions are to dense's; None where that was not measured
    fidelity: Fidelity | None = None
    # share of a text's tokens that the method ranks first, or its top-1 agreement with dense along dense's reply; None
    # for a reply of the method's own, which a scorer reads
    score: float | None = None
    # layer that the prefill selected, -1 if it found none; None for a prefill that looks for none
    selected_layer: int | None = None
    saturated: int | None = None  # see `eval.rows.ResultRow`


@dataclass(frozen=True)
class Turn:
    """What is read and written behind the prompts of a batch; a benchmark without conversations has one turn."""

    rows: Sequence[Row]  # of the batch
    prompts: Sequence[list[int]]  # per row, all tokens up to the reply
    questions: list[list[int]]  # per row, tokens that are still to be read before the reply
    most: list[int]  # most, least: per row, bounds of the reply's tokens
    least: list[int]
    # per row, the tokens of a text that is read in place of a reply; None where replies are decoded
    texts: list[list[int]] | None = None


@dataclass
class Batch:
    """Samples that are replayed together."""

    turns: Sequence[Turn]  # what follows the prompts, turn by turn
    one_cache: bool  # whether a turn follows the turns before it on one cache; else each has a copy of the context's
    ids: Tensor  # int [B, T], the prompts, left-padded
    real: Tensor | None  # bool [B, T] or None: False marks padding; None is no padding
    room: int  # columns that a cache needs behind the prompts
    # what every method reads to be compared with dense; None until the first pass, or if none is
    continuation: Continuation | None = None
    # per row, dense's reply that every method reads with by_position; None until it is there
    replies: list[list[int] | None] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.ids)


@dataclass(frozen=True)
class Asked:
    """Where a cache stands once a turn's questions, if they were still to come, are read."""

    questions: Questions
    logits: Tensor  # [B, vocabulary], of the reply's first token
    seconds: float  # spent on reading


@dataclass(frozen=True)
class Decoded:
    """What came of a turn, or of one of its replies."""

    tokens: list[list[int]]  # per row, the reply, or the text that was read
    steps: int  # decoding steps
    broken: list[int | None]  # per row, `Answer.non_finite`
    fed: list[int]  # per row, tokens behind the prompt that were read
    cache: Cache  # through which they were read
    seconds: float  # spent on decoding, or on reading the texts


class Compression:
    """What a cache with the prompts leaves out of the dense one; `found` is called once replies are there."""

    def __init__(self, method: Method, cache: Cache, prompt: Prefill) -> None:
        self.method, self.rows = method, len(prompt.logits)
        self.stores = stores(cache)
        self.sealed = [store.seen.copy() for store in self.stores]
        self.dropped = np.zeros(self.rows, dtype=bool)  # by the method's own prefill
        if prompt.given is not None:
            self.dropped |= np.array(prompt.given) > prompt.lengths.cpu().numpy()
        for layer in prompt.layers:
            if isinstance(layer, PromptLayer) and layer.kept is not None:
                self.dropped |= ((layer.kept >= 0).sum(-1) < prompt.lengths).cpu().numpy()

    def saturated(self) -> list[int] | None:
        """Return per row how many numbers of the prompt's middle saturated; None where that is not known.

        To be called before anything follows the prompt. Tokens that are evicted while decoding take their counts along.
        """
        parts = [part for store in self.stores for part in (store.prompt, store.tail) if store.eviction is None]
        counts = [part.saturated for part in parts if isinstance(part, PageSegment) and part.saturated is not None]
        return torch.stack(counts).sum(0).tolist() if counts else None

    def found(self, fed: Sequence[int], branch: Cache | None = None) -> list[tuple[int, bool]]:
        """Return per row the middle tokens of the layer with most, and whether less than all of them is held or read.

        fed: per row, the tokens that followed its prompt, given to a copy `branch` of the cache, None = the cache.
        """
        held_now = self.stores if branch is None else stores(branch)
        middle, less = np.zeros(self.rows, dtype=int), self.dropped.copy()
        budget = getattr(self.method.reads, "budget", None)
        for store, seen in zip(held_now, self.sealed, strict=True):
            size = store.sizes
            start = size.window_start(seen)
            moved = np.maximum(0, seen + np.array(fed) - start - size.window) // size.flush * size.flush
            mine = start + moved - size.sink
            held = (store.prompt.length + store.tail.length).min(-1)
            narrow = (store.channels.count < store.ring_k.shape[-1]).any(-1) | (held < store.start - size.sink)
            if store.values is not None:
                narrow |= (store.values.count < store.ring_v.shape[-1]).any(-1)
            if store.reads is not None:
                narrow |= mine > (budget or 0) - size.sink - size.window
            middle, less = np.maximum(middle, mine), less | (mine > 0) & (narrow | (store.middle.bits is not None))
        return list(zip(middle.tolist(), less.tolist(), strict=True))


@dataclass
class Warnings:
    """Warns once per method and cell of scores that say nothing, and stops a run whose dense replies are all broken."""

    said: set[tuple[str, str, str]] = field(default_factory=set)  # those so far, as (message, method, place)
    dense: int = 0  # samples of the dense method so far
    broken: int = 0  # those of them with non-finite logits

    def say(self, what: str, method: str, where: str, *values: object) -> None:
        """Log `what` with method, place and values unless it has been said of them."""
        if (what, method, where) not in self.said:
            self.said.add((what, method, where))
            log.warning(what, method, where, *values)

    def note(self, method: Method, where: str, tokens: int, compressed: bool | None, dense_only: bool,
            non_finite: int | None, saturated: int | None) -> None:  # fmt: skip
        """Note one sample. tokens: of its prompt; the other values are those of its row."""
        if compressed is False:
            self.say(
                "%s, %s: nothing is compressed in a prompt of %d tokens, which sink=%d and window=%d (or a budget) "
                "hold whole; lower them or use longer prompts",
                method.label, where, tokens, method.sink, method.window,
            )  # fmt: skip
        if dense_only and method.axes:
            self.say(
                "%s, %s: a reply rests on the first token alone, which comes from the dense prefill; its score says "
                "nothing about the method: raise max_new_tokens or use compress=before_question",
                method.label, where,
            )  # fmt: skip
        if saturated:
            self.say(
                "%s, %s: numbers saturate: %d of a prompt's middle are beyond the largest that their format stores; "
                "calibrate scales (method.fp8.bits.scales=head) or take other bits (kivi8)",
                method.label, where, saturated,
            )  # fmt: skip
        if non_finite is not None:
            self.say("%s, %s: non-finite logits at step %d; such a sample scores 0", method.label, where, non_finite)
        if not method.axes:
            self.dense, self.broken = self.dense + 1, self.broken + (non_finite is not None)

    def stop_if_broken(self, model: str, dtype: str) -> None:
        """Raise ValueError if every sample of the dense method so far had non-finite logits."""
        if self.dense and self.broken == self.dense:
            raise ValueError(
                f"of {amount(self.dense, 'sample')} of the dense method so far, all had NaN or infinite logits with "
                f"model.dtype={dtype}: use model.dtype=bfloat16 or float32, and check the weights of model.name={model}"
            )


def cache_bytes(cache: Cache, prompt: Prefill) -> list[dict[str, float]]:
    """Return the bytes held after each prompt, per part and in total, measured on the tensors.

    Dense ones are counted row by row, without padding and room for tokens; of a compressed cache rows share alike.
    """
    if isinstance(cache, CompressedCache):
        memory, rows = cache.memory(), len(prompt.logits)
        share = {name: float(size // rows) for name, size in {**asdict(memory), "total": memory.total}.items()}
        return [dict(share) for _ in range(rows)]
    return [{"dense": float(size), "total": float(size)} for size in prompt.bytes()]


class Meter:
    """Bytes and time of reading: `note(tokens read)` measures where a block ends. ends: tokens, ascending."""

    def __init__(self, replay: "Replay", cache: Cache, prompt: Prefill, ends: Sequence[int]) -> None:
        self.replay, self.cache, self.prompt, self.ends = replay, cache, prompt, ends
        self.of_blocks: list[float] = []  # seconds
        # one sample's share of all, and of tables; none of a dense cache, whose room is not what it holds
        self.bytes: list[float] = []
        self.tables: list[float] = []
        self._began = replay.now()

    def note(self, done: int) -> None:
        """Measure if a block ends with so many tokens; what measuring takes does not count."""
        if done == self.ends[len(self.of_blocks)]:
            self.of_blocks.append(self.replay.now() - self._began)
            if isinstance(self.cache, CompressedCache):
                held = cache_bytes(self.cache, self.prompt)[0]
                self.bytes.append(held["total"])
                self.tables.append(held["tables"])
            self._began = self.replay.now()

    @property
    def seconds(self) -> list[float]:
        """Of a token, mean over each block."""
        sizes = (end - start for start, end in zip([0, *self.ends], self.ends, strict=False))
        return [spent / size for spent, size in zip(self.of_blocks, sizes, strict=True)]


def branch(cache: Cache) -> Cache:
    """Return a cache that continues this one, which stays as it is; of a dense one's, one at a time may be in use."""
    if isinstance(cache, CompressedCache):
        return copy.deepcopy(cache)
    return Cache(layers=[one.fork() if isinstance(one, PromptLayer) else copy.copy(one) for one in cache.layers])


class Replay:
    """Methods on one model: `answers(prompts, rows, methods)`. It reads and writes no files.

    tokenizer: of the model; `answers` needs its `decode` and `pad_token_id` alone.
    Raises ValueError if the model's sliding windows would count padding as tokens.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.eos = eos_ids(model, tokenizer)
        self.pad = getattr(tokenizer, "pad_token_id", None) or 0
        slides = any(window is not None for window in windows_of(model.config.get_text_config(decoder=True)))
        if settings.compress == "before_question" and settings.batch_size > 1 and slides:
            raise ValueError(
                f"batch_size={settings.batch_size} with compress=before_question pads questions after their contexts, "
                "and the model's sliding windows would count padding as tokens; use batch_size=1"
            )

    def calibrate(self, methods: Sequence[Method], chat: bool | None = None) -> None:
        """Show calibration samples to the methods that want them. chat: see `ModelConfig.chat`."""
        last, label = time.perf_counter(), ""

        def observe(sample: Sample, queries: int) -> Prefill:
            nonlocal last
            if time.perf_counter() - last >= BETWEEN:
                last = time.perf_counter()
                log.info("%s is calibrated: sample %d of %s", label, sample.index, sample.task)
            row = Row(sample.task, str(sample.index), sample.context, sample.question, sample.answers,
                      sample.max_new_tokens, "ruler_all", answer_prefix=sample.answer_prefix)  # fmt: skip
            ids, _ = pad_left(
                [encode(self.tokenizer, row, chat, self.settings.specials).ids], self.pad, self.model.device
            )
            return prefill(self.model, ids, None, 0, queries, self.settings.prefill_chunk)

        for method in methods:
            label = method.label
            for choice in method.axes.values():
                choice.calibrate(observe, self.tokenizer, self.model.config.get_text_config(decoder=True))

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[Prompt], rows: Sequence[Row], methods: Sequence[Method],
        turns: int = 1, one_cache: bool = False, known: Sequence[list[int] | None] = (),
    ) -> Iterator[tuple[Method, list[Answer]]]:  # fmt: skip
        """Yield each method with its answers, in the order of rows; methods that can share a dense pass do.

        With sampling each row has `Settings.sampling.replies` answers, one after the other.

        prompts, rows: of the samples; of conversations, those of the first one's turns, then the second one's, ...
        turns, one_cache: see `Cell`
        known: per row, dense's reply that earlier methods have read with by_position; None where dense is to write it
        Raises ValueError if compress=before_question meets a sample without a context, and for conversations with
        by_position.
        """
        reading = any(row.read for row in rows)
        if self.settings.by_position and turns > 1:
            raise ValueError(
                f"by_position={self.settings.by_position}: {rows[0].task} has conversations, and one reply of a sample "
                "is read; take another benchmark"
            )
        if reading and self.settings.sampling.temperature:
            raise ValueError(
                f"sampling.temperature={self.settings.sampling.temperature}: task {rows[0].task} reads texts and "
                "writes no replies; leave sampling out"
            )
        words = self.model.config.get_text_config(decoder=True).vocab_size
        if any(token >= words for reply in known if reply for token in reply):
            raise ValueError(
                f"a row of {rows[0].task} has tokens beyond the model's vocab_size={words}: it was edited, or is of "
                "another model; move its results*.jsonl to another folder and run again"
            )
        split = reading or turns > 1 or self.settings.compress == "before_question"
        first = [p.ids[: p.question] if split else p.ids for p in prompts[::turns]]
        if split and min(map(len, first)) == 0:
            empty = rows[turns * min(range(len(first)), key=lambda i: len(first[i]))]
            raise ValueError(
                f"sample {empty.id} of {empty.task} has no context before its question; use compress=after_question"
            )
        plan = []
        for number in range(turns):
            rest = [p.ids[p.question :] if split else [] for p in prompts[number::turns]]
            of_turn = rows[number::turns]
            questions, texts = ([[] for _ in rest], rest) if reading else (rest, None)
            whole = [p.ids for p in prompts[number::turns]]
            plan.append(Turn(of_turn, whole, questions, *self.bounds(of_turn), texts))
        read = [max(map(len, turn.questions)) + max(map(len, turn.texts or [[]])) for turn in plan]
        room = max(n for turn in plan for n in turn.most) + (sum(read) if one_cache else max(read))
        batch = Batch(plan, one_cache, *pad_left(first, self.pad, self.model.device), room)
        batch.replies = list(known) or [None] * batch.rows
        # Column sums cost time, so methods that want them share a dense pass, and all others another one. A method
        # with a prefill of its own shares none.
        groups = [[m for m in methods if m.prefill is None and m.column_sums == sums] for sums in (False, True)]
        groups += [[m] for m in methods if m.prefill is not None]
        for group in filter(None, groups):
            yield from self._sharing_a_pass(group, batch)

    def _sharing_a_pass(self, methods: Sequence[Method], batch: Batch) -> Iterator[tuple[Method, list[Answer]]]:
        """Prefill once, in a local that is freed before the next pass, and yield each method with its answers."""
        start, allocated = self.now(), self._allocated()
        obs = max(method.obs_queries for method in methods)
        chunk = self.settings.prefill_chunk
        prompt = methods[0].run_prefill(self.model, batch.ids, batch.real, batch.room, chunk, obs)
        prefilled, taken = self.now() - start, self._allocated() - allocated
        single = len(batch.turns) == 1
        compares = self.settings.fidelity or self.settings.by_position or batch.turns[0].texts is not None
        if batch.continuation is None and single and compares:
            batch.continuation = self._continuation(prompt if methods[0].prefill is None else None, batch)
        for method in methods:
            found = self._answers(method, prompt, batch, prefilled, taken)
            if batch.continuation is not None and self._beside(batch):
                # `_answers` has let go of its cache: there may not be room for two
                near = self._comparison.fidelity(method.cache(self.model, prompt), prompt, batch.continuation)
                for answer, (fidelity, _) in zip(found[:: self.settings.sampling.replies], near, strict=True):
                    answer.fidelity = fidelity
            yield method, found

    def _continuation(self, prompt: Prefill | None, batch: Batch) -> Continuation:
        """Return what all methods of a batch read: the texts, or dense's own replies. prompt: a dense pass, if any."""
        turn = batch.turns[0]
        if prompt is None:
            prompt = prefill(self.model, batch.ids, batch.real, batch.room, 0, self.settings.prefill_chunk)
        if turn.texts is not None:
            return self._comparison.continuation(prompt, turn.questions, turn.texts, True)
        if self.settings.by_position:
            if None in batch.replies:
                asked = self._ask(prompt.fork(), prompt, prompt, turn)
                written = self._decode(self._cache(DENSE, prompt), prompt, asked, turn, self._draws(turn, 0)).tokens
                batch.replies = [new if old is None else old for old, new in zip(batch.replies, written, strict=True)]
            tokens = [reply for reply in batch.replies if reply is not None]
            return self._comparison.continuation(prompt, turn.questions, tokens, False)
        most = [min(n, self.settings.fidelity) for n in turn.most]
        least = [min(pair) for pair in zip(most, turn.least, strict=True)]
        cache = prompt.fork()
        asked = self._ask(cache, prompt, prompt, turn)
        decoded = self._decode(cache, prompt, asked, replace(turn, most=most, least=least), None)
        return self._comparison.continuation(prompt, turn.questions, decoded.tokens, False)

    def _beside(self, batch: Batch) -> bool:
        """Whether methods are compared with dense along its reply beside writing their own."""
        return bool(self.settings.fidelity) and batch.turns[0].texts is None

    def _cache(self, method: Method, prompt: Prefill) -> Cache:
        """Return a method's cache with the prompts; dense's by position as a compressed one that leaves out nothing."""
        whole = self.settings.by_position and not method.axes
        return method.compressed(self.model, prompt) if whole else method.cache(self.model, prompt)

    @cached_property
    def _comparison(self) -> Comparison:
        return Comparison(self.model, self.pad)

    def _answers(self, method: Method, prompt: Prefill, batch: Batch, prefilled: float, taken: int) -> list[Answer]:
        """Build the method's cache from its pass (of so many seconds and bytes), and answer each turn."""
        start, allocated = self.now(), self._allocated()
        cache = self._cache(method, prompt)
        sealed = self.now() - start
        held = cache_bytes(cache if method.axes else prompt.fork(), prompt)
        compression = Compression(method, cache, prompt)
        saturated = compression.saturated()
        again = batch.continuation is not None and self._beside(batch)  # a second cache will be built
        if method.prefill is not None and not again:
            prompt.layers.clear()  # the cache has what it needs of them
            allocated -= taken  # the pass was this method's alone: what is left of it is the cache's, too
        if self._counts:
            grown = taken if "dense" in held[0] else self._allocated() - allocated
            held = [{**own, "allocated": float(grown // batch.rows)} for own in held]
        before: Prefill | Questions = prompt
        found: list[list[Answer]] = []  # of each turn and reply

        def add(turn: Turn, decoded: Decoded, question_seconds: float, near: Sequence[Compared] | None = None) -> None:
            seconds = {
                "prefill": prefilled, "seal": sealed, "question": question_seconds, "decode": decoded.seconds,
            }  # fmt: skip
            middle, stopped = compression.found(decoded.fed, decoded.cache), self.stops(turn.rows)
            found.append([
                Answer(
                    tokens=tokens,
                    text="" if turn.texts is not None else str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
                    seconds=seconds,
                    steps=decoded.steps,
                    limited=len(tokens) == turn.most[row] > 0 and decoded.broken[row] is None
                    and not (stopped is not None and stopped(row, tokens)),
                    batch=batch.rows,
                    bytes=held[row],
                    middle_tokens=middle[row][0] if method.axes else None,
                    compressed=middle[row][1] if method.axes else None,
                    dense_only=self._dense_only(method, turn, decoded, row),
                    non_finite=decoded.broken[row],
                    fidelity=None if near is None else near[row][0],
                    score=None if near is None else near[row][1],
                    selected_layer=None if prompt.selected_at is None else prompt.selected_at[row],
                    saturated=None if saturated is None else saturated[row],
                )
                for row, tokens in enumerate(decoded.tokens)
            ])  # fmt: skip

        for turn in batch.turns:
            if batch.continuation is not None and not self._beside(batch):
                tokens = [reply or [] for reply in batch.replies] if turn.texts is None else turn.texts
                near, spent, steps = self._read(method, cache, prompt, batch.continuation)
                broken = [None if one is None else one["non_finite"] for one, _ in near]
                add(turn, Decoded(tokens, steps, broken, batch.continuation.counts, cache, spent), 0.0, near)
                continue
            reading = cache if batch.one_cache or len(batch.turns) == 1 else branch(cache)
            asked = self._ask(reading, prompt, before, turn)
            before = asked.questions if batch.one_cache else before
            last = self.settings.sampling.replies - 1
            for reply in range(last + 1):
                mine = branch(reading) if batch.one_cache or reply < last else reading
                add(turn, self._decode(mine, prompt, asked, turn, self._draws(turn, reply)), asked.seconds)
        return [answer for conversation in zip(*found, strict=True) for answer in conversation]

    def _read(
        self, method: Method, cache: Cache, prompt: Prefill, continuation: Continuation
    ) -> tuple[list[Compared], float, int]:
        """Read a continuation through a method's cache.

        Returns each row's figures, the seconds of reading, and the decoding steps, 0 if tokens came in pieces.
        """
        block, length, start = self.settings.by_position, continuation.ids.shape[1], self.now()
        if not block or not length:
            return self._comparison.fidelity(cache, prompt, continuation), self.now() - start, 0
        meter = Meter(self, cache, prompt, [*range(block, length, block), length])
        near, found, steps = self._comparison.fidelity(cache, prompt, continuation, block, meter.note), [], 0
        config, itemsize = self.model.config.get_text_config(decoder=True), self.model.dtype.itemsize
        prompts = prompt.lengths.tolist()
        plans = [planned_bytes(method, config, prompts, end, itemsize) for end in meter.ends]
        for (one, score), tokens, count in zip(near, prompts, continuation.counts, strict=True):
            if one is not None and "along" in one:
                along, blocks = one["along"], len(one["along"]["kl"])
                steps = length if along["stepped"] else 0
                along["seconds"] = meter.seconds[:blocks]
                if method.axes:
                    along["planned"] = [None if plan is None else plan / len(prompts) for plan in plans[:blocks]]
                    along |= {"bytes": meter.bytes[:blocks], "tables": meter.tables[:blocks]} if meter.bytes else {}
                else:
                    sizes = [tokens + min(count, end) for end in meter.ends[:blocks]]
                    along["bytes"] = [float(dense_bytes(config, n, itemsize)) for n in sizes]
                    along["planned"] = [*along["bytes"]]
            found.append((one, one["top1"] if one is not None and continuation.targets is None else score))
        return found, sum(meter.of_blocks), steps

    def _dense_only(self, method: Method, turn: Turn, decoded: Decoded, row: int) -> bool:
        """Whether the dense pass's logits alone decide a row's reply."""
        if turn.texts is not None or turn.questions[row] or method.prefill is not None:
            return False
        tokens, stopped = decoded.tokens[row], self.stops(turn.rows)
        one = len(tokens) == 0 or turn.most[row] == 1
        one = one or (len(tokens) == 1 and stopped is not None and stopped(row, tokens))
        return one and decoded.broken[row] is None

    def _draws(self, turn: Turn, reply: int) -> Draws | None:
        """Return what decides the tokens of a turn's replies of that number; None if decoding is greedy."""
        sampling = self.settings.sampling
        if not sampling.temperature:
            return None
        return Draws.of(sampling, turn.prompts, reply, max(turn.most), self.model.device)

    def _ask(self, cache: Cache, prompt: Prefill, before: Prefill | Questions, turn: Turn) -> Asked:
        """Read a turn's questions behind `before` through a cache.

        prompt: whose next token is the reply's first where no question is read.
        """
        start, logits, spent = self.now(), prompt.logits, 0.0
        asked = Questions.of(before, turn.questions, self.pad)
        if asked.ids.shape[1]:
            logits = extend(self.model, cache, asked.ids, asked.real)
            spent = self.now() - start
        return Asked(asked, logits, spent)

    def _decode(self, cache: Cache, prompt: Prefill, asked: Asked, turn: Turn, draws: Draws | None) -> Decoded:
        """Decode a reply to each of a turn's questions, which the cache has read; draws: None = likeliest tokens."""
        start, questions = self.now(), asked.questions
        tokens, steps, broken = decode(
            self.model, cache, asked.logits, questions.real, questions.lengths, self.ends(turn.rows), turn.most,
            turn.least, self.stops(turn.rows), draws,
        )  # fmt: skip
        read = (questions.lengths - prompt.lengths).tolist()
        fed = [n + min(steps, len(reply)) for n, reply in zip(read, tokens, strict=True)]
        return Decoded(tokens, steps, broken, fed, cache, self.now() - start)

    def bounds(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Return the most and the least tokens of each row's reply."""
        most = [0 if row.read else self.settings.max_new_tokens or row.max_new_tokens for row in rows]
        wanted = [self.settings.min_new_tokens or row.min_new_tokens for row in rows]
        if self.settings.by_position:  # of an empty reply there is nothing to read
            wanted = [max(1, n) for n in wanted]
        least = list(map(min, most, wanted))
        return most, least

    def ends(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens that end a reply; the rows of a batch are of one task, and end alike."""
        return [*self.eos, *(self.tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in rows[0].ends)]

    def stops(self, rows: Sequence[Row]) -> Stopped | None:
        """Return whether a reply has reached a stop string, as a function of its row and tokens; None without any.

        To be asked after every token: it reads the text's end alone, and the whole text where the end has the string.
        """
        if not any(row.stop for row in rows):
            return None

        def text(tokens: list[int]) -> str:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

        def stopped(row: int, tokens: list[int]) -> bool:
            stop = rows[row].stop
            # the characters in which a stop string that the last token ends may begin, and as many again
            wanted = 2 * (max(map(len, stop), default=0) + len(text(tokens[-1:])))
            last = MARGIN
            while last < len(tokens) and len(text(tokens[-last:])) < wanted:
                last *= 2
            found = (text(some) for some in (tokens[-last:], tokens))
            return all(cut_at_stop(one, stop) != one for one in found)

        return stopped

    @property
    def _counts(self) -> bool:
        return self.model.device.type == "cuda"

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.model.device) if self._counts else 0

    def now(self) -> float:
        """Read the clock after the GPU has finished."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()
