"""How far the masks and scores of training runs are from those of another run of the same settings.

    python -m scripts.bench.training.same_masks ONE OTHER [OTHER ...] --out same_masks.csv

ONE and OTHER are run directories, such as those of one GPU and of several. Prints and writes a line for each OTHER:

equal         share of the channels that both masks keep or both prune
largest       largest difference of two scores of one channel, after stage 2
mean          mean of these differences
loss          relative difference of the distillation loss in the last step of stage 1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from leank_train.common.escape import csv_rows
from leank_train.common.files import write_text
from leank_train.common.tensor_files import read_checkpoint
from leank_train.mask import ChannelMask
from scripts.bench.common.table import said


def last_loss(run: Path) -> float:
    """Distillation loss of the last step of stage 1."""
    state = read_checkpoint(run / "checkpoints/stage1/done.ckpt", "run the training again")
    return float(state["record"]["steps"][-1]["distillation"])


def compare(one: Path, other: Path) -> dict[str, object]:
    """The figures of the module's docstring. Raises ValueError for runs of models of different shapes."""
    masks = [ChannelMask.load(run / "mask.safetensors").keep for run in (one, other)]
    if masks[0].shape != masks[1].shape:
        raise ValueError(f"{one} has scores of {tuple(masks[0].shape)}, {other} of {tuple(masks[1].shape)}")
    apart = torch.sub(*(load_file(run / "alpha.safetensors")["alpha"] for run in (one, other))).abs()
    return {
        "one": one.name, "other": other.name, "channels": masks[0].numel(),
        "equal": (masks[0] == masks[1]).double().mean().item(), "largest": apart.max().item(),
        "mean": apart.mean().item(), "loss": abs(last_loss(other) / last_loss(one) - 1),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a CSV file")
    args = parser.parse_args(argv)
    lines = [compare(args.one, other) for other in args.other]
    print(*(said(line, 6) for line in lines), sep="\n")
    write_text(args.out, csv_rows(lines))


if __name__ == "__main__":
    main()
