"""Files written whole or not at all, and tensor files read whole or refused by name."""

import os
import re
import resource
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as serialise

from leank.files import name_of, remove_partial, write_bytes
from leank.mask import FORMAT, ChannelMask
from leank.tensor_files import DamagedFile, read_checkpoint, read_tensors, write_checkpoint, write_tensors
from tests import ROOT


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "😀" * 63])
def test_a_name_of_any_length_that_a_file_may_have_can_be_written(tmp_path, name):
    write_bytes(tmp_path / name, b"whole")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(name, b"whole")]


@settings(max_examples=50)
@given(st.text(), st.text())
def test_texts_become_names_that_no_file_system_refuses_and_that_differ(one, other):
    names = {text: name_of(text) for text in (one, other)}
    for name in names.values():
        assert re.fullmatch(r"[\w.-]{0,109}", name, re.ASCII)
        assert "/" not in name
    assert (names[one] == names[other]) == (one == other)
    assert name_of("snapkv_think_512_0.4") == "snapkv_think_512_0.4"


def test_others_may_read_what_is_written(tmp_path):
    before = os.umask(0o077)
    try:
        write_bytes(tmp_path / "summary.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "summary.json").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path):
    file = tmp_path / "mask.safetensors"
    write_bytes(file, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_bytes(file, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(file)
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [file.name]


def test_leftovers_of_killed_runs_go_and_nothing_else(tmp_path):
    kept = {".hydra/config.yaml", "last.ckpt", ".gitkeep", ".hidden.yaml", "checkpoints/stage1/done.ckpt"}
    for name in kept | {"checkpoints/stage1/.last.ckpt.x7_k2abc", ".results.png.abcd1234"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_partial(tmp_path, age=60)
    assert (tmp_path / ".results.png.abcd1234").exists()
    remove_partial(tmp_path)
    assert {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()} == kept


def test_a_folder_is_named(tmp_path):
    with pytest.raises(IsADirectoryError) as error:
        write_bytes(tmp_path, b"")
    assert error.value.filename == str(tmp_path)


CURE = "copy it again"
STATE = {"alpha": torch.linspace(0, 1, 8), "record": {"steps": [{"step": 1, "loss": 0.5}]}}
MASK = ChannelMask(torch.arange(16).view(1, 2, 8) % 3 == 0, {"model": "café/x", "ratio": 0.625})
HEADER = {"format": FORMAT, "metadata": '{"model": "a"}'}


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


def test_every_bit_and_length_of_a_mask(tmp_path):
    MASK.save(path := tmp_path / "mask.safetensors")
    content = path.read_bytes()
    assert load_all(path, flips(content), ChannelMask.load, is_mask) > 0.95 * 8 * len(content)
    cut = [content[:n] for n in range(len(content))]
    assert load_all(path, cut, ChannelMask.load, is_mask) == len(content)
    path.write_bytes(content[:-1])
    cure = rf"^mask={re.escape(str(path))} is damaged or cut off: .*; copy it again, or train"
    with pytest.raises(ValueError, match=cure):
        ChannelMask.load(path)


def test_every_bit_and_length_of_a_checkpoint(tmp_path):
    """A bit of what a zip archive says beside its records may be turned without harm."""
    write_checkpoint(path := tmp_path / "last.ckpt", STATE)
    content = path.read_bytes()
    load = lambda p: read_checkpoint(p, CURE)  # noqa: E731
    turned = list(flips(content, step=7))  # every byte; all bits were tried once, and take a minute
    assert load_all(path, turned, load, lambda found: same(found, STATE)) > 0.5 * len(turned)
    cut = [content[:n] for n in (*range(0, len(content) - 200, 17), *range(len(content) - 200, len(content) - 2))]
    assert load_all(path, cut, load, None) == len(cut)


@pytest.mark.parametrize(
    ("tensors", "header", "reason"),
    [
        ({"keep": MASK.keep}, {**HEADER, "sha256": "0" * 64}, "sha256 is another than that of its contents"),
        ({"keep": MASK.keep}, {**HEADER, "sha257": "0" * 64}, "header is not what was written"),
        ({"keep": MASK.keep}, {**HEADER, "metadata": "[1]"}, "header is not what was written"),
        ({"keep": MASK.keep}, {**HEADER, "metadata": "[" * 10**5}, "header is not what was written"),
        ({"keep": MASK.keep}, {"format": FORMAT}, "header is not what was written"),
        ({"keep": MASK.keep.byte()}, HEADER, r"mask=.*: keep is torch\.uint8 .*; give a bool"),
        ({"keep": MASK.keep[0].clone()}, HEADER, r"mask=.*: keep is torch\.bool \[2, 8\]; give a bool"),
        ({"keep": MASK.keep, "more": MASK.keep.clone()}, HEADER, "it holds keep, more, not keep"),
        ({"alpha": STATE["alpha"]}, HEADER, "it holds alpha, not keep"),
    ],
)
def test_files_that_no_mask_was_saved_to(tmp_path, tensors, header, reason):
    path = tmp_path / "mask.safetensors"
    path.write_bytes(serialise(tensors, metadata=header))
    with pytest.raises(ValueError, match=reason):
        ChannelMask.load(path)


def test_a_header_whose_metadata_is_null(tmp_path):
    content = serialise({"keep": MASK.keep})
    header = b'{"__metadata__":null,' + content[9 : 8 + int.from_bytes(content[:8], "little")]
    path = tmp_path / "mask.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[-MASK.keep.numel() :])
    with pytest.raises(ValueError, match="header is not what was written"):
        ChannelMask.load(path)


def test_a_published_mask_that_is_damaged(tmp_path):
    torch.save(MASK.keep.float(), path := tmp_path / "mask.pth")
    content = path.read_bytes()
    equal = lambda found: torch.equal(found.keep, MASK.keep)  # noqa: E731
    assert load_all(path, flips(content, step=29), ChannelMask.from_official, equal)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"mask\.pth is damaged.*no whole archive"):
        ChannelMask.from_official(path)


@pytest.mark.parametrize("load", [ChannelMask.load, ChannelMask.from_official])
def test_a_loaded_mask_does_not_change_with_its_file(tmp_path, load):
    path = tmp_path / "mask"
    MASK.save(path) if load == ChannelMask.load else torch.save(MASK.keep.float(), path)
    mask, again = load(path), ChannelMask(keep := MASK.keep.clone())
    keep.logical_not_()  # nor one with the tensor that it was made of
    assert torch.equal(again.keep, MASK.keep)
    with path.open("r+b") as file:  # in place: the same inode
        file.write(b"\xff" * path.stat().st_size)
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
    assets = ROOT / "models"
    found = [*assets.glob("*/mask_*"), *assets.glob("masks/**/*.safetensors")]
    assert len(found) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*it prunes", UserWarning)  # blocks of 32 channels miss the ratio
        for path in found:
            ChannelMask.load(path)


@pytest.mark.parametrize("kind", ["bits", "closed_form"])
@pytest.mark.parametrize("seed", [41, 42, 43])
def test_layouts_in_the_repository_are_nested_and_within_their_budgets(kind, seed):
    folder = ROOT / "models/masks/smollm2" / kind
    masks = {path.name: ChannelMask.load(path) for path in sorted(folder.glob(f"*_seed{seed}.safetensors"))}
    assert [*masks] == [f"{budget}pct_seed{seed}.safetensors" for budget in (10, 15, 20, 25, 31)]
    for name, mask in masks.items():
        budget = int(name[:2]) / 100
        assert (mask.metadata["seed"], mask.metadata["bytes"]) == (seed, budget)
        assert budget - 0.003 < mask.middle_bytes <= budget
    for small, large in pairwise(masks.values()):
        assert (small.precision.key_bits <= large.precision.key_bits).all()
