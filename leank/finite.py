"""Which tensors hold numbers that are none: a model or scores with NaN are named before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity, in order.

    Each tensor is read once where it lies, for its smallest and its largest number, which are NaN if any number is.
    No copy is made, and all answers come to the host together. Types of one byte, which few operations take, are
    passed over.

    tensors: (name, tensor), of any shape, type and device.
    """
    names, ends = [], []
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            names.append(name)
            ends.append(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())
    places = {end.device for end in ends}
    fine = {device: iter(torch.stack([end for end in ends if end.device == device]).tolist()) for device in places}
    return [name for name, end in zip(names, ends, strict=True) if not next(fine[end.device])]
