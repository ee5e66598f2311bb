"""Files of tensors that hold their own sha256: a damaged file is refused by its name, and never read as another one.

A safetensors file keeps the digest of its tensors and metadata in its header. A checkpoint keeps the digest of its
bytes as the comment of the zip archive that `torch.save` writes. `safetensors` and `torch.load` read both as before.
Files without a digest, which earlier versions wrote, are read with a warning.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor
from torch.serialization import MAP_LOCATION

from leank.files import write_bytes

DIGEST = "sha256"
MARK = f"{DIGEST}:".encode()
END = 22  # bytes of a zip archive's last record, without a comment
COMMENT = len(MARK) + hashlib.sha256().digest_size * 2  # bytes of a checkpoint's comment


class DamagedFile(ValueError):
    """A file that is not what was written; the message names it, says why, and what to do."""

    def __init__(self, path: str | os.PathLike, reason: object, cure: str) -> None:
        super().__init__(f"{path} is damaged or cut off: {reason}; {cure}")


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """sha256 over the names, dtypes, shapes and bytes of tensors, and over the metadata, as 64 hexadecimal digits."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    found = hashlib.sha256(json.dumps([shapes, dict(metadata)], sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write safetensors, the metadata and the digest in the header: whole or not at all, equal bytes for equal content.

    tensors: on the CPU, contiguous.
    """
    header = dict(metadata or {})
    content = serialise(dict(tensors), metadata={**header, DIGEST: digest(tensors, header)})
    end = 8 + int.from_bytes(content[:8], "little")  # safetensors writes the keys of its header in random order
    ordered = json.dumps(json.loads(content[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    write_bytes(path, content[:8] + ordered.encode().ljust(end - 8) + content[end:])


def read_tensors(
    path: str | os.PathLike, names: set[str], cure: str, keys: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata that `write_tensors` wrote. The tensors are copies, not a memory map of the file.

    names: of the tensors that the file must hold, no others.
    cure: what the user can do about a damaged file.
    keys: of the metadata, none by default.
    Raises DamagedFile; warns where the file has no digest.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata, there = dict(file.metadata() or {}), set(file.keys())
            if there != names:
                raise DamagedFile(
                    path, f"it holds {', '.join(sorted(there)[:5])}, not {', '.join(sorted(names))}", cure
                )
            tensors = {name: _copy(file.get_tensor(name)) for name in sorted(names)}
    except SafetensorError as error:
        raise DamagedFile(path, f"it is no whole safetensors file ({error})", cure) from error
    written = metadata.pop(DIGEST, None)
    if set(metadata) != set(keys):  # a digest whose name is damaged among them
        raise DamagedFile(path, "its header is not what was written", cure)
    if written is None:
        if any((t.view(torch.uint8) > 1).any() for t in tensors.values() if t.dtype == torch.bool):
            raise DamagedFile(path, "it holds booleans that are neither 0 nor 1", cure)
        _no_digest(path)
    elif written != digest(tensors, metadata):
        raise DamagedFile(path, f"its {DIGEST} is another than that of its contents", cure)
    return tensors, metadata


def write_checkpoint(path: str | os.PathLike, state: Mapping[str, object]) -> None:
    """`torch.save` with the digest of the bytes at their end: whole or not at all. Made in memory, written at once."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()[:-2] + COMMENT.to_bytes(2, "little")  # a zip archive ends with its comment's length
    write_bytes(path, content + MARK + hashlib.sha256(content).hexdigest().encode())


def read_checkpoint(path: str | os.PathLike, cure: str, map_location: MAP_LOCATION = "cpu") -> dict[str, Any]:
    """What `write_checkpoint` wrote, tensors and plain values alone. cure: what the user can do about a damaged file.

    Raises DamagedFile; warns where the file has no digest (its CRC-32 sums are compared then).
    """
    content = Path(path).read_bytes()
    body, comment = content[:-COMMENT], content[-COMMENT:]
    if comment.startswith(MARK):
        if comment != MARK + hashlib.sha256(body).hexdigest().encode():
            raise DamagedFile(path, f"its {DIGEST} is another than that of its contents", cure)
    elif reason := damage(content):
        raise DamagedFile(path, reason, cure)
    else:
        _no_digest(path)
    try:
        return torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        raise DamagedFile(path, f"torch.load reads no plain values there ({type(error).__name__})", cure) from error


def damage(content: bytes) -> str | None:
    """Why the bytes are no whole zip archive of `torch.save`, by its own CRC-32 sums; None where nothing is wrong."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            wrong = archive.testzip()
    except Exception as error:  # zipfile raises many kinds for a file that is no archive
        return f"it is no whole zip archive ({error})"
    if wrong is not None:
        return f"the CRC-32 of its record {wrong} is another than written"
    whole = content[-END:].startswith(b"PK\5\6") and content.endswith(b"\0\0")  # zipfile forgives what follows
    return None if whole else "its end is missing"


def _copy(tensor: Tensor) -> Tensor:
    """A copy byte by byte: `clone` makes a 1 of any other byte of a bool tensor."""
    return tensor.flatten().view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape)


def _no_digest(path: str | os.PathLike) -> None:
    warnings.warn(f"{path} has no {DIGEST}: an earlier version wrote it, and damage to it may go unseen", stacklevel=4)
