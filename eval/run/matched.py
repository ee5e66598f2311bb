"""A job whose methods hold equal bytes: match=0.4 is a share of dense, match=leank another method's bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.benchmarks.base import Cell
from leank.eval.inference.prompts import encode, overhead
from leank.eval.methods import Method
from leank.eval.methods.match import free_settings, match, share_of_dense
from leank.eval.run.job import Job

log = logging.getLogger("eval")


def matched(job: Job, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Job:
    """Return the job with settings.match applied.

    In every cell (samples of one task and length) each method's free setting is chosen so that the prompts together
    take the wanted share of their dense bytes. Every sample is built once for its length. A method that cannot get
    there keeps its own settings, and the log says so.

    config: the model's text config.
    Raises ValueError if match is neither a share nor the label of a method whose bytes are known from settings.
    """
    to, itemsize = job.settings.match, job.model.torch_dtype.itemsize
    other = next((method for method in job.methods if method.label == to), None)
    by_cell: dict[Cell, Sequence[Method]] = {}
    said: set[tuple[str, int | None]] = set()
    for cell in job.benchmark.cells():
        where, lengths = cell.place, _lengths(job, cell, tokenizer)
        try:
            share = _share(to) if other is None else share_of_dense(other, config, lengths, itemsize)
        except ValueError as error:
            labels = ", ".join(method.label for method in job.methods)
            raise ValueError(f"match={to}: {error}; give a share of dense bytes or one of {labels}") from error
        methods = []
        for method in job.methods:
            if method is not other and method.axes:
                try:
                    found = match(method, share, config, lengths, itemsize)
                    for choice in found.axes.values():
                        choice.check(config, tokenizer)
                    method = replace(found, matched={"settings": free_settings(found), "to": to})
                except ValueError as error:
                    if (method.label, cell.length) not in said:
                        log.warning("match=%s (%s): %s keeps its settings: %s", to, where, method.label, error)
                    said.add((method.label, cell.length))
            methods.append(method)
        by_cell[cell] = methods
        log.info("match=%s (%s): %.1f%% of dense bytes", to, where, 100 * share)
    return replace(job, by_cell=by_cell)


def _share(to: object) -> float:
    if isinstance(to, bool) or not isinstance(to, int | float) or not 0 < to <= 1:
        raise ValueError(f"{to!r} is neither a share in (0, 1] nor a method of this run")
    return float(to)


def _lengths(job: Job, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a method compresses of each prompt of a cell."""
    chat, before = job.model.chat, job.settings.compress == "before_question"
    extra = overhead(tokenizer, chat)
    rows = (job.benchmark.row(cell, sample, tokenizer, extra) for sample in cell.samples)
    prompts = ((row, encode(tokenizer, row, chat, job.settings.specials)) for row in rows)
    return [prompt.question if before or row.read else len(prompt.ids) for row, prompt in prompts]
