"""The pictures of a run: what alpha became, where channels are kept, and how the losses went."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from leank_train.common.files import write_bytes
from leank_train.mask import ChannelMask

if TYPE_CHECKING:
    from leank_train.running.recorder import Recorder


def training_plots(stage1: Recorder, stage2: Recorder, alpha: Tensor, mask: ChannelMask, out: Path) -> dict[str, Path]:
    """Write every picture of a run to `out` as PNG; returns name -> file."""
    figures = {
        "losses": losses(stage1, stage2),
        "alpha_histogram": alpha_histogram(stage1, stage2),
        "channels_per_head": channels_per_head(mask),
        "kept_per_frequency": kept_per_frequency(mask, alpha),
    }
    found = {}
    for name, figure in figures.items():
        found[name] = out / f"{name}.png"
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
        plt.close(figure)
        write_bytes(found[name], buffer.getvalue())
    return found


def losses(stage1: Recorder, stage2: Recorder) -> Figure:
    """Distillation loss, regulariser and mean alpha over the steps of both stages."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    offset = 0
    for name, record, colour in (("stage 1", stage1, "C0"), ("stage 2", stage2, "C1")):
        if not record.steps:
            continue
        x = np.array([s["step"] for s in record.steps]) + offset
        y = np.array([s["distillation"] for s in record.steps])
        left.plot(x, y, color=colour, alpha=0.25, lw=0.8)
        left.plot(x, _smooth(y), color=colour, label=f"distillation, {name}")
        right.plot(x, [s["alpha_mean"] for s in record.steps], color=colour, label=name)
        if name == "stage 1":
            left.plot(x, [s["penalty"] for s in record.steps], color="C2", label="lambda * L1")
        offset = int(x[-1])
    left.set(yscale="log", xlabel="step", ylabel="loss", title="Losses")
    right.set(xlabel="step", ylabel="mean alpha", title="Mean score", ylim=(0, 1.02))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    return figure


def alpha_histogram(stage1: Recorder, stage2: Recorder) -> Figure:
    """How the scores spread from 1 over the steps, a column a recorded step (log counts)."""
    rows = list(stage1.histograms)
    last = rows[-1][0] if rows else 0
    rows += [(last + step, counts) for step, counts in stage2.histograms]
    figure, axis = plt.subplots(figsize=(7, 3.4))
    if rows:
        counts = np.log10(1 + np.array([c for _, c in rows], dtype=float)).T
        image = axis.imshow(counts, origin="lower", aspect="auto", cmap="viridis", extent=(0, len(rows), 0, 1))
        ticks = np.linspace(0, len(rows) - 1, min(6, len(rows))).astype(int)
        axis.set_xticks(ticks + 0.5, [str(rows[t][0]) for t in ticks])
        figure.colorbar(image, label="log10(1 + channels)")
        if stage2.histograms and stage1.histograms:
            axis.axvline(len(stage1.histograms), color="white", lw=1, ls="--")
    axis.set(xlabel="step (stage 2 right of the line)", ylabel="alpha", title="Scores over training")
    return figure


def channels_per_head(mask: ChannelMask) -> Figure:
    """Kept channels of every KV head; 0 means that the head keeps no middle at all."""
    counts = mask.channels_per_head.numpy()
    figure, axis = plt.subplots(figsize=(2.5 + 0.35 * counts.shape[1], 1.5 + 0.28 * counts.shape[0]))
    image = axis.imshow(counts, cmap="Blues", vmin=0, vmax=mask.keep.shape[2], aspect="auto")
    if counts.size <= 512:
        for (i, j), n in np.ndenumerate(counts):
            dark = n > 0.6 * mask.keep.shape[2]
            axis.text(j, i, str(n), ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set(xlabel="KV head", ylabel="layer", title=f"Kept channels of {mask.keep.shape[2]}")
    figure.colorbar(image)
    return figure


def kept_per_frequency(mask: ChannelMask, alpha: Tensor) -> Figure:
    """Share of channels kept per RoPE pair, highest frequency first (LeanK figures 7 and 9), and per layer."""
    layers, heads, dim = mask.keep.shape
    pairs = mask.keep.float().view(layers, heads, 2, dim // 2).mean((1, 2)).numpy()  # [layers, pairs]
    scores = alpha.view(layers, heads, 2, dim // 2).mean((0, 1, 2)).numpy()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2, 3))
    top.bar(range(dim // 2), 100 * pairs.mean(0), color="C0", label="kept")
    top.plot(range(dim // 2), 100 * scores, color="C1", label="mean alpha (x 100)")
    top.set(ylabel="%", title="Kept channels per RoPE pair")
    top.legend(frameon=False)
    image = bottom.imshow(100 * pairs, aspect="auto", cmap="Blues", vmin=0, vmax=100)
    bottom.set(xlabel="RoPE pair (0 = highest frequency)", ylabel="layer")
    figure.colorbar(image, ax=[top, bottom], label="% kept")
    return figure


def _smooth(y: np.ndarray) -> np.ndarray:
    width = max(1, len(y) // 30)
    total = np.cumsum(np.insert(y, 0, 0.0))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - width)
    return (total[ends] - total[starts]) / (ends - starts)
