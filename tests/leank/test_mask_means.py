"""Mean keys that stand for pruned channels, in a mask and in its file."""

import pytest
import torch

from leank.mask import ChannelMask
from leank.tensor_files import write_tensors

KEEP = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) > 0.5
MEANS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def test_means_come_back_from_the_file(tmp_path):
    ChannelMask(KEEP, {"seed": 1}, MEANS).save(tmp_path / "m.safetensors")
    read = ChannelMask.load(tmp_path / "m.safetensors")
    assert torch.equal(read.keep, KEEP)
    assert torch.equal(read.mean_keys, MEANS)


def test_a_mask_without_means_has_the_file_of_before(tmp_path):
    ChannelMask(KEEP).save(tmp_path / "a.safetensors")
    ChannelMask(KEEP, mean_keys=MEANS).with_means(None).save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert ChannelMask.load(tmp_path / "a.safetensors").mean_keys is None


@pytest.mark.parametrize("means", [MEANS.double(), MEANS[:, :, :4].contiguous(), torch.full((2, 3, 8), torch.nan)])
def test_means_that_do_not_fit_are_refused(tmp_path, means):
    with pytest.raises(ValueError, match="mean_keys"):
        ChannelMask(KEEP, mean_keys=means)
    header = {"format": "leank-channel-mask-1", "metadata": "{}"}
    write_tensors(tmp_path / "m.safetensors", {"keep": KEEP, "mean_keys": means}, header)
    with pytest.raises(ValueError, match=r"m\.safetensors.*mean_keys"):
        ChannelMask.load(tmp_path / "m.safetensors")
