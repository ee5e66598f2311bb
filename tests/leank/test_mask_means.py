"""Means that stand for pruned channels, in a mask and in its file."""

import pytest
import torch

from leank.mask import ChannelMask, Means
from leank.tensor_files import write_tensors

KEEP = torch.rand(2, 3, 8) > 0.5
MEANS = Means(torch.randn(2, 3, 8), torch.randn(2, 3, 4))


def test_means_come_back_from_the_file(tmp_path):
    ChannelMask(KEEP, {"seed": 1}, MEANS).save(tmp_path / "m.safetensors")
    read = ChannelMask.load(tmp_path / "m.safetensors")
    assert torch.equal(read.keep, KEEP)
    assert torch.equal(read.means.keys, MEANS.keys)
    assert torch.equal(read.means.values, MEANS.values)


def test_a_mask_without_means_has_the_file_of_before(tmp_path):
    ChannelMask(KEEP).save(tmp_path / "a.safetensors")
    ChannelMask(KEEP, means=MEANS).with_means(None).save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert ChannelMask.load(tmp_path / "a.safetensors").means is None


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8)),
        (torch.randn(2, 3, 8), torch.randn(2, 2, 8)),
        (torch.full((2, 3, 8), torch.nan), torch.randn(2, 3, 8)),
        (torch.randn(2, 3, 4), torch.randn(2, 3, 8)),
        (torch.randn(2, 3), torch.randn(2, 3)),
    ],
)
def test_means_that_do_not_fit_are_refused(tmp_path, keys, values):
    with pytest.raises(ValueError, match="means"):
        ChannelMask(KEEP, means=Means(keys, values))
    plain = tmp_path / "plain.safetensors"
    ChannelMask(KEEP).save(plain)
    header = {"format": "leank-channel-mask-1", "metadata": "{}"}
    write_tensors(tmp_path / "m.safetensors", {"keep": KEEP, "mean_keys": keys, "mean_values": values}, header)
    with pytest.raises(ValueError, match=r"m\.safetensors|means"):
        ChannelMask.load(tmp_path / "m.safetensors")


def test_a_file_with_half_of_the_means_is_refused(tmp_path):
    header = {"format": "leank-channel-mask-1", "metadata": "{}"}
    write_tensors(tmp_path / "m.safetensors", {"keep": KEEP, "mean_keys": MEANS.keys}, header)
    with pytest.raises(ValueError, match="damaged"):
        ChannelMask.load(tmp_path / "m.safetensors")
