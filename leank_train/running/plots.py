"""The pictures of a run: how the losses went, what alpha became, and which channels are kept."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

from leank.eval.report.style import PALETTE, SETTINGS, legend, png
from leank.files import write_bytes
from leank.mask import ChannelMask
from leank.rotary import mean_by_pair
from leank_train.running.recorder import Recorder

BLUE, ORANGE, GREEN = PALETTE[:3]
MOST_NUMBERS = 512  # heads; a map of more of them shows colours alone


def training_plots(
    stage1: Recorder, stage2: Recorder, alpha: Tensor, mask: ChannelMask, pairs: Tensor, out: Path
) -> dict[str, Path]:
    """Write a run's pictures as PNG into the folder `out`, those of its steps if there are any; returns name -> file.

    alpha: [L, H, D], the scores after stage 2, of which the mask is made.
    pairs: [L, D], the RoPE pair of each channel (`rotary_pairs`).
    """
    found = {}
    with rc_context({**SETTINGS, "font.size": 12, "axes.titlesize": 13, "text.parse_math": True}):
        figures = {
            "channels_per_head": channels_per_head(mask),
            "kept_per_frequency": kept_per_frequency(mask, alpha, pairs),
        }
        if stage1.steps or stage2.steps:
            figures |= {"losses": losses(stage1, stage2), "alpha_histogram": alpha_histogram(stage1, stage2)}
        for name, figure in figures.items():
            found[name] = out / f"{name}.png"
            write_bytes(found[name], png(figure))
    return found


def losses(stage1: Recorder, stage2: Recorder) -> Figure:
    """Distillation loss, penalty and mean alpha over the steps of both stages; stage 2 follows stage 1."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    offset = 0
    for name, record, colour, line in (("stage 1", stage1, BLUE, "-"), ("stage 2", stage2, ORANGE, "--")):
        if not record.steps:
            continue
        x = np.array([s["step"] for s in record.steps]) + offset
        y = np.array([s["distillation"] for s in record.steps])
        left.plot(x, y, color=colour, alpha=0.25, linewidth=1)
        smooth = pd.Series(y).rolling(max(1, len(y) // 30), min_periods=1).mean()
        left.plot(x, smooth, line, color=colour, label=f"distillation loss, {name}")
        right.plot(x, [s["alpha_mean"] for s in record.steps], line, color=colour)
        if name == "stage 1":
            left.plot(x, [s["penalty"] for s in record.steps], ":", color=GREEN, label="penalty on alpha, stage 1")
        offset = int(x[-1])
    left.set(yscale="log", xlabel="Training step", ylabel="Loss", title="Losses (thin: each step)")
    right.set(xlabel="Training step", ylabel="Mean of alpha", title="Mean channel score", ylim=(0, 1.02))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    legend(figure)
    return figure


def alpha_histogram(stage1: Recorder, stage2: Recorder) -> Figure:
    """How the scores spread from 1 over the steps: one column per recorded step, counts on a log scale."""
    rows = list(stage1.histograms)
    last = rows[-1][0] if rows else 0
    rows += [(last + step, counts) for step, counts in stage2.histograms]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    if rows:
        counts = np.array([c for _, c in rows]).T
        norm = SymLogNorm(1, vmin=0)  # logarithmic but for 0
        image = axis.imshow(
            counts, origin="lower", aspect="auto", cmap="viridis", norm=norm, extent=(0, len(rows), 0, 1)
        )
        ticks = np.linspace(0, len(rows) - 1, min(6, len(rows))).astype(int)
        axis.set_xticks(ticks + 0.5, [str(rows[t][0]) for t in ticks])
        figure.colorbar(image, label="Number of channels")
        if stage2.histograms and stage1.histograms:
            border = len(stage1.histograms)
            axis.axvline(border, color="white", linewidth=2, linestyle="--")
            axis.annotate("stage 2", (border, 1.01), xycoords=axis.get_xaxis_transform(), va="bottom")
    axis.set(xlabel="Training step", ylabel="Score alpha of a channel")
    axis.set_title("Channel scores over training", loc="left")
    return figure


def channels_per_head(mask: ChannelMask) -> Figure:
    """Kept channels of every KV head; a head with 0 stores no middle at all."""
    counts, most = mask.channels_per_head.numpy(), mask.keep.shape[2]
    figure = Figure(figsize=(3.5 + 0.45 * counts.shape[1], 2 + 0.34 * counts.shape[0]), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(counts, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    if counts.size <= MOST_NUMBERS:
        for (i, j), n in np.ndenumerate(counts):
            axis.text(j, i, str(n), ha="center", va="center", color="white" if n > 0.6 * most else "black")
    axis.set(xlabel="KV head", ylabel="Layer", title=f"Kept channels, of {most}")
    axis.locator_params(integer=True)
    figure.colorbar(image, label="Kept channels")
    return figure


def kept_per_frequency(mask: ChannelMask, alpha: Tensor, pairs: Tensor) -> Figure:
    """Share of channels kept per RoPE pair, highest frequency first (LeanK figures 7 and 9), and per layer."""
    kept, scores = (mean_by_pair(values, pairs).numpy() for values in (mask.keep, alpha))  # [layers, pairs]
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    top.bar(range(kept.shape[1]), 100 * np.nanmean(kept, 0), color=BLUE, label="kept channels")
    top.plot(range(kept.shape[1]), 100 * np.nanmean(scores, 0), color=ORANGE, label="mean of alpha, in % of 1")
    top.set(ylabel="%", title="Kept channels per RoPE pair, all layers and each layer")
    legend(figure)
    image = bottom.imshow(100 * kept, aspect="auto", cmap="Blues", vmin=0, vmax=100)
    bottom.set(xlabel="RoPE pair (0 = highest frequency)", ylabel="Layer")
    bottom.locator_params(axis="y", integer=True)
    figure.colorbar(image, ax=bottom, label="Kept channels (%)")
    return figure
