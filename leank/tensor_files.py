"""Files of tensors: a damaged file is refused by its name, and never read as another one.

A safetensors file keeps the sha256 of its tensors and metadata in its header, because its format has no check of its
own. A checkpoint is the zip archive that `torch.save` writes, whose CRC-32 sums `torch.load` does not compare.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as serialise
from torch import Tensor
from torch.serialization import MAP_LOCATION

from leank.files import write_bytes

DIGEST = "sha256"


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
    """Write safetensors of contiguous CPU tensors, whole or not at all; equal content gives equal bytes."""
    header = dict(metadata or {})
    content = serialise(dict(tensors), metadata={**header, DIGEST: digest(tensors, header)})
    end = 8 + int.from_bytes(content[:8], "little")  # safetensors writes the keys of its header in random order
    ordered = json.dumps(_header(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    write_bytes(path, content[:8] + ordered.encode().ljust(end - 8) + content[end:])


def read_tensors(
    path: str | os.PathLike, names: set[str], cure: str, keys: Collection[str] = (), optional: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata that `write_tensors` wrote; no memory map, so they do not change with the file.

    names: of the tensors that the file must hold; optional: of those that it may hold beside them.
    cure: what the user can do about a damaged file.
    keys: of the metadata, none by default.
    Raises DamagedFile.
    """
    content = Path(path).read_bytes()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DamagedFile(path, f"it is no whole safetensors file ({error})", cure) from error
    if not names <= {*tensors} <= names.union(optional):
        raise DamagedFile(path, f"it holds {', '.join(sorted(tensors)[:5])}, not {', '.join(sorted(names))}", cure)
    if any((t.view(torch.uint8) > 1).any() for t in tensors.values() if t.dtype == torch.bool):
        raise DamagedFile(path, "it holds booleans that are neither 0 nor 1", cure)
    metadata = _header(content).get("__metadata__") or {}
    written = metadata.pop(DIGEST, None)
    if set(metadata) != set(keys):  # a digest whose name is damaged among them
        raise DamagedFile(path, "its header is not what was written", cure)
    if written is not None and written != digest(tensors, metadata):  # another program's file may have none
        raise DamagedFile(path, f"its {DIGEST} is another than that of its contents", cure)
    return tensors, metadata


def write_checkpoint(path: str | os.PathLike, state: Mapping[str, object]) -> None:
    """`torch.save`, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(path, buffer.getvalue())


def read_checkpoint(path: str | os.PathLike, cure: str, map_location: MAP_LOCATION = "cpu") -> Any:
    """What `torch.save` wrote, tensors and plain values alone. Raises DamagedFile, whose message ends with the cure."""
    content = io.BytesIO(Path(path).read_bytes())  # so that the tensors do not change with the file
    try:
        with zipfile.ZipFile(content) as archive:
            if (wrong := archive.testzip()) is not None:
                raise DamagedFile(path, f"the CRC-32 of its record {wrong} is another than written", cure)
        content.seek(0)
        return torch.load(content, map_location=map_location, weights_only=True)
    except DamagedFile:
        raise
    except Exception as error:  # zipfile and torch raise many kinds for a file that is no checkpoint
        raise DamagedFile(path, f"it is no whole archive of plain values ({type(error).__name__})", cure) from error


def _header(content: bytes) -> dict[str, Any]:
    """The JSON at the beginning of a safetensors file, behind its length in 8 bytes."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
