"""What a method holds of one prompt, counted in tokens and channels; its bytes are eval.methods.memory's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Held:
    """What every KV head holds of one prompt.

    ends: int [L, H]: tokens in sink and window, which are whole.
    middle: int [L, H]: tokens in the middle.
    k, v: int [L, H]: channels of the middle's K and V.
    dim: int: head_dim.
    itemsize: int, bytes: size of a number that is not packed.
    """

    ends: np.ndarray
    middle: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dim: int
    itemsize: int
