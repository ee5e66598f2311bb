"""A run: which rows there are to be, which are missing, and doing those, batch by batch."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from eval.benchmarks.base import Benchmark, Cell
from eval.benchmarks.row import Row
from eval.benchmarks.scoring import score_row
from eval.inference.models import ModelConfig
from eval.inference.prompts import Prompt, encode, overhead
from eval.methods import Method
from eval.run.compression import Watch
from eval.run.replay import Answer, Replay, Settings
from eval.run.results import Key, Results

FORMAT = 1  # of what a row means; part of its key
log = logging.getLogger("eval")


def versions() -> dict[str, str]:
    """What ran."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


@dataclass(frozen=True)
class Job:
    """What one run consists of: a model, methods and a benchmark; knows which rows there are to be.

    by_cell: the methods of a cell with settings of their own there (eval.run.matched), else `methods`.
    """

    model: ModelConfig
    methods: Sequence[Method]
    benchmark: Benchmark
    settings: Settings
    by_cell: Mapping[Cell, Sequence[Method]] = field(default_factory=dict)

    def config(self, method: Method, task: str, specials: str | None = None) -> dict[str, Any]:
        """Everything that a method's answers to a task depend on, beside the sample's length, id and seed.

        specials: of the sample's Prompt. Rows whose text spells none do not depend on the setting.
        """
        decode, data = asdict(self.settings), self.benchmark.data(task)
        return {
            "format": FORMAT,
            "method": method.config(),
            "model": self.model.identity(),
            "benchmark": self.benchmark.identity(),
            "decode": {name: decode[name] for name in ("max_new_tokens", "min_new_tokens")},
            **({} if data is None else {"data": data}),
            **({} if specials is None else {"specials": specials}),
        }

    def digest(self, method: Method, task: str, specials: str | None = None) -> str:
        """Ten hex digits of `config`."""
        return hashlib.sha256(json.dumps(self.config(method, task, specials), sort_keys=True).encode()).hexdigest()[:10]

    def key(self, method: Method, cell: Cell, sample: str, specials: str | None = None) -> Key:
        """The key of one row."""
        return Key(
            self.model.label, method.label, self.digest(method, cell.task, specials), self.benchmark.name,
            cell.task, cell.length, sample, self.benchmark.seed, self.settings.compress,
        )  # fmt: skip

    def missing(self, done: set[Key]) -> list[tuple[Cell, tuple[str, ...], list[Method]]]:
        """Batches that still lack rows, with the methods that lack them.

        A batch's samples depend on the plan alone, never on what is done, so a run that was killed gives the same rows.
        """
        size, work, batch = self.settings.batch_size, [], -1
        shard, shards = self.settings.place
        for cell in self.benchmark.cells():
            for start in range(0, len(cell.samples), size):
                batch += 1
                if batch % shards != shard:
                    continue
                samples = cell.samples[start : start + size]
                methods = self.by_cell.get(cell, self.methods)
                either = (None, self.settings.specials)  # a sample's text is not known before it is built
                lacking = [
                    m for m in methods if any(not {self.key(m, cell, s, how) for how in either} & done for s in samples)
                ]
                if lacking:
                    work.append((cell, samples, lacking))
        return work

    def others(self, done: set[Key]) -> int:
        """How many rows are of this plan's models, methods and tasks, but of other settings, data or weights."""
        known: dict[tuple[str, str, str, str], set[str]] = {}
        for cell in self.benchmark.cells():
            for method in self.by_cell.get(cell, self.methods):
                name = (self.model.label, method.label, self.benchmark.name, cell.task)
                digests = (self.digest(method, cell.task, how) for how in (None, self.settings.specials))
                known.setdefault(name, set()).update(digests)
        return sum(
            row.config not in known.get((row.model, row.method, row.benchmark, row.task), {row.config}) for row in done
        )

    def run(self, results: Results, model: PreTrainedModel, tokenizer: Any) -> int:
        """Do what is missing; returns the number of new rows."""
        work = self.missing(results.keys)
        wanted = {id(method): method for _, _, methods in work for method in methods}
        replay = Replay(model, tokenizer, self.settings)
        replay.calibrate(list(wanted.values()), self.model.chat)
        extra, new, began = overhead(tokenizer, self.model.chat), 0, time.perf_counter()
        watch = Watch()
        size, limit = self.settings.batch_size, getattr(model.config, "max_position_embeddings", None)
        for number, (cell, samples, methods) in enumerate(work, 1):
            rows = [self.benchmark.row(cell, sample, tokenizer, extra) for sample in samples]
            prompts = [encode(tokenizer, row, self.model.chat, self.settings.specials) for row in rows]
            for row, prompt in zip(rows, prompts, strict=True):
                total = len(prompt.ids) + (self.settings.max_new_tokens or row.max_new_tokens)
                if limit is not None and total > limit:
                    raise ValueError(
                        f"sample {row.id} of {cell.task} takes {total} tokens with its reply, more than the model's "
                        f"max_position_embeddings={limit}; lower max_new_tokens or use shorter samples"
                    )
            while True:
                try:
                    new += self._batches(results, replay, cell, rows, prompts, methods, size, watch)
                    break
                except torch.OutOfMemoryError as error:
                    if min(size, len(rows)) == 1:
                        raise MemoryError(
                            f"out of GPU memory with one sample of {cell.task} at {cell.length} tokens; lower "
                            "prefill_chunk (such as 8192), leave out that length, or use a larger GPU"
                        ) from error
                size = math.ceil(min(size, len(rows)) / 2)
                torch.cuda.empty_cache()
                log.warning(
                    "out of GPU memory at %s, %s tokens: going on with batch_size=%d", cell.task, cell.length, size
                )
            left = (time.perf_counter() - began) / number * (len(work) - number)
            where = f"{cell.task}, {cell.length} tokens"
            log.info("%d of %d batches (%s), %d rows, %.0f s left", number, len(work), where, new, left)
            if number == len(work) or work[number][0] is not cell:
                watch.stop_if_broken(self.model.name, self.model.dtype)
        return new

    def _batches(
        self, results: Results, replay: Replay, cell: Cell, rows: list[Row], prompts: list[Prompt],
        methods: list[Method], size: int, watch: Watch,
    ) -> int:  # fmt: skip
        new = 0
        for start in range(0, len(rows), size):
            some, texts = rows[start : start + size], prompts[start : start + size]
            lacking = [
                m
                for m in methods
                if any(
                    self.key(m, cell, row.id, text.specials) not in results.keys
                    for row, text in zip(some, texts, strict=True)
                )
            ]
            if not lacking:
                continue
            for method, answers in replay.answers(texts, some, lacking):
                for row, prompt, answer in zip(some, texts, answers, strict=True):
                    key = self.key(method, cell, row.id, prompt.specials)
                    if key not in results.keys:
                        watch.see(
                            method, f"{cell.task}, {cell.length} tokens", len(prompt.ids), answer.compressed,
                            answer.dense_only, answer.non_finite,
                        )  # fmt: skip
                        results.append(self.result(key, method, row, prompt, answer))
                        new += 1
        return new

    def result(self, key: Key, method: Method, row: Row, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        """The row that is stored."""
        seconds = answer.seconds
        return {
            **key._asdict(),
            "score": score_row(row, answer.text) if answer.non_finite is None else 0.0,
            "prediction": answer.text,
            "answers": list(row.answers),
            "metric": row.metric,
            "meta": dict(row.meta),
            "prompt_tokens": len(prompt.ids),
            "new_tokens": len(answer.tokens),
            "cache_bytes": answer.bytes,
            **{name: getattr(answer, name) for name in ("middle_tokens", "compressed", "dense_only", "non_finite")},
            "batch": answer.batch,
            "settings": self.config(method, key.task, prompt.specials),
            "versions": versions(),
            "seconds": {
                **seconds,
                "first_token": seconds["prefill"]
                + (seconds["seal"] + seconds["question"] if seconds["question"] else 0),
                "per_token": seconds["decode"] / answer.steps if answer.steps else None,
            },
        }
