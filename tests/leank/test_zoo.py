"""Layouts by name: `compressed_cache`, evaluations and servers take them wherever a mask's path is."""

import pytest

from leank import zoo
from leank.mask import ChannelMask, mask_file


@pytest.mark.parametrize("name", zoo.names())
def test_a_name_says_the_model_and_the_share(name):
    mask = ChannelMask.load(name)
    model, share = name.removesuffix("-packed").rsplit("-", 1)
    assert mask.precision is not None
    assert mask.precision.packed == name.endswith("-packed")
    assert mask.middle_bytes == pytest.approx(float(share.removesuffix("pct")) / 100, abs=0.002)
    assert mask.metadata["model"] in (zoo.LAYOUTS[model][0], "smollm2")
    assert not mask.doubts()


def test_names_are_ordered_by_size_and_listed(capsys):
    assert len(zoo.names()) >= 18
    for model in zoo.LAYOUTS:
        of_model = [ChannelMask.load(path) for name, path in zoo.names().items() if name.startswith(model)]
        shares = [round(mask.middle_bytes, 2) for mask in of_model]
        assert shares == sorted(shares)
    zoo.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in zoo.names())


def test_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zoo.names.cache_clear()
    try:
        assert zoo.names()
        assert all(path.is_file() for path in zoo.names().values())
    finally:
        zoo.names.cache_clear()


def test_a_file_stands_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = next(iter(zoo.names()))
    assert mask_file(name) == zoo.names()[name]
    ChannelMask.load(name).save(tmp_path / name)
    assert mask_file(name).resolve() == tmp_path / name


def test_a_name_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(FileNotFoundError, match="did you mean smollm2-135m-25pct; give a training run's folder"):
        mask_file("smollm2-135m-2pct")
    with pytest.raises(FileNotFoundError, match=r"mask=/nowhere/x.safetensors does not exist; give"):
        mask_file("/nowhere/x.safetensors")
