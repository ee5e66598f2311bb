"""Masks, scores and checkpoints that are damaged, cut off, or overwritten while they are in use."""

import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as serialise

from leank.mask import FORMAT, ChannelMask
from leank.tensor_files import DamagedFile, read_checkpoint, read_tensors, write_checkpoint, write_tensors
from tests import ROOT

CURE = "copy it again"
STATE = {"alpha": torch.linspace(0, 1, 8), "record": {"steps": [{"step": 1, "loss": 0.5}]}}
MASK = ChannelMask(torch.arange(16).view(1, 2, 8) % 3 == 0, {"model": "café/x", "ratio": 0.625})
OLD = {"format": FORMAT, "metadata": '{"model": "a"}'}  # the header of masks from before there was a digest


def flips(content, step=1):
    """The bytes with one bit turned over, every `step`-th bit in turn."""
    for bit in range(0, 8 * len(content), step):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def same(a, b):
    return torch.equal(a["alpha"], b["alpha"]) and a["record"] == b["record"]


def load_all(path, contents, load, equal):
    """How many of the contents are refused; every other one must be loaded as what was saved."""
    refused = 0
    for content in contents:
        path.write_bytes(content)
        said, found = None, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = load(path)
        except ValueError as error:
            said = str(error)
        refused += said is not None
        assert equal(found) if said is None else str(path) in said and "\n" not in said
    return refused


def is_mask(found):
    return torch.equal(found.keep, MASK.keep) and found.metadata == MASK.metadata


def test_every_bit_of_a_mask(tmp_path):
    MASK.save(path := tmp_path / "mask.safetensors")
    content = path.read_bytes()
    assert load_all(path, flips(content), ChannelMask.load, is_mask) > 0.95 * 8 * len(content)


def test_every_length_of_a_mask(tmp_path):
    MASK.save(path := tmp_path / "mask.safetensors")
    content = path.read_bytes()
    cut = [content[:n] for n in range(len(content))]
    assert load_all(path, cut, ChannelMask.load, is_mask) == len(content)


def test_every_bit_of_a_checkpoint(tmp_path):
    write_checkpoint(path := tmp_path / "last.ckpt", STATE)
    content = path.read_bytes()
    turned = list(flips(content, step=7))  # every byte; all bits were tried once, and take a minute
    assert load_all(path, turned, lambda p: read_checkpoint(p, CURE), None) == len(turned)
    path.write_bytes(content)
    assert same(read_checkpoint(path, CURE), STATE)
    assert same(torch.load(path, weights_only=True), STATE)  # as other programs read it


def test_every_length_of_a_checkpoint(tmp_path):
    write_checkpoint(path := tmp_path / "last.ckpt", STATE)
    content = path.read_bytes()
    cut = [content[:n] for n in (*range(0, len(content) - 200, 17), *range(len(content) - 200, len(content)))]
    assert load_all(path, cut, lambda p: read_checkpoint(p, CURE), None) == len(cut)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=8))
def test_eight_bytes_of_any_file(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("files")
    MASK.save(folder / "mask")
    write_checkpoint(folder / "checkpoint", STATE)
    write_tensors(folder / "scores", {"alpha": STATE["alpha"]})
    loads = {
        "mask": (ChannelMask.load, is_mask),
        "checkpoint": (lambda p: read_checkpoint(p, CURE), lambda found: same(found, STATE)),
        "scores": (
            lambda p: read_tensors(p, {"alpha"}, CURE)[0], lambda found: torch.equal(found["alpha"], STATE["alpha"])
        ),
    }  # fmt: skip
    for name, (load, equal) in loads.items():
        content = bytearray((folder / name).read_bytes())
        for place, bits in changes:
            content[place % len(content)] ^= bits
        load_all(folder / name, [bytes(content)], load, equal)


def test_a_checkpoint_from_before_is_checked_by_its_crc(tmp_path):
    torch.save(STATE, path := tmp_path / "last.ckpt")
    content = path.read_bytes()
    with pytest.warns(UserWarning, match=r"last\.ckpt has no sha256") as said:
        assert same(read_checkpoint(path, CURE), STATE)
    assert len(said) == 1
    load_all(path, flips(content, step=29), lambda p: read_checkpoint(p, CURE), lambda found: same(found, STATE))
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedFile, match=r"last\.ckpt is damaged or cut off: .*; copy it again$"):
        read_checkpoint(path, CURE)


