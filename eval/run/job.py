"""A run: which rows it is to have, which of them are missing, and how they are made, batch by batch."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch
import transformers
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leank.data_gen.amount import amount
from leank.errors import out_of_memory
from leank.eval.benchmarks.base import STATED, Benchmark, Cell, Row, score_row, stated
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prompts import Prompt, encode_turns, overhead, without_thoughts
from leank.eval.methods import Method
from leank.eval.rows import Collected, Key, ResultRow, Results, RowSettings, reply_key
from leank.eval.run.replay import BETWEEN, Answer, Replay, Settings, Warnings

BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}"
FORMAT = 1  # version of what a row means; part of its key
Tell: TypeAlias = Callable[[str, int, int], None]  # of a method that has answered: its label, its number, of how many
Work: TypeAlias = tuple[Cell, tuple[str, ...], list[Method]]  # a batch: samples of a cell, and methods that lack them
log = logging.getLogger("eval")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide what a model answers."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


@dataclass(frozen=True)
class CellBatch:
    """Samples of one cell that are replayed together, a row and a prompt for each turn, one after the other."""

    cell: Cell
    rows: Sequence[Row]
    prompts: Sequence[Prompt]

    def parts(self, size: int) -> Iterator[CellBatch]:
        """Yield the batch in pieces of at most `size` samples."""
        for start in range(0, len(self.rows), size * self.cell.turns):
            end = start + size * self.cell.turns
            yield CellBatch(self.cell, self.rows[start:end], self.prompts[start:end])


class Progress:
    """How far a run is: a bar on terminals, a line in the log after each cell, and one now and then in long batches."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._left = Counter(cell.place for cell, *_ in work)  # batches of each cell
        self._batches, self._done, self._new = len(work), 0, 0
        self._total, self._spent = sum(cost(*batch) for batch in work), 0
        self._bar: tqdm | None = None
        self._last = time.perf_counter()
        self._began: float | None = None  # with the first batch; models are loaded before

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar, and log beside it."""
        with tqdm(total=self._total, bar_format=BAR, disable=None) as self._bar, logging_redirect_tqdm():
            yield  # disable=None: on terminals alone

    def begins(self, place: str) -> None:
        """Say which cell's batch is next."""
        if self._began is None:
            self._began = self._last = time.perf_counter()
        if self._bar is not None:
            self._bar.set_description(self._where(place))

    def answered(self, place: str, label: str, number: int, methods: int) -> None:
        """Say that a method has answered, if the last line is some time ago."""
        if time.perf_counter() - self._last >= BETWEEN:
            log.info("%s: %s has answered, method %d of %d", self._where(place), label, number, methods)
            self._last = time.perf_counter()

    def replayed(self, place: str, spent: int, rows: int) -> None:
        """Count a batch with its cost and new rows; say so if it was the last one of its cell."""
        self._done, self._new, self._spent = self._done + 1, self._new + rows, self._spent + spent
        self._left[place] -= 1
        if self._bar is not None:
            self._bar.update(spent)
        if not self._left[place]:
            left = (time.perf_counter() - (self._began or self._last)) * (self._total - self._spent) / self._spent
            log.info("%s replayed: batch %d of %d, %s, about %s left", place, self._done, self._batches,
                     amount(self._new, "new row"), tqdm.format_interval(left))  # fmt: skip
            self._last = time.perf_counter()

    def _where(self, place: str) -> str:
        return f"{place}, batch {self._done + 1} of {self._batches}"


def cost(cell: Cell, samples: Sequence[str], methods: Sequence[Method]) -> int:
    """Return what a batch costs, in tokens of prompts under a method."""
    return len(methods) * len(samples) * (cell.length or 1)


