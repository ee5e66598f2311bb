"""How many tokens a server's memory admits, with a mask and without: the arithmetic of vLLM's planner.

    python -m leank.eval.serving.plan MASK --longest 32768 --memory 16

MASK is a mask.safetensors, with or without a layout of bits, or a published .pth mask.

A request holds pages of the group `rest` for its sink, and for the window before the next position. During a long step
(prefill) most new positions leave the window before the step ends; they get the null block, so the step needs no memory
for them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from leank.cli import ending
from leank.typed import LARGEST, Checked, OneOf, Positive

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from torch import Tensor

    from leank.mask import ChannelMask

DTYPES = {2: "bfloat16", 4: "float32"}  # of a model, by the bytes of a number


@dataclass(frozen=True)
class RestBlocks:
    """The pages of `rest` by their index in a request: page i holds the positions [i * block, (i + 1) * block)."""

    block: int  # tokens of a page
    hit: int  # tokens; a prefix hit ends at a multiple of them, and so up to `hit` tokens before the end of a step
    sink: int  # sink, window: tokens kept whole
    window: int
    every: int = 0  # tokens; prefix hits can end at multiples of them, too; 0 = only at the ends of steps
    grain: int = 1  # tokens; the window begins at a multiple of them

    @property
    def sink_pages(self) -> int:
        """Pages of the sink."""
        return _ceil(self.sink, self.block)

    def first_in_window(self, computed: int) -> int:
        """The page that holds the first position of the window, once `computed` positions are computed."""
        return max(0, computed - self.window) // self.grain * self.grain // self.block

    def tail(self, end: int) -> int:
        """The first page that a step up to `end` stores behind the sink: a prefix hit, before `end`, reads a window."""
        return self.first_in_window(max(0, end - 1) // self.hit * self.hit)

    def stored(self, page: int, end: int) -> bool:
        """Whether a step that ends before position `end` stores this page, which is new in it."""
        if page < self.sink_pages or page >= self.tail(end):
            return True
        if not self.every:
            return False
        mark = _ceil((page + 1) * self.block, self.every) * self.every
        return mark <= end and page >= self.first_in_window(mark)

    def new(self, held: int, end: int) -> list[bool]:
        """Whether each page from index `held` up to position `end` is stored."""
        return [self.stored(page, end) for page in range(held, _ceil(end, self.block))]

    def most(self, in_flight: int, longest: int, hits: bool) -> int:
        """Pages that one request holds at most.

        These are the sink, and the window that a step of `in_flight` tokens leaves. A step behind another, or behind
        a prefix hit, which a prompt can begin with if `hits`, also holds the window that it reads.
        """
        window = self.window + self.grain - 1  # the most that it has
        of_tail = _ceil(window + self.hit, self.block) + 1
        marks = 0
        if self.every:
            of_mark = _ceil(window, self.block) + 1
            passed = min(
                _ceil(min(in_flight, longest), self.every), longest // self.every
            )  # a short step passes one, too
            marks = min(passed * of_mark, _ceil(min(in_flight, longest) + window, self.block))
        windows = 2 if hits or in_flight < longest else 1
        return min(self.sink_pages + windows * of_tail + marks, _ceil(longest, self.block))


@dataclass(frozen=True)
class Server(Checked):
    """What the planner knows of a server."""

    memory: Annotated[float, Gt(0), Le(LARGEST)]  # bytes for pages
    longest: Positive  # tokens of the longest request (max-model-len)
    step: Positive  # tokens of a step (max-num-batched-tokens)
    block: Annotated[int, Ge(1), Le(2**16)] = 32  # tokens of a page
    itemsize: Annotated[int, OneOf(*DTYPES)] = 2  # bytes of a number of the model
    hits: bool = True  # whether there is a prefix cache

    def tokens(self, page_columns: int, pages: int) -> int:
        """Tokens that requests of the greatest length hold in the memory, if each takes this many pages."""
        return int(self.memory // (page_columns * self.itemsize) / pages * self.longest)

    def pruned(self, mask: ChannelMask, sink: int, window: int) -> int:
        """Tokens admitted with a mask."""
        import torch

        from leank.eval.serving.coded import page_layout

        layout = page_layout(mask, self.block, sink, window, getattr(torch, DTYPES[self.itemsize]))
        rest = RestBlocks(layout.rest.block, self.block, sink, window, grain=layout.grain)
        pages = -(-self.longest // self.block) + rest.most(self.step, self.longest, self.hits)
        return self.tokens(layout.page_columns, pages)

    def stock(self, keep: Tensor) -> int:
        """Tokens admitted without a mask, for a model of the shape of `keep`."""
        return self.tokens(2 * keep.numel() * self.block, -(-self.longest // self.block))

    def by_bytes(self, mask: ChannelMask, sink: int, window: int) -> float:
        """How many times the tokens fit if nothing is lost to pages: the ratio of the bytes of a longest request."""
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
    parser.add_argument("--longest", type=int, default=8192, help="max-model-len")
    parser.add_argument("--step", type=int, default=8192, help="max-num-batched-tokens")
    parser.add_argument("--memory", type=float, default=1, help="GiB for pages")
    parser.add_argument("--block", type=int, help="block-size; by default 32, or 64 under a layout of bits")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of a number: 2 for bfloat16, 4 for float32")
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
    block = args.block or (32 if mask.precision is None else PAGE)
    server = Server(args.memory * 2**30, args.longest, args.step, block, args.itemsize, not args.no_hits)
    stock, pruned = server.stock(mask.keep), server.pruned(mask, settings.sink, settings.window)
    if pruned < args.longest or not stock:
        raise ValueError(
            f"--memory {args.memory} admits {stock:,} tokens without the mask and {pruned:,} with it, less than a "
            f"request of --longest {args.longest}; give more memory or shorter requests"
        )
    return (f"tokens admitted: {stock:,} without the mask, {pruned:,} with it, {pruned / stock:.2f} times as many "
            f"(sink {settings.sink}, window {settings.window}; by the bytes alone "
            f"{server.by_bytes(mask, settings.sink, settings.window):.2f})")  # fmt: skip


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


if __name__ == "__main__":
    main()
