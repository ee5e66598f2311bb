"""Layouts of bits by name, for models whose weights are public; the files come with the package.

    compressed_cache(model, "qwen2.5-coder-1.5b-20pct")     # as well mask=NAME of an evaluation, LEANK_MASK=NAME
    python -m leank.zoo                                     # lists them

A name is that of the model and the share of a dense middle's bytes, scales counted. docs/use/zoo.md says what each
costs, and how a layout gets here.
"""

import re
from functools import cache
from pathlib import Path

from leank.shipped import ASSETS, located, matching

LAYOUTS = {  # by the model's name here: its name on the hub, and the files of its layouts
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen15/bits/*_seed2.safetensors"),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2/bits/*_seed41.safetensors"),
}
NAME = re.compile(r"(.+)-([\d.]+)pct(-packed)?")  # model, percent, and whether scales are packed


@cache
def names() -> dict[str, Path]:
    """The file of every name, by model, the smallest layouts first."""
    found: dict[str, Path] = {}
    for model, (_, pattern) in LAYOUTS.items():
        for file in matching(f"{ASSETS}/masks/{pattern}"):
            form = re.sub("_seed.*", "", Path(file).stem).replace("_", "-")
            found[f"{model}-{form}"] = Path(located(file)).resolve()
    return {name: found[name] for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[int, float, bool]:
    model, percent, packed = _parts(name)
    return [*LAYOUTS].index(model), percent, packed


def _parts(name: str) -> tuple[str, float, bool]:
    found = NAME.fullmatch(name)
    assert found is not None, name
    return found[1], float(found[2]), found[3] is not None


def main() -> None:
    """Print every name with its bytes and its model."""
    for name in names():
        model, percent, _ = _parts(name)
        print(f"{name:33} {percent:4g}% of dense's bytes, {percent * 16 / 100:.1f} bits a number   {LAYOUTS[model][0]}")


if __name__ == "__main__":
    main()