@dataclass(frozen=True)
class Job:
    """The plan of one run; it knows which rows the run is to have, and makes those that are missing."""

    model: ModelConfig
    methods: Sequence[Method]
    benchmark: Benchmark
    settings: Settings
    # the methods of a cell whose settings differ there (eval.run.build.matched); other cells take `methods`
    by_cell: Mapping[Cell, Sequence[Method]] = field(default_factory=dict)
    thinks: bool = False  # whether thoughts of replies are cut off before scoring (eval.inference.prompts.thinks)

    def config(self, method: Method, task: str, specials: str | None = None) -> RowSettings:
        """Return what a method's answers depend on beside length, id and seed; specials: of the sample's Prompt."""
        found: RowSettings = {
            "format": FORMAT,
            "method": method.config(),
            "model": self.model.identity(),
            "benchmark": self.benchmark.identity(),
            "decode": {name: getattr(self.settings, name) for name in ("max_new_tokens", "min_new_tokens")},
        }
        if self.settings.fidelity:
            found["fidelity"] = self.settings.fidelity
        if self.settings.by_position:
            found["by_position"] = self.settings.by_position
        if self.thinks:
            found["thought"] = "cut"
        if self.settings.sampling.temperature:
            found["sampling"] = self.settings.sampling.identity()
        if (data := self.benchmark.data(task)) is not None:
            found["data"] = data
        if specials is not None:
            found["specials"] = specials
        return found

    def digest(self, method: Method, task: str, specials: str | None = None) -> str:
        """Return ten hex digits that stand for `config`."""
        return hashlib.sha256(json.dumps(self.config(method, task, specials), sort_keys=True).encode()).hexdigest()[:10]

    def key(self, method: Method, cell: Cell, sample: str, specials: str | None = None) -> Key:
        """Return the key of one row, of a sample's first reply."""
        return self.keys(method, cell, [sample], specials)[0]

    def keys(self, method: Method, cell: Cell, samples: Sequence[str], specials: str | None = None) -> list[Key]:
        """Return the keys of one method's rows in a cell, those of a sample's replies together; they share a digest."""
        first = (self.model.label, method.label, self.digest(method, cell.task, specials), self.benchmark.name)
        last = (self.benchmark.seed, self.settings.compress)
        replies = range(self.settings.sampling.replies)
        return [Key(*first, cell.task, cell.length, sample, *last, reply) for sample in samples for reply in replies]

    def missing(self, done: set[Key]) -> list[Work]:
        """Return the batches that still lack rows, each with the methods that lack them.

        A batch's samples depend on the plan alone: a run that was killed and went on has the same rows as another.
        """
        size, work, batch = self.settings.batch_size, [], -1
        shard, shards = self.settings.numbered_shard
        for cell in self.benchmark.cells():
            lacking = [(method, self._lacking(method, cell, done)) for method in self.by_cell.get(cell, self.methods)]
            for start in range(0, len(cell.samples), size):
                batch += 1
                samples = cell.samples[start : start + size]
                methods = [method for method, lacks in lacking if not lacks.isdisjoint(samples)]
                if methods and batch % shards == shard:
                    work.append((cell, samples, methods))
        return work

    def _lacking(self, method: Method, cell: Cell, done: set[Key]) -> set[str]:
        if not done:
            return set(cell.samples)
        return {sample for sample, either in self._either(method, cell) if done.isdisjoint(either)}

    def _either(self, method: Method, cell: Cell) -> Iterator[tuple[str, tuple[Key, ...]]]:
        """Yield each row's sample, and its keys where its text spells no special token and where it does."""
        ids = [(sample, row) for sample in cell.samples for row in cell.ids(sample)]
        found = (self.keys(method, cell, [row for _, row in ids], how) for how in (None, self.settings.specials))
        samples = (sample for sample, _ in ids for _ in range(self.settings.sampling.replies))
        for sample, *either in zip(samples, *found, strict=True):
            yield sample, tuple(either)

    def all_keys(self) -> list[Key]:
        """Return the keys that the rows of the plan may have, done or not, in its own order."""
        return [
            key
            for cell in self.benchmark.cells()
            for method in self.by_cell.get(cell, self.methods)
            for _, either in self._either(method, cell)
            for key in either
        ]

    def run(
        self, results: Results | Collected, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
        progress: Progress | None = None, work: Sequence[Work] | None = None,
        turns: Callable[[Sequence[Work]], Iterable[Work]] = iter,
    ) -> int:  # fmt: skip
        """Do what is missing. Returns the number of new rows.

        progress: hears how far it is, by default a new one; work: what is missing, by default what `results` lacks.
        turns: gives the batches of `work` that are done here, one after the other, by default all.
        """
        work = self.missing(results.keys) if work is None else work
        progress = progress or Progress(work)
        wanted = {id(method): method for _, _, methods in work for method in methods}
        replay = Replay(model, tokenizer, self.settings)
        replay.calibrate(list(wanted.values()), self.model.chat)
        said, new, size, last = Warnings(), 0, self.settings.batch_size, None
        with progress.shown():
            for cell, samples, methods in turns(work):
                if last is not None and cell is not last:
                    said.stop_if_broken(self.model.name, self.model.dtype)
                    if (cell.length or 0) < (last.length or 0):
                        size = self.settings.batch_size  # what did not fit the longer cell may fit this one
                last = cell
                progress.begins(cell.place)
                batch = self._batch(cell, samples, model, tokenizer)
                tell = partial(progress.answered, cell.place)
                done, size = self._halved_until_it_fits(results, replay, batch, methods, size, said, tell)
                new += done
                progress.replayed(cell.place, cost(cell, samples, methods), done)
            said.stop_if_broken(self.model.name, self.model.dtype)
        return new

    def _batch(
        self, cell: Cell, samples: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> CellBatch:
        """Build a batch's rows and prompts. Raises ValueError for one that is longer than the model's positions."""
        extra, limit = overhead(tokenizer, self.model.chat), getattr(model.config, "max_position_embeddings", None)
        rows: list[Row] = []
        prompts: list[Prompt] = []
        for sample in samples:
            made = self.benchmark.row(cell, sample, tokenizer, extra)
            turns = [made, *made.later]
            if self.settings.by_position and not made.read:
                turns = [replace(one, metric="top1") for one in turns]  # no scorer reads the reply, which is dense's
            rows += turns
            prompts += encode_turns(tokenizer, turns, cell.one_cache, self.model.chat, self.settings.specials)
        for row, prompt in zip(rows, prompts, strict=True):
            total = len(prompt.ids) + (0 if row.read else self.settings.max_new_tokens or row.max_new_tokens)
            if limit is not None and total > limit:
                raise ValueError(
                    f"sample {row.id} of {cell.task} takes {total} tokens with its reply, more than the model's "
                    f"max_position_embeddings={limit}; lower max_new_tokens or use shorter samples"
                )
        return CellBatch(cell, rows, prompts)

    def _halved_until_it_fits(
        self, results: Results | Collected, replay: Replay, batch: CellBatch, methods: Sequence[Method], size: int,
        said: Warnings, tell: Tell,
    ) -> tuple[int, int]:  # fmt: skip
        """Replay a batch, and halve `size` while memory runs out. Returns the new rows and the size that fitted."""
        before, cell = len(results.keys), batch.cell
        while True:
            try:
                for part in batch.parts(size):
                    self._replay(results, replay, part, methods, said, tell)
                return len(results.keys) - before, size
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                samples = len(batch.rows) // cell.turns
                if min(size, samples) == 1:
                    raise MemoryError(
                        f"out of memory with one sample of {cell.place}; lower prefill_chunk (such as 8192), leave "
                        "out that length, or use a larger machine"
                    ) from error
            size = math.ceil(min(size, samples) / 2)
            torch.cuda.empty_cache()
            log.warning("out of memory at %s: going on with batch_size=%d", cell.place, size)

    def _replay(
        self, results: Results | Collected, replay: Replay, batch: CellBatch, methods: Sequence[Method], said: Warnings,
        tell: Tell,
    ) -> None:  # fmt: skip
        """Answer a batch with every method that lacks a row of it, store the rows that are new, and tell of each."""
        cell, replies = batch.cell, range(self.settings.sampling.replies)
        samples = [pair for pair in zip(batch.rows, batch.prompts, strict=True) for _ in replies]
        keys = {
            id(m): [
                key for row, prompt in zip(batch.rows, batch.prompts, strict=True)
                for key in self.keys(m, cell, [row.id], prompt.specials)
            ]
            for m in methods
        }  # fmt: skip
        lacking = [m for m in methods if not results.keys.issuperset(keys[id(m)])]
        if not lacking:
            return
        known = [
            results.replies.get(reply_key(self.key(lacking[0], cell, row.id, prompt.specials),
                                          self.config(lacking[0], cell.task, prompt.specials)))
            for row, prompt in zip(batch.rows, batch.prompts, strict=True)
        ] if self.settings.by_position else []  # fmt: skip
        asked = replay.answers(batch.prompts, batch.rows, lacking, cell.turns, cell.one_cache, known)
        for number, (method, answers) in enumerate(asked, 1):
            for key, (row, prompt), answer in zip(keys[id(method)], samples, answers, strict=True):
                if key not in results.keys:
                    tokens = _tokens(row, prompt)
                    said.note(method, cell.place, tokens, answer.compressed, answer.dense_only, answer.non_finite,
                              answer.saturated)  # fmt: skip
                    results.append(self.result(key, method, row, prompt, answer))
            tell(method.label, number, len(lacking))

    def result(self, key: Key, method: Method, row: Row, prompt: Prompt, answer: Answer) -> ResultRow:
        """Return the row that is stored."""
        seconds = answer.seconds
        question = seconds["seal"] + seconds["question"] if seconds["question"] else 0
        text = without_thoughts(answer.text, prompt.thinking) if self.thinks else answer.text
        made: ResultRow = {
            "model": key.model, "method": key.method, "config": key.config, "benchmark": key.benchmark,
            "task": key.task, "length": key.length, "sample": key.sample, "seed": key.seed, "compress": key.compress,
            "score": _score(row, answer, text or ""),
            "prediction": answer.text,
            "answers": list(row.answers),
            "metric": row.metric,
            "meta": dict(row.meta),
            "prompt_tokens": _tokens(row, prompt),
            "new_tokens": len(answer.tokens),
            "cache_bytes": answer.bytes,
            "middle_tokens": answer.middle_tokens,
            "compressed": answer.compressed,
            "dense_only": answer.dense_only,
            "non_finite": answer.non_finite,
            "fidelity": answer.fidelity,
            "selected_layer": answer.selected_layer,
            "saturated": answer.saturated,
            "batch": answer.batch,
            "settings": self.config(method, key.task, prompt.specials),
            "versions": versions(),
            "seconds": {
                **seconds,
                "first_token": seconds["prefill"] + question,
                "per_token": seconds["decode"] / answer.steps if answer.steps else None,
            },
        }  # fmt: skip
        if self.settings.by_position and not row.read:
            made["tokens"] = answer.tokens
            if answer.fidelity is not None and "along" in answer.fidelity:
                answer.fidelity["along"]["repeated"] = repeated_along(answer.tokens, self.settings.by_position)
        if not row.read:
            made["cut"] = "thought" if text is None else "limit" if answer.limited else None
            made["repeated"] = repeated(answer.tokens)
        if self.settings.sampling.temperature:
            made["reply"] = key.reply
            if row.metric in STATED:
                made["stated"] = None if answer.non_finite is not None else stated(row, text or "")
        return made


def _tokens(row: Row, prompt: Prompt) -> int:
    """Count the tokens of a prompt, without a text that is read behind it."""
    return prompt.question if row.read else len(prompt.ids)


def _score(row: Row, answer: Answer, text: str) -> float:
    """Score a reply's text, or take the score of a text that was read; 0 where logits were NaN or infinite."""
    if answer.non_finite is not None:
        return 0.0
    return score_row(row, text) if answer.score is None else answer.score


def repeated(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that stand before in the reply (seq-rep-4 of Welleck et al. 2020); 0 without any."""
    grams = list(zip(*(tokens[start:] for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repeated_along(tokens: Sequence[int], block: int) -> list[float]:
    """Return, of every block of tokens, the share that end a 4-gram which stands before in the reply."""
    seen: set[tuple[int, ...]] = set()
    again = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[max(0, end - 4) : end])
        again.append(len(gram) == 4 and gram in seen)
        seen.add(gram)
    parts = (again[start : start + block] for start in range(0, len(again), block))
    return [sum(part) / len(part) for part in parts]
