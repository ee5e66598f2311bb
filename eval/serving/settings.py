"""What a server is told: the mask, and how many tokens stay whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leank.mask import ChannelMask

NAMES = {"mask": "LEANK_MASK", "sink": "LEANK_SINK", "window": "LEANK_WINDOW"}
DEFAULTS = {"sink": 128, "window": 1024}  # those of `compressed_cache`


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    mask: a mask.safetensors, or a published .pth mask
    sink, window: tokens kept whole
    """

    mask: str
    sink: int
    window: int

    @classmethod
    def find(cls, additional: object, environment: Mapping[str, str] = os.environ) -> ServerSettings | None:
        """Read the settings of `--additional-config '{"leank": {"mask": PATH}}'`, else of LEANK_MASK and the like.

        additional: the value of additional-config
        environment: the environment variables

        What is not given is what the mask was trained with, else 128 and 1024. Returns None without a mask.

        Raises ValueError for unknown names and wrong values, FileNotFoundError without the file.
        """
        given = {name: environment[variable] for name, variable in NAMES.items() if environment.get(variable)}
        own = additional.get("leank") if isinstance(additional, Mapping) else None
        if own is not None:
            if not isinstance(own, Mapping) or set(own) - set(NAMES):
                raise ValueError(f"additional-config: leank={own!r} must be a mapping with mask, sink and window")
            given.update({name: str(value) for name, value in own.items()})
        if "mask" not in given:
            if own is not None:
                raise ValueError(f"additional-config: leank={own!r} names no mask, so nothing would be pruned")
            return None
        trained = load_mask(given["mask"]).metadata
        sizes = {name: _tokens(name, given.get(name, trained.get(name, DEFAULTS[name]))) for name in DEFAULTS}
        if sizes["window"] < 1:
            raise ValueError("LEANK_WINDOW=0: the window needs at least one token")
        return cls(str(Path(given["mask"]).resolve()), **sizes)

    def export(self) -> dict[str, str]:
        """The environment variables that tell a process these settings."""
        return {variable: str(getattr(self, name)) for name, variable in NAMES.items()}


def load_mask(path: str) -> ChannelMask:
    """Read a mask of either form; raises what ChannelMask raises, and FileNotFoundError."""
    if Path(path).suffix != ".pth":
        return ChannelMask.load(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"mask={path} does not exist; give a mask.safetensors or a published .pth mask")
    return ChannelMask.from_official(path)


def _tokens(name: str, value: object) -> int:
    try:
        tokens = int(str(value))
    except ValueError:
        tokens = -1
    if tokens < 0:
        raise ValueError(f"{NAMES[name]}={value} must be a number of tokens")
    return tokens
