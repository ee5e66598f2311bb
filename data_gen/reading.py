"""Files that a user gives: their text, and their digest."""

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)  # what damaged or missing files raise
UNPACKED = 2**29  # bytes; a small .gz can unpack to more than a machine holds
NotBlank = Annotated[str, StringConstraints(pattern=r"\S")]  # of a schema for what a file holds


def read_text(source: Path) -> str:
    """Return the text of a UTF-8 file, plain or .gz, without a byte order mark. Raises ValueError if it is none."""
    try:
        return read_bytes(source).decode("utf-8-sig")
    except UNREADABLE as error:
        raise ValueError(f"{source} cannot be read: {error}; copy it again, as UTF-8") from None


def read_bytes(source: Path) -> bytes:
    """Return the bytes of a file, unpacked if it is a .gz. Raises OSError for one that unpacks to too many."""
    if source.suffix != ".gz":
        return source.read_bytes()
    with gzip.open(source) as file:
        found = file.read(UNPACKED + 1)
    if len(found) > UNPACKED:
        raise OSError(f"it unpacks to more than {UNPACKED >> 20} MiB")
    return found


def digest(content: str | bytes) -> str:
    """Return sixteen hexadecimal digits of SHA-256, by which a file is known wherever it lies."""
    return hashlib.sha256(content.encode("utf-8") if isinstance(content, str) else content).hexdigest()[:16]
