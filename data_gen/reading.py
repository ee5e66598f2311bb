"""Files that a user gives: their text, their JSON, and their digest.

Whatever is wrong with a file becomes a ValueError with one line that names the file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

LONGEST = 1 << 29  # bytes of a text, or of one line of a file of lines; a small .gz can hold any number
UNREADABLE = (OSError, EOFError, zlib.error)  # what a damaged .gz, a folder or a missing permission raises


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "Input should not be blank")
    return text


NotBlank = Annotated[str, AfterValidator(_not_blank)]  # of a schema for what a file holds


def read_text(source: Path) -> str:
    """Return the text of a UTF-8 file, plain or .gz, without a byte order mark.

    Raises ValueError if the file cannot be read, or is longer than `LONGEST`.
    """
    try:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as file:
            raw = file.read(LONGEST + 1)
        if len(raw) > LONGEST:
            raise ValueError(f"{source} holds more than {LONGEST >> 20} MiB of text; give a part of it")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8: {why(error)}; save it in UTF-8") from None
    except UNREADABLE as error:
        raise ValueError(f"{source} cannot be read: {why(error)}; copy it again") from None


def parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises ValueError with a few words on what is wrong. Python's own parser accepts some of it: NaN, a name that occurs
    twice in an object, half a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
        if "\\u" in text:  # only an escape can hide half a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error.msg} at character {error.pos + 1})") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (an unpaired \\ud800-\\udfff)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def why(error: Exception) -> str:
    """Return the message of an exception raised by reading, in one short line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, EOFError):
        return "it ends too early"
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())[:200] or type(error).__name__


def digest(content: str | bytes) -> str:
    """Return sixteen hexadecimal digits of SHA-256, by which a file is known wherever it lies."""
    return hashlib.sha256(content.encode("utf-8") if isinstance(content, str) else content).hexdigest()[:16]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)[:60]!r} occurs twice")
    return found
