"""Which layers of a model lie in the pages of a mask, and what the others take.

A layer that attends over the whole context lies in them. A layer with a sliding window keeps vLLM's own attention and
pages: a group of its own for each, in the same pool. vLLM then asks that all pages have the same bytes. So a page of
the mask is padded to a multiple of a page of such a layer, and vLLM gives that layer as many times the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from torch import Tensor

    from leank.mask import ChannelMask

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Layers:
    """The layers of a model."""

    full: tuple[int, ...]  # those of full attention, which lie in the pages of a mask
    sliding: int = 0  # how many have a sliding window
    window: int = 0  # tokens that these see, the query's own included

    @classmethod
    def of(cls, text: Any) -> Self:
        """The layers of a text model by its configuration; all have full attention if it does not say."""
        kinds = getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
        sliding = sum(kind == SLIDING for kind in kinds)
        return cls(full, sliding, text.sliding_window if sliding else 0)

    def mask(self, mask: ChannelMask) -> ChannelMask:
        """The rows of a mask of the whole model, [L, H, D], that are of layers of full attention."""
        from leank.mask import ChannelMask
        from leank.precision import Precision

        if not self.sliding:
            return mask
        rows, means, bits = list(self.full), mask.mean_keys, mask.precision
        return ChannelMask(
            mask.keep[rows],
            mask.metadata,
            None if means is None else means[rows],
            None if bits is None else Precision(bits.key_bits[rows], bits.value_bits[rows], packed=bits.packed),
        )

    def columns(self, keep: Tensor, block: int, rank: int = 0, ranks: int = 1) -> int:
        """Columns, numbers of the model's dtype, of a page of one layer with a sliding window; 0 = there is none.

        keep: bool [layers, H, D]. block: tokens of the page. rank, ranks: see `layout.heads_of`.
        """
        from leank.eval.serving.layout import heads_of

        return 2 * keep[0, heads_of(keep.shape[1], rank, ranks)].numel() * block if self.sliding else 0

    def pages(self, block: int, step: int, longest: int) -> int:
        """Pages of `block` tokens that vLLM reserves for one sliding layer of a longest request, in steps of `step`."""
        return -(-min(self.window - 1 + step, longest) // block) + 1
