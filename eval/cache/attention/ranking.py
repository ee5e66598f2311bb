"""What the kernel must know of a choice of reads to rank pages or tokens by itself."""

from __future__ import annotations

from dataclasses import dataclass

from leank.eval.cache.attention.bounds import Bounds


@dataclass(frozen=True)
class Ranking:
    """How a layer ranks its middle for each query head, and how much of it a step reads.

    most: pages, or tokens, that a query head reads at most
    bounds: of the pages, which are ranked by them; None = tokens are ranked, by their label channels, which are stored
        before the others
    bits: that labels are rounded to, 16 = they are not
    """

    most: int
    bounds: Bounds | None = None
    bits: int = 16

    @property
    def page(self) -> int:
        """Tokens that are chosen together."""
        return 1 if self.bounds is None else self.bounds.page
