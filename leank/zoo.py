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
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen15/bits/*pct_seed2.safetensors"),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2/bits/*pct_seed41.safetensors"),
}


@cache
def names() -> dict[str, Path]:
    """The file of every name, the smallest layouts of a model first."""
    found: dict[str, Path] = {}
    for model, (_, pattern) in LAYOUTS.items():
        shares = {}
        for file in matching(f"{ASSETS}/masks/{pattern}"):
            shares[re.sub("_.*", "", Path(file).stem)] = Path(located(file)).resolve()
        found.update((f"{model}-{share}", shares[share]) for share in sorted(shares, key=lambda s: float(s[:-3])))
    return found


def main() -> None:
    """Print every name with its bytes and its model."""
    for name in names():
        model, share = name.rsplit("-", 1)
        percent = float(share.removesuffix("pct"))
        print(f"{name:28} {percent:4g}% of dense's bytes, {percent * 16 / 100:.1f} bits a number   {LAYOUTS[model][0]}")


if __name__ == "__main__":
    main()
