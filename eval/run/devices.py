"""A run on several devices: a process for each, which takes a batch whenever it is free; one progress and one report.

The processes write `results-i-of-n.jsonl`, and rows are those of one device. What they say comes here: how far they
are, and warnings, each once. The costliest batches go first, so that all devices end within a short one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NoReturn

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as of_transformers

from leank.data_gen.amount import amount
from leank.errors import in_one_line, out_of_memory
from leank.eval.inference.models import load_model
from leank.eval.rows import GLOB, Key, Results, key_of, read
from leank.eval.run.job import Job, Progress, Work, cost
from leank.extras import MissingExtra
from leank.typed import BadConfig

START: Final = "spawn"  # a forked process cannot use a GPU that its parent has used
KINDS = (ValueError, OSError, MemoryError, MissingExtra)  # errors that a command answers with one line
PATIENCE = 10.0  # seconds for a process to end
log = logging.getLogger("eval")


def replay(job: Job, tokenizer: PreTrainedTokenizerBase, directory: Path) -> int:
    """Do what is missing in a run's directory on `job.settings.devices` devices. Returns the number of new rows.

    Raises BadConfig if there are not so many. If one process fails, all end, and the error names its device: one of
    `KINDS` where the process raised that, else ChildProcessError.
    """
    gpus = visible_gpus(job)
    keys: set[Key] = {key_of(row) for row in read(directory)} if any(directory.glob(GLOB)) else set()
    work, said, new = job.missing(keys), set[str](), 0
    gpus = gpus[: len(work)] or gpus
    log.info("%s there, %s to do on %d devices, in %s", amount(len(keys), "row"), amount(len(work), "batch"), len(gpus),
             directory)  # fmt: skip
    if not work:
        return 0
    progress = Progress(work)
    queue = iter(sorted(range(len(work)), key=lambda number: cost(*work[number]), reverse=True))
    with progress.shown(), _processes(gpus) as processes:
        number_of = {pipe: number for number, (_, pipe) in enumerate(processes)}
        idle: list[Connection] = []  # of processes that found no batch
        for own, number in number_of.items():
            _send(own, (job, tokenizer, directory, _part(job, number), keys))
        while number_of:
            for pipe in connection.wait([*number_of]):
                assert isinstance(pipe, Connection)
                which = f"device {number_of[pipe]} of {len(processes)}"
                try:
                    what, *values = pipe.recv()
                except (EOFError, ConnectionResetError):  # its process has ended
                    process, _ = processes[number_of.pop(pipe)]
                    process.join()
                    if process.exitcode or len(idle) < len(processes):  # with 0 before it was told to
                        _raise(which, None, _end_of(process))
                    continue
                if what == "failed":
                    _raise(which, *values)
                elif what == "next":
                    _give(pipe, next(queue, None), idle, len(processes))
                elif what == "said":
                    level, text = values
                    if text not in said:
                        log.log(level, "%s", text)
                    said.add(text)
                else:
                    getattr(progress, what)(*values)
                    new += values[2] if what == "replayed" else 0
    return new


def visible_gpus(job: Job) -> list[str | None]:
    """Return what CUDA_VISIBLE_DEVICES is for each process; None for those on a CPU. Raises BadConfig; see `replay`."""
    count, device = job.settings.devices, job.model.torch_device
    if device.type != "cuda":
        return [None] * count
    if device.index is not None:
        raise BadConfig(f"model.device={job.model.device} is one GPU, and devices={count} takes several; leave it out")
    there = torch.cuda.device_count()
    if there < count:
        raise BadConfig(f"devices={count}: there are {there} GPUs; lower it, or set CUDA_VISIBLE_DEVICES to more")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list((named.split(",") if named else [str(number) for number in range(there)])[:count])


def _give(pipe: Connection, batch: int | None, idle: list[Connection], count: int) -> None:
    """Send a process its batch, or None to all once all are idle; until then they hold the locks of their files."""
    if batch is not None:
        _send(pipe, batch)
        return
    idle.append(pipe)
    if len(idle) == count:
        for each in idle:
            _send(each, None)


def _send(pipe: Connection, what: object) -> None:
    """Send to a process; of one that has ended, the loop hears."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(what)


