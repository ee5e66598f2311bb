"""What all commands share: how a command ends.

What stops a command is one line on standard error: a setting, a file, a signal, a machine without room. A run that is
refused leaves no folder.
"""

import errno
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from leank.errors import in_one_line, out_of_memory
from leank.extras import MissingExtra

PASSES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM}  # after these the same command may go on


def leave_no_trace(folder: Path) -> None:
    """Remove the folder of a run that was refused, and empty ones above it, if it holds but Hydra's own files."""
    here = Path.cwd()
    if not folder.is_dir() or here.is_relative_to(folder.resolve()):  # hydra.job.chdir=true
        return
    if any(file.name != ".hydra" and (file.suffix != ".log" or file.stat().st_size) for file in folder.iterdir()):
        return
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.resolve().parents:
        if above == here or not above.is_relative_to(here) or any(above.iterdir()):
            return
        above.rmdir()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


def again(command: str) -> str:
    """Return the command line of this process, to be given again; command: the module of `python -m`."""
    program = Path(sys.argv[0]).name
    start = program if program.startswith("leank-") else f"python -m {command}"
    return f"{start} {shlex.join(sys.argv[1:])}".rstrip()


def stopped(command: str, number: int, kept: str) -> str:
    """Return the line that says which signal stopped a command, and what is kept."""
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return f"{command}: stopped by {how}; {kept}"


@contextmanager
def ending(command: str, kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Answer with one line what stops a command: a signal, a machine without room, or input that it refuses.

    command: how the user calls it, such as "eval"; the line begins with it.
    kept: says what is saved and how to go on; None says to give the same command again.
    Raises SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 141 without a word where what reads the output of
    a command that keeps nothing has gone, 1 where memory, a disk or a permission is lacking, and
    with the line itself (which gives 1) after a ValueError or MissingExtra; nothing is kept of a run that is refused.
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
    except BrokenPipeError as error:
        if kept is None:  # the reader of --help or of a table has read enough
            raise SystemExit(141) from error
        _leave(f"{command}: {error.strerror}; {kept()}", 1)
    except OSError as error:
        said = left() if kept is not None or error.errno in PASSES else "name a file or a folder that can be written"
        if error.errno is None:  # an error of this package, which says what to do
            _leave(f"{command}: {in_one_line(str(error))}", 1)
        _leave(f"{command}: {': '.join(str(x) for x in (error.filename, error.strerror) if x)}; {said}", 1)
    except (ValueError, MissingExtra) as error:
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
