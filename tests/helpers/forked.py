"""A program of this repository in a fork of this process, which has imported what takes a new one seconds."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch


def start(line: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: TextIO) -> BaseProcess:
    """Start a line that begins with `python -m MODULE` or `python -c CODE`; both streams go to the file `stdout`.

    What the program starts itself, such as other ranks, are new processes.
    """
    assert line[0] == sys.executable
    child = multiprocessing.get_context("fork").Process(target=_work, args=(line[1:], cwd, env, stdout))
    child.start()
    return child


def run(
    line: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: TextIO, stderr: int = subprocess.STDOUT
) -> subprocess.CompletedProcess:
    """Do what `subprocess.run` does with such a line."""
    assert stderr == subprocess.STDOUT
    child = start(line, cwd, env, stdout)
    child.join(timeout=240)
    child.kill()  # nothing that has ended
    child.join()
    return subprocess.CompletedProcess(line, child.exitcode)


def ranks(line: Sequence[str], cwd: Path, env: Mapping[str, str], number: int, log: Path, killed: bool = False) -> str:
    """What so many ranks of a line print, started as `torchrun` starts them; every one must end well, or none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
              "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "forked"}  # fmt: skip
    with log.open("w") as file:
        children = []
        for rank in range(number):
            own = {name: str(value) for name, value in {**of_all, "RANK": rank, "LOCAL_RANK": rank}.items()}
            children.append(start(line, cwd, {**env, **own}, file))
        try:
            for child in children:
                child.join(timeout=240)
        finally:
            for child in children:
                child.kill()
    output = log.read_text()
    assert [child.exitcode != 0 for child in children] == [killed] * number, output
    return output


def _work(line: Sequence[str], cwd: Path, env: Mapping[str, str], file: TextIO) -> None:
    how, program, *arguments = line
    torch.set_num_threads(1)  # a fork has no thread pool; threads that load weights would make it at once, which fails
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [how, *arguments]
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})
