"""Files that a user gives: their text, and their digest."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)  # what damaged or missing files raise
NotBlank = Annotated[str, StringConstraints(pattern=r"\S")]  # of a schema for what a file holds


def read_text(source: Path) -> str:
    """Return the text of a UTF-8 file, plain or .gz, without a byte order mark. Raises ValueError if it is none."""
    try:
        raw = source.read_bytes()
        return (gzip.decompress(raw) if source.suffix == ".gz" else raw).decode("utf-8-sig")
    except UNREADABLE as error:
        raise ValueError(f"{source} cannot be read: {error}; copy it again, as UTF-8") from None


def digest(content: str | bytes) -> str:
    """Return sixteen hexadecimal digits of SHA-256, by which a file is known wherever it lies."""
    return hashlib.sha256(content.encode("utf-8") if isinstance(content, str) else content).hexdigest()[:16]
