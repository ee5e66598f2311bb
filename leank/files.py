"""Result files appear whole or not at all and have one writer, because a run may be killed at any moment.

A folder with a model is known by the digest of its contents.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
import warnings
import weakref
from pathlib import Path

PARTIAL = re.compile(r"\..+\.[a-z0-9_]{8}")  # what `write_bytes` calls a file before it is whole
BEGINNING = 50  # characters of a file's name in that of its temporary file, which must not be too long, either


def name_of(text: str, longest: int = 100) -> str:
    """Return a part of a file's name for a text which a user chose, such as a label.

    Other characters than ASCII letters, digits, "_", "." and "-" become "-". A name that lost something ends in eight
    digits of the text's SHA-256, so that two texts never have the same one. longest: characters without these digits.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:longest].strip("-.")
    digits = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return name if name == text else f"{name}-{digits}".lstrip("-")


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write to a temporary file in the target's folder, then rename it. Raises OSError naming the target."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:BEGINNING]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the name with half of the bytes
        os.chmod(partial, 0o644)  # mkstemp makes it private; results are to be shared
        os.replace(partial, target)
        sync_folder(target.parent)
    except BaseException as error:
        Path(partial).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)  # a disk that is full does not say for which file
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial(folder: Path, age: float = 0.0) -> None:
    """Remove temporary files of killed runs below a folder; age: seconds, younger ones may be in use."""
    for file in folder.rglob(".*"):
        if PARTIAL.fullmatch(file.name) and file.is_file() and time.time() - file.stat().st_mtime >= age:
            file.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write text in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write indented JSON; see `write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


class Lock:
    """A file that one process at a time may hold; a context manager.

    The lock ends with its process, however that ends. Processes that this one starts, such as data workers and other
    ranks, do not hold it.
    """

    def __init__(self, path: str | os.PathLike, busy: str, patience: float = 0.0) -> None:
        """Create the file if needed, and lock it; on a file system without locks it warns and locks nothing.

        busy: the message for a file that another process holds; patience: seconds to wait for it.
        Raises BlockingIOError(busy).
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
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """Close the locks of a forked process: it shares the open file, so its lock would outlive this process."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)

# what changes answers: weights, the model's and the generation's config, tokenizer and chat template
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
TEXTS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges*", "*.model", "*.tiktoken", "*chat_template*", "additional_chat_templates/*"),
)
WHOLE = 64 << 20  # bytes; a file of at most this size is read to its end
BLOCKS, BLOCK = 256, 4096  # number and bytes of the blocks that are read of a larger file, from its start to its end


def folder_digest(folder: Path) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the files that answers depend on, by name, size and contents.

    A file of more than 64 MiB, such as a shard of large weights, counts by its size, its safetensors header and 256
    blocks of 4 KiB at even distances. Every training changes some of those, and 140 GB take a second or two. A change
    of a few numbers between the blocks goes unseen.
    """
    found = {file for pattern in (*WEIGHTS, *TEXTS) for file in folder.glob(pattern) if file.is_file()}
    whole = hashlib.sha256()
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in found):
        whole.update(f"{name}\0{file.stat().st_size}\0{_digest(file)}\n".encode())
    return whole.hexdigest()[:16]


def _digest(file: Path) -> str:
    """SHA-256 of all bytes of a small file, or of some bytes of a large one."""
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as content:
        if size <= WHOLE:
            return hashlib.file_digest(content, "sha256").hexdigest()
        if file.suffix == ".safetensors":
            found.update(content.read(min(8 + int.from_bytes(content.read(8), "little"), WHOLE)))
        for number in range(BLOCKS):
            content.seek((size - BLOCK) * number // (BLOCKS - 1))
            found.update(content.read(BLOCK))
    return found.hexdigest()
