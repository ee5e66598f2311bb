"""Small tables go from the host to the device, and neither waits for the other."""

import numpy as np
import torch
from torch import Tensor


def _staged(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on the host: pinned for a GPU, whose allocator keeps it until the transfer has begun."""
    tensor = torch.from_numpy(np.array(array, order="C"))  # a copy, so that the host may change its own
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on `device`."""
    return _staged(array, device).to(device, non_blocking=True)


def update(tensor: Tensor, array: np.ndarray) -> None:
    """Overwrite a tensor, at its address, with the array."""
    tensor.copy_(_staged(array, tensor.device), non_blocking=True)


def scratch(held: Tensor, size: int, device: torch.device) -> Tensor:
    """Memory for `size` numbers of that dtype on the device: what is held if it has the room, else zeros."""
    fits = held.numel() >= size and held.device == device
    return held if fits else torch.zeros(size, dtype=held.dtype, device=device)


def capturing(x: Tensor) -> bool:
    """Whether operations on x are being recorded into a CUDA graph, so that nothing is appended yet."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
