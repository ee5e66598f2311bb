"""Small tables from the host to the device, without either waiting for the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _staged(array: np.ndarray, device: torch.device) -> Tensor:
    """The array where a copy to `device` may begin later: pinned for a GPU, whose allocator keeps it until then."""
    tensor = torch.from_numpy(np.array(array, order="C"))  # a copy: the host goes on with its own
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on `device`."""
    return _staged(array, device).to(device, non_blocking=True)


def update(tensor: Tensor, array: np.ndarray) -> None:
    """Overwrite a tensor, at its address, with the array."""
    tensor.copy_(_staged(array, tensor.device), non_blocking=True)
