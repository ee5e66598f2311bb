"""Make portions one after the other, or side by side in processes that are spread over the visible GPUs.

A process has a log and a file of rows of its own, and gets one portion after the other over a pipe. If it dies, its
portion has failed, a new process takes its place, and the other portions go on. If the process that deals them out
dies, all others end at once. What they make with is pickled into a file that all read: spawning a process with it would
wait until that process has imported what it takes to read it, one process after the other.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from leank.eval.papers.portions import Portion, Queue
from leank.eval.rows.results import Results

Make = Callable[[Portion, Results], None]
FAILURES = (ValueError, FileNotFoundError, MemoryError)  # of one step; after any other a process cannot be trusted
log = logging.getLogger("eval")


def one_by_one(make: Make, waiting: Sequence[Portion], results: Results) -> dict[str, str]:
    """Make all portions in this process. Returns the first error of each item that has one."""
    queue = Queue(list(waiting))
    while queue.waiting:
        portion, error = queue.take(), None
        try:
            make(portion, results)
        except FAILURES as failure:
            error = str(failure)
        queue.answer(portion, error)
    return queue.failed


def side_by_side(make: Make, waiting: Sequence[Portion], jobs: int, directory: Path) -> dict[str, str]:
    """Make all portions in `jobs` processes. Returns the first error of each item that has one.

    make: makes one portion; every process unpickles a copy of it.
    directory: where `rows` and `logs` lie.
    """
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        pickle.dump(make, file)
        file.flush()
        return _deal(Path(file.name), Queue(list(waiting)), jobs, directory)


def _deal(make: Path, queue: Queue, jobs: int, directory: Path) -> dict[str, str]:
    """Deal out the portions of a queue. make: the pickled function."""
    hands: dict[int, Hand] = {}
    while queue.waiting or hands:
        for number in range(jobs):
            if number not in hands and queue.waiting:
                hands[number] = Hand.started(make, queue.take(), number, jobs, directory)
        ready = wait([hand.pipe for hand in hands.values()])
        for number, hand in [(n, h) for n, h in hands.items() if h.pipe in ready]:
            alive, error = hand.answer()
            queue.answer(hand.portion, error)
            if alive and queue.waiting:
                hand.give(queue.take())
            else:
                hand.pipe.close()  # which ends the process
                hand.process.join()
                del hands[number]
    return queue.failed


@dataclass
class Hand:
    """A process, our end of its pipe, what it makes now, and its log."""

    process: SpawnProcess
    pipe: Connection
    portion: Portion
    log: Path

    @classmethod
    def started(cls, make: Path, portion: Portion, number: int, jobs: int, directory: Path) -> Hand:
        """Start a process on its share of the cores and on one GPU, if there is any, and give it a portion."""
        settings = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))}
        if devices := _devices():
            settings["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        where = directory / "logs" / f"{number:02d}.log"
        arguments = (make, f"-{number}-of-{jobs}", directory / "rows", where, theirs)
        process = context.Process(target=_work, args=arguments, daemon=True)
        with _environment(settings):  # which libraries read when they are first imported
            process.start()
        theirs.close()
        hand = cls(process, ours, portion, where)
        hand.give(portion)
        return hand

    def give(self, portion: Portion) -> None:
        """Hand over a portion."""
        self.portion = portion
        with suppress(OSError):  # a process that is dead has no answer either
            self.pipe.send(portion)

    def answer(self) -> tuple[bool, str | None]:
        """Return whether the process lives on, and the error of its portion."""
        try:
            return True, self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return False, f"its process ended with status {self.process.exitcode}; {self.log} says more"


def _devices() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(pickled: Path, part: str, rows: Path, where: Path, pipe: Connection) -> None:
    """Make the portions that come over the pipe until it is closed; answer each with its error or None."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with where.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    make: Make = pickle.loads(pickled.read_bytes())
    with suppress(EOFError), Results(rows, part) as results:
        while True:
            portion = pipe.recv()
            for one in portion.parts:
                log.info("%s: batch %s, %s", one.item, portion.shard, " ".join(one.methods) or one.step.name)
            error = None
            try:
                make(portion, results)
            except FAILURES as failure:
                log.exception("failed")
                error = str(failure)
            pipe.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
