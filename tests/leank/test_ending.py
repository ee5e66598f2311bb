"""What stops a command ends it with one line: signals, full disks, missing permissions, memory that is used up."""

import errno
import os
import resource
import signal

import pytest
import torch

from leank.cli import ending
from leank.errors import out_of_memory

NO_ROOM = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def ended(capsys, error):
    """(exit status, what is printed) of a command that raises an error."""
    with pytest.raises(SystemExit) as stopped, ending("leank", lambda: "3 rows are kept; to go on: leank"):
        raise error
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return stopped.value.code, said.strip()


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "leank: stopped by Ctrl-C; 3 rows"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 1, "leank: /a/b: No space left on device; 3 rows"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "leank: No space left on device; 3 rows"),
        (BlockingIOError("another run\nwrites here"), 1, "leank: another run writes here"),
        (MemoryError(), 1, "leank: out of memory; free some; 3 rows are kept"),
        (MemoryError("out of memory with one sample"), 1, "leank: out of memory with one sample; 3 rows"),
        (RuntimeError(NO_ROOM), 1, "leank: out of memory; free some"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "leank: out of memory; free some"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 1, "leank: out of memory; free some"),
    ],
)
def test_one_line_says_what_stopped_a_command_and_what_is_kept(capsys, error, status, line):
    code, said = ended(capsys, error)
    assert code == status
    assert line in said


def test_input_that_is_refused_ends_a_command_with_the_reason():
    """The folder of a run is cleared up before, which is what `kept` does."""
    asked = []
    with pytest.raises(SystemExit, match=r"^leank: ratio=2: lower it$"), ending("leank", lambda: asked.append(1) or ""):
        raise ValueError("ratio=2:\nlower it")
    assert asked


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys):
    with pytest.raises(SystemExit) as stopped, ending("leank"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    assert capsys.readouterr().err.startswith(
        "leank: stopped by SIGTERM; nothing is saved yet; to go on: python -m leank"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a defect"), ending("leank"):
        raise RuntimeError("a defect")


def test_memory_of_the_cpu():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**36, hard))
    try:
        with pytest.raises(RuntimeError) as error:
            torch.empty(2**37, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert out_of_memory(error.value)
    assert not out_of_memory(RuntimeError("shape mismatch"))
