"""New memory that holds no numbers, so that reading what was not written shows."""

import pytest
import torch


def poison_new(patch):
    """Let new tensors hold NaN as long as the pytest.MonkeyPatch lasts; bytes hold ones, of which scales are NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.dtype == torch.uint8:
            return tensor.fill_(255)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    patch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`poison_new` in every test of a file that imports this."""
    poison_new(monkeypatch)
