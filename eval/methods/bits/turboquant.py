"""TurboQuant: the middle rotated at random, then 2 or 4 bits per coordinate, without zero points.

"TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv 2504.19874, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedConfig

from leank.eval.cache.storage.rotated import Rotation
from leank.eval.methods.axes import Bits, method
from leank.eval.methods.held import Held
from leank.typed import OneOf, Seed


@method("turboquant")
@dataclass(frozen=True)
class TurboQuant(Bits):
    """Every token's vector x, of d kept channels of K or of V, is stored as its norm and one code per coordinate.

      code_j = argmin_i | sqrt(d) (x R)_j / ||x|| - c_i |,   x̂ = ||x|| / sqrt(d) c_code R^T

    R is a random orthogonal matrix, so that the coordinates of any x are nearly standard normal and independent, and c
    are the 2^bits levels that are best for such numbers (Lloyd and Max). Nothing depends on the data: no calibration,
    no groups of tokens, and 16 bits per vector beside the codes, where KIVI has 32 per group.

    Deviations
    - This is the paper's quantiser of least mean squared error (its algorithm 1). Its algorithm 2, which makes inner
      products unbiased by one more bit of the residual's projection, is left out.
    - The paper gives outlier channels more bits; here all coordinates have the same number.
    - The newest tokens stay whole in the window, and the first in the sink.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.

    Settings
    bits: 2 or 4, default 4: bits of every coordinate of K and V.
    seed: int, default 0: seed of the rotations; heads of as many channels share one.
    """

    bits: Annotated[int, OneOf(2, 4)] = 4
    seed: Seed = 0

    def packed(self, held: Held) -> float:
        """Bytes of the middle: `bits` per coordinate, in whole bytes of every vector, and a norm per vector."""
        per_byte = 8 // self.bits
        vectors = [held.middle * (-(-n // per_byte) + held.itemsize * (n > 0)) for n in (held.k, held.v)]
        return float(sum(n.sum() for n in vectors))

    def of_layer(self, index: int, config: PreTrainedConfig) -> Rotation:
        return Rotation(self.bits, seed=self.seed)
