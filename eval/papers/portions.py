"""Portions of what is missing, which can be made side by side: methods on one batch of samples, or a whole analysis."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from leank.data_gen.amount import amount
from leank.eval.papers.item import Analysed, EvalRun, Item
from leank.eval.rows.results import Key
from leank.eval.run.progress import EVERY, duration

if TYPE_CHECKING:  # a process that deals out portions needs no torch
    from leank.eval.papers.steps import ResolvedStep
    from leank.eval.run.job import Job

STEP = 64  # a decoding step takes as long as so many tokens of a prompt
REPLY = 1024  # steps where a task sets its own bound
ANALYSIS = 500_000  # what an analysis costs, in samples times tokens
EACH = 8  # portions for each process: enough to share out evenly, and few enough to share prefills,
LEAST = 4  # if they have so many methods on a batch
log = logging.getLogger("eval")


@dataclass(frozen=True)
class Part:
    """What a portion has of one step.

    item: id of the item that asks for it first.
    step: the item's step.
    methods: labels of a replay's methods; empty for an analysis.
    """

    item: str
    step: EvalRun | Analysed
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Portion:
    """What one process makes at a time.

    parts: of steps whose replays share model, samples and settings, so that they share a prefill; one for an analysis.
    cost: how long it takes beside other portions, in any one unit.
    shard: the replay's batch, as `eval.run.settings.Settings` has it.
    """

    parts: tuple[Part, ...]
    cost: int
    shard: str = "0/1"

    def of(self, jobs: Sequence[Job]) -> Job:
        """Return the job of the portion. jobs: the whole jobs of its parts."""
        pairs = list(zip(self.parts, jobs, strict=True))
        methods = [method for part, job in pairs for method in job.methods if method.label in part.methods]
        by_cell = {cell: [method for method in some if method.label in self.parts[0].methods]
                   for cell, some in jobs[0].by_cell.items()}  # fmt: skip
        return replace(jobs[0], methods=methods, by_cell=by_cell, settings=replace(jobs[0].settings, shard=self.shard))

    def pieces(self) -> list[Portion]:
        """Return a portion for each part."""
        return [replace(self, parts=(part,), cost=self.cost // len(self.parts)) for part in self.parts]


def portions(plans: Sequence[tuple[Item, ResolvedStep]], done: set[Key], processes: int) -> list[Portion]:
    """Return what the steps of `plans` lack, each method's samples once.

    done: keys of the rows that are there.
    processes: int: how many are to share the portions.
    """
    found = [Portion((Part(item.id, one.step),), ANALYSIS) for item, one in plans if one.analysis is not None]
    batches: dict[tuple[str, int], list[tuple[Part, int]]] = defaultdict(list)
    totals: dict[str, int] = {}
    planned: set[Key] = set()
    for number, (item, resolved) in enumerate(plans):
        if (job := resolved.job) is None:
            continue
        # methods whose settings differ by cell stay among themselves
        like = repr((job.model, job.benchmark, job.settings, number if job.by_cell else None))
        size = job.settings.batch_size
        starts = [(cell, cell.samples[i]) for cell in job.benchmark.cells() for i in range(0, len(cell.samples), size)]
        numbers, totals[like] = {start: i for i, start in enumerate(starts)}, len(starts)
        for cell, samples, lacking in job.missing(done):
            for method in lacking:
                if (key := job.key(method, cell, samples[0])) not in planned:
                    planned.add(key)
                    steps = job.settings.max_new_tokens or REPLY
                    cost = len(samples) * ((cell.length or 4096) + STEP * steps)
                    part = Part(item.id, resolved.step, (method.label,))
                    batches[like, numbers[cell, samples[0]]].append((part, cost))
    costs = [cost for one in batches.values() for _, cost in one]
    enough = max(sum(costs) // (EACH * processes), LEAST * min(costs, default=0))
    for (like, batch), one in batches.items():
        for some in _cut(one, enough):
            cost = sum(cost for _, cost in some)
            found.append(Portion(_joined([part for part, _ in some]), cost, f"{batch}/{totals[like]}"))
    return found


def _cut(one: Sequence[tuple[Part, int]], enough: int) -> Iterator[list[tuple[Part, int]]]:
    """Yield neighbours whose costs add up to `enough`; one alone may cost more."""
    some: list[tuple[Part, int]] = []
    for part, cost in one:
        if some and sum(cost for _, cost in some) + cost > enough:
            yield some
            some = []
        some.append((part, cost))
    yield some


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return a part for each step, with the methods of all its parts."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].step is part.step:
            found[-1] = replace(found[-1], methods=(*found[-1].methods, *part.methods))
        else:
            found.append(part)
    return tuple(found)


@dataclass
class Queue:
    """Portions that wait: analyses first, as they cannot be cut, then the most expensive ones.

    waiting: the portions.
    failed: the first error of each item that has one.
    """

    waiting: list[Portion]
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.sort(key=lambda one: (isinstance(one.parts[0].step, Analysed), one.cost))
        self.total, self.done = sum(one.cost for one in self.waiting), 0
        self.began, self.said = time.perf_counter(), 0.0

    def take(self) -> Portion:
        """Return the portion that is next."""
        return self.waiting.pop()

    def answer(self, portion: Portion, error: str | None) -> None:
        """Count a portion as done. If it failed, its parts join the queue one by one, to find the step at fault."""
        if error is not None and len(portion.parts) > 1:
            self.waiting += portion.pieces()
        else:
            self.done += portion.cost
            if error is not None:
                log.warning("%s: %s", portion.parts[0].item, error)
                self.failed.setdefault(portion.parts[0].item, error)
        gone = time.perf_counter() - self.began
        if gone - self.said >= EVERY or not self.waiting:
            self.said = gone
            left = f", about {duration(gone / self.done * (self.total - self.done))} left" if self.done else ""
            log.info("%.0f%% done, %s to do; %s gone%s", 100 * self.done / max(1, self.total),
                     amount(len(self.waiting), "portion"), duration(gone), left)  # fmt: skip
