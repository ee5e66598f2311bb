"""Memory of the compressed cache against a dense one, by batch (LeanK, figure 6), and what the allocator saves.

    python -m scripts.bench.decoding.memory OUT --context 32768      # Llama-3.1-8B shape, published mask, one GPU
    python -m scripts.bench.decoding.memory OUT --context 4096 --batch 1 --layers 2      # a CPU: bytes of tensors

Caches are filled with random keys and values, so no weights are needed. Writes OUT/memory.csv and OUT/memory.png.
Prints which share of K (and of V) beyond sink and window is saved, beside the ratio of the mask, and the largest batch
that fits the GPU beside 16 GB of weights.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from torch import Tensor

from leank.eval.cache import CompressedLayer, Sizes, bytes_per_row, max_batch
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.memory import Memory, measure
from leank.eval.cache.storage.middle import Middle
from leank.mask import ChannelMask
from scripts.bench.common.shapes import DIM, DTYPE, LLAMA, MASKS
from scripts.bench.common.table import said, write_rows

WEIGHTS = 16.1e9  # bytes of Llama-3.1-8B in bf16


def fill(keep: Tensor, rows: int, context: int, sizes: Sizes, device: torch.device) -> tuple[Memory, int]:
    """Seal layers of random tokens; return the bytes of the tensors and the bytes at the allocator.

    keep: [L, H, D], True = kept. rows: of the batch. context: tokens of each row.
    """
    gc.collect()
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    layers = [CompressedLayer(Middle(k), sizes, choose_backend("auto")) for k in keep]
    for layer in layers:
        k, v = torch.randn(2, 1, keep.shape[1], context, DIM, device=device, dtype=DTYPE)
        layer.seal(*(x.expand(rows, -1, -1, -1) for x in (k, v)))
    del k, v
    memory = measure(layers, {})
    return memory, torch.cuda.memory_allocated() - before if cuda else memory.total


def saved(keep: Tensor, rows: int, context: int, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Shares of the middle that are not held: of K and of V by the tensors, of both by the allocator."""
    (pruned, at), (whole, at_whole) = (
        fill(mask, rows, context, sizes, device) for mask in (keep, torch.ones_like(keep))
    )
    return {
        "k": 1 - pruned.middle_k / whole.middle_k,
        "v": 1 - pruned.middle_v / whole.middle_v,
        "allocator": (at_whole - at) / (whole.middle_k + whole.middle_v),
    }


def plot(rows: list[dict[str, float]], out: Path) -> None:
    """GB against batch, dense and compressed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("dense_gb", "dense K and V"), ("leank_gb", "LeanK, at the allocator")):
        axis.plot([r["batch"] for r in rows], [r[name] for r in rows], marker=".", label=label)
    axis.set(xlabel="batch", ylabel="GB of cache", title=f"{int(rows[0]['context'])} tokens per row")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, help="only the first layers of the mask; default all")
    parser.add_argument("--mask", type=Path, default=MASKS / LLAMA, help="published .pth or mask.safetensors")
    args = parser.parse_args(argv)
    read = ChannelMask.from_official if args.mask.suffix == ".pth" else ChannelMask.load
    keep, sizes = read(args.mask).keep[: args.layers], Sizes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    share = saved(keep, args.batch[0], args.context, sizes, device)
    pruned, empty = 1 - keep.float().mean().item(), 1 - keep.any(-1).float().mean().item()
    print(f"beyond sink and window: K saved {share['k']:.2%}, the mask prunes {pruned:.2%}; "
          f"V saved {share['v']:.2%}, heads without channels {empty:.2%}; "
          f"both at the {'allocator' if device.type == 'cuda' else 'tensors'} {share['allocator']:.2%}, "
          f"expected {(pruned + empty) / 2:.2%}")  # fmt: skip
    rows = []
    for batch in args.batch:
        memory, held = fill(keep, batch, args.context, sizes, device)
        dense = 2 * keep.numel() * args.context * batch * DTYPE.itemsize
        formula = bytes_per_row(keep, args.context, DTYPE, sizes) * batch
        rows.append({"batch": batch, "context": args.context, "dense_gb": dense / 1e9, "leank_gb": held / 1e9,
                     "formula_gb": formula / 1e9, "slack_gb": memory.slack / 1e9, "smaller": dense / held})  # fmt: skip
        print(said(rows[-1]))
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out / "memory.csv", rows)
    plot(rows, args.out / "memory.png")
    if device.type == "cuda" and args.layers is None:
        free = int(torch.cuda.mem_get_info()[1] - WEIGHTS - 3e9)
        dense = free // (2 * keep.numel() * args.context * DTYPE.itemsize)
        print(f"largest batch of {args.context} tokens: dense {dense}, LeanK "
              f"{max_batch(keep, args.context, free, DTYPE, sizes)}")  # fmt: skip


if __name__ == "__main__":
    main()
