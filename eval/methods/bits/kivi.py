"""KIVI: the middle in 2, 4 or 8 bits, K per channel along tokens, V per token along channels.

"KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750, section 3.
"""

from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import round_up
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.shape import kv_shape
from leank.typed import OneOf, Positive


@method("kivi")
@dataclass(frozen=True)
class KIVI(Bits):
    """Each group of numbers x is stored as integers with one scale s and one zero point z.

      Q(x) = round((x - z) / s),   z = min x,   s = (max x - min x) / (2^bits - 1)

    A group is `group` tokens of one channel of K, or `group` channels of one token of V.

    Deviations
    - KIVI's residual, its newest tokens in full precision, is the cache's window here. The published code keeps those
      that do not fill a group of K and the last 32 or 128 of V. The sink stays whole too, which KIVI does not have.
    - The prompt is attended unquantised and quantised when the cache is compressed. Its last group may be short.
    - A group of equal numbers has scale 0 and comes back exactly; the published code divides by that zero.
    """

    bits: Annotated[int, OneOf(2, 4, 8)] = 2  # bits of every number of K and V
    group: Positive = 32  # numbers that share scale and zero point; the cache's `flush` must be a multiple of it

    def check_sizes(self, sizes: Sizes) -> None:
        if sizes.flush % self.group:
            raise ValueError(
                f"flush={sizes.flush} must be a multiple of group={self.group}, tokens stored together; set flush to "
                f"{round_up(sizes.flush, self.group)} or choose a smaller group"
            )

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        Packing(self.bits, self.group).check(kv_shape(config)[-1])

    def sized(self, index: int, held: Held) -> Packing:
        return Packing(self.bits, self.group)

    def of_layer(self, index: int, prefill: Prefill) -> Packing:
        return Packing(self.bits, self.group)
