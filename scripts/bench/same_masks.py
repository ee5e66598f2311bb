"""How far the masks and scores of training runs are from those of another run of the same settings.

    python -m scripts.bench.same_masks ONE OTHER [OTHER ...] --out same_masks.csv

ONE and OTHER are run directories, such as those of one GPU and of several. Prints and writes a line for each OTHER:

equal         share of the channels that both masks keep or both prune
largest       largest difference of two scores of one channel, after stage 2
mean          mean of these differences
loss          relative difference of the distillation loss in the last step of stage 1
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from leank.files import write_text
from leank.mask import ChannelMask
from leank.tensor_files import read_checkpoint


def last_loss(run: Path) -> float:
    """Distillation loss of the last step of stage 1. Raises ValueError for a run whose stage 1 had no step."""
    state = read_checkpoint(run / "checkpoints/stage1/done.ckpt", "run the training again")
    if not (steps := state["record"]["steps"]):
        raise ValueError(f"{run} has no step of stage 1; compare runs with stage1.steps above 0")
    return float(steps[-1]["distillation"])


def relative(value: float, of: float) -> float:
    """Return |value / of - 1|: 0 where both are 0, infinite where `of` alone is."""
    return abs(value / of - 1) if of else 0.0 if value == of else math.inf


def compare(one: Path, other: Path) -> dict[str, object]:
    """The figures of the module's docstring. Raises ValueError for runs of models of different shapes."""
    masks = [ChannelMask.load(run / "mask.safetensors").keep for run in (one, other)]
    if masks[0].shape != masks[1].shape:
        raise ValueError(f"{one} has scores of {tuple(masks[0].shape)}, {other} of {tuple(masks[1].shape)}")
    apart = torch.sub(*(load_file(run / "alpha.safetensors")["alpha"] for run in (one, other))).abs()
    return {
        "one": one.name, "other": other.name, "channels": masks[0].numel(),
        "equal": (masks[0] == masks[1]).double().mean().item(), "largest": apart.max().item(),
        "mean": apart.mean().item(), "loss": relative(last_loss(other), last_loss(one)),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a CSV file")
    args = parser.parse_args(argv)
    lines = pd.DataFrame([compare(args.one, other) for other in args.other])
    print(lines.to_string(index=False))
    write_text(args.out, lines.to_csv(index=False))


if __name__ == "__main__":
    main()
