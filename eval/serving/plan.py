"""How many tokens a server's memory admits, with a mask and without: the arithmetic of vLLM's planner.

    python -m leank.eval.serving.plan MASK --longest 32768 --memory 16

MASK is a mask.safetensors, with or without a layout of bits, or a published .pth mask. With --model, a model that a
server would refuse is refused here; one with layers of a sliding window is counted right only with it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from leank.cli import ending
from leank.eval.serving.layers import Layers
from leank.eval.serving.rest import RestBlocks
from leank.typed import LARGEST, Checked, OneOf, Positive

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from torch import Tensor

    from leank.mask import ChannelMask

DTYPES = {2: "bfloat16", 4: "float32"}  # of a model, by the bytes of a number


@dataclass(frozen=True)
class Server(Checked):
    """What the planner knows of a server."""

    memory: Annotated[float, Gt(0), Le(LARGEST)]  # bytes for pages
    longest: Positive  # tokens of the longest request (max-model-len)
    step: Positive  # tokens of a step (max-num-batched-tokens)
    block: Annotated[int, Ge(1), Le(2**16)] = 32  # tokens of a page
    itemsize: Annotated[int, OneOf(*DTYPES)] = 2  # bytes of a number of the model
    hits: bool = True  # whether there is a prefix cache
    ranks: Positive = 1  # of tensor parallelism; memory is that of one

    def tokens(self, page_columns: int, pages: int) -> int:
        """Tokens that requests of the greatest length hold in the memory, if each takes this many pages."""
        return int(self.memory // (page_columns * self.itemsize) / pages * self.longest)

    def pruned(self, mask: ChannelMask, sink: int, window: int, layers: Layers | None = None) -> int:
        """Tokens admitted with a mask. layers: of the model; None = all of them have full attention."""
        import torch

        from leank.eval.serving.coded import page_layout

        layout = page_layout(
            *(mask, self.block, sink, window, getattr(torch, DTYPES[self.itemsize]), self.hits, 0, self.ranks, layers)
        )
        rest = RestBlocks(layout.rest.block, layout.hit, sink, window, grain=layout.grain)
        pages = -(-self.longest // self.block) + rest.most(self.step, self.longest, self.hits)
        if layers is not None and layers.sliding:
            block = self.block * layout.page_columns // layers.columns(mask.keep, self.block, 0, self.ranks)
            pages += layers.sliding * layers.pages(block, self.step, self.longest)
        return self.tokens(layout.page_columns, pages)

    def stock(self, keep: Tensor, layers: Layers | None = None) -> int:
        """Tokens admitted without a mask, for a model of the shape of `keep`."""
        from leank.eval.serving.layout import heads_of

        own, pages = keep[:, heads_of(keep.shape[1], 0, self.ranks)], -(-self.longest // self.block)
        if layers is None or not layers.sliding:
            return self.tokens(2 * own.numel() * self.block, pages)
        # vLLM puts as many layers into each group, of one kind each
        fewer, more = sorted((len(layers.full), layers.sliding))
        size = more if more < 1.5 * fewer else fewer
        pages = -(-len(layers.full) // size) * pages
        pages += -(-layers.sliding // size) * layers.pages(self.block, self.step, self.longest)
        return self.tokens(size * layers.columns(keep, self.block, 0, self.ranks), pages)

    def by_bytes(self, mask: ChannelMask, sink: int, window: int, layers: Layers | None = None) -> float:
        """How many times the tokens fit if nothing is lost to pages: the ratio of the bytes of a longest request."""
        if layers is not None and layers.sliding:
            full, own = layers.mask(mask), layers.columns(mask.keep, min(self.longest, layers.window))
            dense, own = 2 * full.keep.numel() * self.longest, own * layers.sliding
            return (dense + own) / (dense / self.by_bytes(full, sink, window) + own)
        keep, ends = mask.keep, min(self.longest, sink + window)
        if mask.precision is not None:  # sink and window are held twice: whole, and in codes
            coded = float(sum(x.sum() for x in mask.precision.token_bytes(self.itemsize)) / self.itemsize)
            return 2 * keep.numel() * self.longest / (coded * self.longest + 2 * keep.numel() * ends)
        kept = int(keep.sum() + keep.any(-1).sum() * keep.shape[-1])
        return 2 * keep.numel() * self.longest / (kept * self.longest + (2 * keep.numel() - kept) * ends)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mask")
    parser.add_argument("--model", help="its folder, or its name on the hub; its configuration is read")
    parser.add_argument("--longest", type=int, default=8192, help="max-model-len")
    parser.add_argument("--step", type=int, default=8192, help="max-num-batched-tokens")
    parser.add_argument("--memory", type=float, default=1, help="GiB for pages")
    parser.add_argument("--block", type=int, help="block-size; by default 32, or 64 under a layout of bits")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of a number: 2 for bfloat16, 4 for float32")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel-size; --memory is that of one rank")
    parser.add_argument("--no-hits", action="store_true", help="no-enable-prefix-caching")
    args = parser.parse_args(argv)
    with ending("eval.serving.plan"):
        print(planned(args))


def planned(args: argparse.Namespace) -> str:
    """The line that says what a server admits. Raises ValueError naming the argument at fault."""
    from leank.eval.cache.storage.segment import PAGE
    from leank.eval.serving.settings import ServerSettings
    from leank.mask import ChannelMask

    settings = ServerSettings.find({"leank": {"mask": args.mask}})
    assert settings is not None
    mask = ChannelMask.load(args.mask)
    layers = None if args.model is None else layers_of(args.model, mask)
    block = args.block or (32 if mask.precision is None else PAGE)
    server = Server(args.memory * 2**30, args.longest, args.step, block, args.itemsize, not args.no_hits, args.ranks)
    stock, pruned = server.stock(mask.keep, layers), server.pruned(mask, settings.sink, settings.window, layers)
    if pruned < args.longest or not stock:
        raise ValueError(
            f"--memory {args.memory} admits {stock:,} tokens without the mask and {pruned:,} with it, less than a "
            f"request of --longest {args.longest}; give more memory or shorter requests"
        )
    return (f"tokens admitted: {stock:,} without the mask, {pruned:,} with it, {pruned / stock:.2f} times as many "
            f"(sink {settings.sink}, window {settings.window}; by the bytes alone "
            f"{server.by_bytes(mask, settings.sink, settings.window, layers):.2f})")  # fmt: skip


def layers_of(model: str, mask: ChannelMask) -> Layers:
    """The layers of a model.

    Raises ValueError that names what of them a server cannot hold, or why the mask is not for it.
    """
    from transformers import AutoConfig

    from leank.eval.serving.settings import has_both, wrong_layers
    from leank.shape import sliding_window

    config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    window = None if has_both(config) else sliding_window(config)
    for wrong, why in (
        *wrong_layers(config),
        (window is not None, f"{config.model_type} has a sliding window of {window}; take a model of full attention"),
    ):
        if wrong:
            raise ValueError(f"--model {model}: {why}")
    mask.check_model(config)
    return Layers.of(config)


if __name__ == "__main__":
    main()
