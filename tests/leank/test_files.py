"""Files that appear whole: what a full disk says, and what a killed run leaves."""

import os
import re
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.files import name_of, remove_partial, write_bytes


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
