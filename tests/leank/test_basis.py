"""Bases of KV heads: what a file holds is what was written, and what is no basis is refused in one line."""

import pytest
import torch

from leank.basis import check_basis, coordinates, of_queries
from leank.mask import ChannelMask
from leank.tensor_files import read_tensors, write_tensors
from tests.helpers.layouts import layout_mask, random_bases
from tests.helpers.refusals import one_line

SHAPE = (2, 3, 16)
BASIS = random_bases(SHAPE, 2)


def test_a_file_returns_the_bases_and_card_and_copies_keep_them(tmp_path):
    mask = layout_mask(SHAPE, 1, BASIS)
    mask.save(tmp_path / "m.safetensors")
    read = ChannelMask.load(tmp_path / "m.safetensors")
    copies = read.with_means(torch.zeros(SHAPE)), read.with_metadata({"seed": 1}), read.for_any_model()
    assert all(torch.equal(one.key_basis, BASIS) for one in (read, *copies))
    for name, one in (("with", mask), ("without", layout_mask(SHAPE, 1))):
        one.save_pretrained(tmp_path / name)
        assert ("coordinates" in (tmp_path / name / "README.md").read_text()) == (name == "with")


def test_a_file_with_bases_is_refused_by_versions_that_know_none(tmp_path):
    formats = []
    for basis in (None, BASIS):
        layout_mask(SHAPE, 1, basis).save(tmp_path / "m")
        names = {"keep", "key_bits", "value_bits"} | (set() if basis is None else {"key_basis"})
        tensors, header = read_tensors(tmp_path / "m", names, "", ("format", "metadata"))
        formats.append(header["format"])
    assert formats == ["leank-channel-mask-2", "leank-channel-mask-3"]
    write_tensors(tmp_path / "m", tensors, {**header, "format": formats[0]})
    with pytest.raises(ValueError, match="key_basis do not belong together"):
        ChannelMask.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda b: b.double(), "float64"),
        (lambda b: b[0], r"\[3, 16, 16\]; give"),
        (lambda b: b[..., :8], "16, 8"),
        (lambda b: b.index_fill(2, torch.tensor([3]), float("nan")), "NaN"),
        (lambda b: b.index_fill(1, torch.tensor([2]), 0.0), "condition number of inf in layer 0, head 2, and 100 is"),
        (lambda b: b * torch.logspace(0, 3, 16), "condition number"),
    ],
)
def test_what_is_no_basis_is_refused_by_name(wrong, words, tmp_path):
    bad = wrong(BASIS).contiguous()
    with pytest.raises(ValueError, match=f"key_basis .*{words}") as refused:
        check_basis(bad)
    assert one_line(refused)
    mask = layout_mask(SHAPE, 1)
    tensors = {"keep": mask.keep, "key_bits": mask.precision.key_bits, "value_bits": mask.precision.value_bits}
    header = {"format": "leank-channel-mask-3", "metadata": "{}"}
    write_tensors(tmp_path / "m.safetensors", {**tensors, "key_basis": bad}, header)
    with pytest.raises(ValueError, match=rf"m\.safetensors.*key_basis .*{words}"):
        ChannelMask.load(tmp_path / "m.safetensors")


def test_a_basis_goes_with_bits_of_its_heads():
    mask = layout_mask(SHAPE, 1)
    with pytest.raises(ValueError, match="key_basis needs bits per channel"):
        ChannelMask(mask.keep, key_basis=BASIS)
    with pytest.raises(ValueError, match=r"\[2, 2, 16, 16\]; the mask needs \[2, 3, 16, 16\]"):
        ChannelMask(mask.keep, precision=mask.precision, key_basis=random_bases((2, 2, 16), 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_coordinates_keep_products_of_queries_and_keys(dtype):
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator).to(dtype) for heads in (6, 3))
    own = coordinates(q, of_queries(BASIS[0])), coordinates(k, BASIS[0])
    want, got = (a.unflatten(1, (3, 2)).float() @ b[:, :, None].mT.float() for a, b in ((q, k), own))
    error = 1e-5 if dtype != torch.bfloat16 else 0.2
    torch.testing.assert_close(got, want, rtol=error, atol=error)


def test_a_center_is_taken_off_before_numbers_are_rounded():
    k = torch.randn(1, 3, 5, 16, generator=torch.Generator().manual_seed(4)).bfloat16() + 300
    center = torch.full((3, 1, 16), 300.0)
    assert torch.equal(coordinates(k, BASIS[0], center), coordinates((k - 300).bfloat16(), BASIS[0]))