def _part(job: Job, number: int) -> str:
    """Return the ending of a device's file: that of its number among the devices of all shards, idle ones too.

    The number of batches left is not in it, so that a second run of the same command finds the file locked.
    """
    shard, shards = job.settings.numbered_shard
    return f"-{shard + number * shards}-of-{shards * job.settings.devices}"


@contextmanager
def _processes(gpus: Sequence[str | None]) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Start a process for each device, and end those that are left.

    The job follows through their pipes: a start waits until its process has read more than a pipe holds, which it does
    when it has imported everything, and the next process would start only then.
    """
    context, made = get_context(START), list[tuple[BaseProcess, Connection]]()
    threads = max(1, torch.get_num_threads() // len(gpus))
    try:
        for number, gpu in enumerate(gpus):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(gpu, threads, number == 0, there), name=f"device {number}", daemon=True
            )
            process.start()
            there.close()
            made.append((process, here))
        yield made
    finally:
        for one, _ in made:
            one.terminate()  # nothing that has ended; every row is on disk
        for one, _ in made:
            one.join(PATIENCE)
            one.kill()
            one.join()


class _Told(Progress):
    """Hands progress on to the first process, and shows none."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show nothing."""
        yield

    def begins(self, place: str) -> None:
        """Hand on `Progress.begins`."""
        self._pipe.send(("begins", place))

    def answered(self, place: str, label: str, number: int, methods: int) -> None:
        """Hand on `Progress.answered`."""
        self._pipe.send(("answered", place, label, number, methods))

    def replayed(self, place: str, spent: int, rows: int) -> None:
        """Hand on `Progress.replayed`."""
        self._pipe.send(("replayed", place, spent, rows))


class _Said(logging.Handler):
    """Hands the text of log lines on to the first process."""

    def __init__(self, pipe: Connection, level: int) -> None:
        super().__init__(level)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(("said", record.levelno, record.getMessage()))


def _work(gpu: str | None, threads: int, first: bool, pipe: Connection) -> None:
    """Do batches until there are none, and tell the first process of them; this is what the processes run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything asks for a GPU
    of_transformers.disable_progress_bar()
    logging.captureWarnings(True)
    logging.root.handlers = [_Said(pipe, logging.INFO if first else logging.WARNING)]  # notes of one device suffice
    logging.root.setLevel(logging.INFO)
    try:
        job, tokenizer, directory, part, keys = pipe.recv()
        with Results(directory, part) as results:
            turns = partial(_turns, pipe)
            job.run(results, load_model(job.model), tokenizer, _Told(pipe), job.missing(keys), turns)
    except Exception as error:
        kind = next((kind for kind in KINDS if isinstance(error, kind)), MemoryError if out_of_memory(error) else None)
        text = in_one_line(str(error))
        pipe.send(("failed", kind, text if kind else f"{type(error).__name__}: {text}"))
        sys.exit(1)


def _turns(pipe: Connection, work: Sequence[Work]) -> Iterator[Work]:
    """Yield the batches that the first process gives to this one, which has the same list of them."""
    while True:
        pipe.send(("next",))
        number = pipe.recv()
        if number is None:
            return
        yield work[number]


def _end_with_parent() -> None:
    """End this process if the first one is killed, which nobody would wait for any more."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _end_of(process: BaseProcess) -> str:
    """Say how a process ended that did not say so itself."""
    code = process.exitcode or 0
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def _raise(which: str, kind: type[Exception] | None, text: str) -> NoReturn:
    """Raise what a process has told of its end."""
    if kind is None:
        kind, text = ChildProcessError, f"{text}; the rows are kept, and the same command with devices=1 says more"
    raise kind(f"{which}: {text}")
