"""How a command ends where its user, its machine or its input stops it: one line, and the status that shells expect."""

from __future__ import annotations

import errno
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CURES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that you may write to, or change its permissions",
    errno.EPERM: "choose a folder that you may write to, or change its permissions",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "its links lead back to themselves; give the file that is meant",
    errno.ENOTDIR: "a part of that path is a file; choose another folder",
    errno.EEXIST: "that is a file; choose another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # what PyTorch says on a CPU, and what it and CUDA's libraries say on a GPU


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


def again(command: str) -> str:
    """Return the command line of this process, so that the user can give it again."""
    return f"python -m {command} {shlex.join(sys.argv[1:])}".rstrip()


def stopped(command: str, number: int, kept: str) -> str:
    """Return the line that says which signal stopped a command, and what is kept."""
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return f"{command}: stopped by {how}; {kept}"


def in_one_line(text: str) -> str:
    """Join the lines of a message, also at the separators that no text editor shows."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the CPU or of a GPU, is used up."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    )


def of_system(error: OSError) -> str:
    """Say in one line what a file could not do, where, and what helps."""
    if error.errno is None or error.strerror is None:  # one of our own, with a message
        return in_one_line(str(error))
    where = f"{error.filename}: " if error.filename is not None else ""
    cure = CURES.get(error.errno)
    return f"{where}{error.strerror}" + (f"; {cure}" if cure else "")


@contextmanager
def ending(command: str, kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Answer with one line what stops a command: a signal, a machine without room, or input that it refuses.

    command: how the user calls it, such as "eval"; the line begins with it.
    kept: says what is saved and how to go on; None says to give the same command again.

    Raises SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 1 where memory, a disk or a permission is lacking, and
    with the line itself (which gives 1) after a ValueError; nothing is kept of a run that is refused.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, _terminate)

    def left() -> str:
        return kept() if kept is not None else f"nothing is saved yet; to go on: {again(command)}"

    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        _leave(stopped(command, number, left()), 128 + number)
    except OSError as error:
        said = left()
        _leave(f"{command}: {of_system(error)}" + ("" if error.errno is None else f"; {said}"), 1)
    except ValueError as error:
        left()  # which may clear up
        sys.exit(f"{command}: {in_one_line(str(error))}")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        said = str(error) if isinstance(error, MemoryError) and str(error) else "out of memory; free some"
        _leave(f"{command}: {said}; {left()}", 1)
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _leave(line: str, status: int) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    raise SystemExit(status)
