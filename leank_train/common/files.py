"""Result files appear whole or not at all, and have one writer: a run may be killed at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import warnings
import weakref
from pathlib import Path
from typing import Any


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write beside the target, then rename; folders are made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the name with half of the bytes
        os.chmod(partial, 0o644)  # mkstemp makes it private; results are to be shared
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Text in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


class Lock:
    """A file that one process at a time may hold; a context manager. It ends with the process, however that ends.

    Processes that this one starts do not hold it: not its data workers, and not the further ranks of a run.
    """

    def __init__(self, path: str | os.PathLike, busy: str, patience: float = 0.0) -> None:
        """Create the file if needed, and lock it.

        busy: the message where another process holds it.
        patience: seconds to wait for that process to end, 0 by default.
        Raises BlockingIOError(busy). Warns, and locks nothing, on a file system that knows no locks.
        """
        deadline = time.monotonic() + patience
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _held.add(self)
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    self.close()
                    raise BlockingIOError(busy) from error
                time.sleep(0.5)
            except OSError as error:
                warnings.warn(f"{path} cannot be locked ({error}); start no second run in its folder", stacklevel=2)
                return

    def close(self) -> None:
        """Let others have it."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked process shares the open file, and with it the lock, which would outlive this process."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
