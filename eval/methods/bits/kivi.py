"""KIVI (Liu et al., 2024): the middle in 2 or 4 bits, K per channel along tokens, V per token along channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from eval.cache.storage.pages import round_up
from eval.cache.storage.quantised import Packing
from eval.cache.storage.sizes import Sizes
from eval.inference.models import shape_of
from eval.methods.axes import Bits
from eval.methods.held import Held
from leank_train.common.typed import OneOf, Positive


@dataclass(frozen=True)
class KIVI(Bits):
    """bits: 2 or 4, of K and V alike; group: numbers that share a scale and a zero point.

    KIVI's residual, the newest tokens in full precision (K: those that do not fill a group yet, V: the last R), is the
    cache's window here, and the sink stays whole too, which KIVI does not have. The prompt is attended unquantised and
    quantised when it is sealed; its last group may be short. Tokens join in groups, so `flush` is a multiple of
    `group`. A group of equal numbers has scale 0 and comes back exactly; KIVI's code divides by that zero.
    """

    bits: Annotated[int, OneOf(2, 4)] = 2
    group: Positive = 32

    def check_sizes(self, sizes: Sizes) -> None:
        if sizes.flush % self.group:
            raise ValueError(
                f"flush={sizes.flush} must be a multiple of group={self.group}, tokens stored together; set flush to "
                f"{round_up(sizes.flush, self.group)} or choose a smaller group"
            )

    def check(self, config: Any, tokenizer: Any) -> None:
        self.of_layer(0, config).check(shape_of(config)[-1])

    def packed(self, held: Held) -> float:
        """Per group of tokens and channel of K, and per token and group of channels of V (section 3), `bits` a number,
        a scale and a zero point.
        """
        cells = -(-held.middle // self.group) * held.k + held.middle * held.v / self.group
        return float(cells.sum()) * (self.group * self.bits / 8 + 2 * held.itemsize)

    def of_layer(self, index: int, config: Any) -> Packing:
        return Packing(self.bits, self.group)
