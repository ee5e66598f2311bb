"""What a method holds of one prompt, counted in tokens and channels; its bytes are eval.methods.memory's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Held:
    """Of one prompt and every KV head [L, H]: tokens in sink and window (`ends`, whole) and in the middle, channels of
    the middle's K and V. dim: head_dim; itemsize: bytes of a number that is not packed.
    """

    ends: np.ndarray
    middle: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dim: int
    itemsize: int
