"""Result files appear whole or not at all: a run may be killed at any moment."""

from __future__ import annotations

import json
import os
import tempfile
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
