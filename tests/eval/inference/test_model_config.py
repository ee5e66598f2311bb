"""Settings of the model under test that no run can use."""

import pytest

from leank.eval.inference.models import ModelConfig


@pytest.mark.parametrize("device", ["", " ", "gpu", "cuda:x", "meta"])
def test_a_device_that_is_none_is_named(device):
    with pytest.raises(ValueError, match=f"model.device='{device}' is no device; give auto"):
        ModelConfig(device=device).identity()


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "hpu", "mps:7"])
def test_a_device_of_another_machine_is_named(device):
    with pytest.raises(ValueError, match=f"model.device='{device}' is no device of this machine"):
        ModelConfig(device=device).identity()
