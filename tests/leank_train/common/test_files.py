"""Files that appear whole: what a full disk says, and what a killed run leaves."""

import os
import resource

import pytest

from leank_train.common.files import remove_partial, write_bytes


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