def test_a_mask_from_before_loads_with_one_note(tmp_path):
    path = tmp_path / "mask.safetensors"
    path.write_bytes(serialise({"keep": MASK.keep}, metadata=OLD))
    with pytest.warns(UserWarning, match=r"mask\.safetensors has no sha256") as said:
        mask = ChannelMask.load(path)
    assert len(said) == 1
    assert torch.equal(mask.keep, MASK.keep)
    assert mask.metadata == {"model": "a"}
    mask.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ChannelMask.load(path).metadata == mask.metadata


@pytest.mark.parametrize(
    ("tensors", "header", "reason"),
    [
        ({"keep": MASK.keep}, {**OLD, "sha256": "0" * 64}, "sha256 is another than that of its contents"),
        ({"keep": MASK.keep}, {**OLD, "sha257": "0" * 64}, "header is not what was written"),
        ({"keep": MASK.keep}, {**OLD, "metadata": "[1]"}, "header is not what was written"),
        ({"keep": MASK.keep}, {**OLD, "metadata": "[" * 10**5}, "header is not what was written"),
        ({"keep": MASK.keep}, {"format": FORMAT}, "header is not what was written"),
        ({"keep": MASK.keep.byte()}, OLD, r"mask=.* holds torch\.uint8 .*, and a mask is bool"),
        ({"keep": torch.full((1, 2, 8), 2, dtype=torch.uint8).view(torch.bool)}, OLD, "neither 0 nor 1"),
        ({"keep": MASK.keep, "more": MASK.keep.clone()}, OLD, "it holds keep, more, not keep"),
        ({"alpha": STATE["alpha"]}, OLD, "it holds alpha, not keep"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no sha256")
def test_files_that_no_mask_was_saved_to(tmp_path, tensors, header, reason):
    path = tmp_path / "mask.safetensors"
    path.write_bytes(serialise(tensors, metadata=header))
    with pytest.raises(ValueError, match=reason):
        ChannelMask.load(path)


def test_a_damaged_mask_is_named_in_one_line(tmp_path):
    MASK.save(path := tmp_path / "mask.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=rf"^mask={re.escape(str(path))} is damaged or cut off: .*; copy it again, train"
    ):
        ChannelMask.load(path)


def test_a_published_mask_that_is_damaged(tmp_path):
    torch.save(MASK.keep.float(), path := tmp_path / "mask.pth")
    content = path.read_bytes()
    equal = lambda found: torch.equal(found.keep, MASK.keep)  # noqa: E731
    assert load_all(path, flips(content, step=29), ChannelMask.from_official, equal)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"mask\.pth is damaged.*no whole zip archive"):
        ChannelMask.from_official(path)


@pytest.mark.parametrize("load", [ChannelMask.load, ChannelMask.from_official])
def test_a_loaded_mask_does_not_change_with_its_file(tmp_path, load):
    path = tmp_path / "mask"
    MASK.save(path) if load == ChannelMask.load else torch.save(MASK.keep.float(), path)
    mask = load(path)
    with path.open("r+b") as file:  # in place: the same inode
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(mask.keep, MASK.keep)


def test_a_mask_does_not_change_with_the_tensor_that_it_was_made_of():
    mask = ChannelMask(keep := MASK.keep.clone())
    keep.logical_not_()
    assert torch.equal(mask.keep, MASK.keep)


def test_scores_have_a_digest_and_the_same_bytes(tmp_path):
    tensors = {"stage1": torch.rand(2, 3), "alpha": torch.rand(2, 3), "half": torch.rand(4).bfloat16()}
    for name in "ab":
        write_tensors(tmp_path / name, tensors, {"note": "é"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found, metadata = read_tensors(tmp_path / "a", set(tensors), CURE, {"note"})
    assert metadata == {"note": "é"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(torch.equal(values, tensors[name]) for name, values in load_file(tmp_path / "a").items())
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes()[:-4] + b"abcd")
    with pytest.raises(DamagedFile, match="sha256"):
        read_tensors(tmp_path / "c", set(tensors), CURE, {"note"})


def test_the_masks_in_the_repository_have_a_digest():
    assets = ROOT / "leank_train/assets"
    found = [*assets.glob("*/mask_*"), *assets.glob("masks/**/*.safetensors")]
    assert len(found) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*it prunes", UserWarning)  # blocks of 32 channels miss the ratio
        for path in found:
            ChannelMask.load(path)
