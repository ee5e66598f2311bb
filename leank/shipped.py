"""The two reference models that come beside the package: in a checkout, or as the package leank-models."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

SHIPPED = ("reference", "reference_mixed")


def resolve(name: str) -> str:
    """Return the folder of a shipped model; any other name, of a folder or on the hub, stays as it is.

    Raises FileNotFoundError where neither a checkout nor leank-models holds the model.
    """
    if name not in SHIPPED:
        return name
    homes = ["leank_train/assets"] + ["leank_models"] * (find_spec("leank_models") is not None)
    for home in homes:
        package, _, inside = home.partition("/")
        folder = Path(str(files(package))) / inside / name
        if folder.is_dir():
            return str(folder)
    raise FileNotFoundError(
        f"the model {name!r} is not in this installation: pip install leank-models, work in a checkout, or give "
        "model.name=/path/to/weights"
    )
