"""What is refused and what stops a command is one line, and a run that is refused leaves no folder."""

import errno
import logging
import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import ConfigCompositionException

from leank.cli import ending, leave_no_trace
from leank.errors import out_of_memory
from leank.launch import FULL, launch

SAID = """In 'eval': Could not find 'experiment/nope'

Available options in 'experiment':
\treference_gsm
\treference_ruler
Config search path:
\tprovider=hydra, path=pkg://hydra.conf
"""


def test_hydra_s_message_is_one_line(monkeypatch):
    monkeypatch.delenv(FULL, raising=False)

    def main():
        assert os.environ[FULL]
        raise ConfigCompositionException(SAID)

    with pytest.raises(SystemExit) as stopped:
        launch(main, "eval", "; see --help")
    assert stopped.value.code == (
        "eval: In 'eval': Could not find 'experiment/nope' Available options in 'experiment': reference_gsm "
        "reference_ruler; see --help"
    )
    assert FULL not in os.environ


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pruning.ration=0.5", "did you mean pruning.ratio? A setting that pruning does not show takes a leading +, +"),
        ("modl.name=x", "did you mean model.name? A setting that the configuration does not show takes a leading +, +"),
        ("ratio=0.5", "did you mean pruning.ratio? A"),
        ("stage1.zq=1", "a setting that stage1 does not show takes a leading +, +stage1.zq=1"),
        ("pruning.ratio.x=1", "a setting that pruning.ratio does not show takes a leading +, +pruning.ratio.x=1"),
        ("model.nme.x=1", "model has name, dtype, chat, overrides"),
    ],
)
def test_a_setting_that_is_not_there_is_named_with_what_to_write(monkeypatch, given, said):
    monkeypatch.delenv(FULL, raising=False)

    def main():
        with initialize_config_module("leank.conf.train", version_base="1.3"):
            compose("train", [given])

    with pytest.raises(SystemExit) as stopped:
        launch(main, "leank_train")
    key = given.partition("=")[0]
    assert stopped.value.code.startswith(f"leank_train: Could not override '{key}': {said}")


@pytest.mark.parametrize("given", ["method=quests", "method=[dense,quests]"])
def test_a_name_of_a_group_is_named_that_is_near(monkeypatch, given):
    monkeypatch.delenv(FULL, raising=False)

    def main():
        with initialize_config_module("leank.conf.eval", version_base="1.3"):
            compose("eval", [given])

    with pytest.raises(SystemExit) as stopped:
        launch(main, "eval")
    assert stopped.value.code.endswith(": did you mean quest")


def test_multirun_may_stand_between_settings(monkeypatch):
    """Where argparse refuses what follows it."""
    monkeypatch.setattr(sys, "argv", ["leank_train", "model=reference", "-m", "seed=1,2"])
    launch(lambda: None, "leank_train")
    assert sys.argv == ["leank_train", "-m", "model=reference", "seed=1,2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [1,2\n", r"while parsing a flow sequence in .*bad\.yaml\", line 1, column 4 expected"),
        (b"a: \xe9\n", r"'utf-8' codec can't decode byte"),
    ],
)
def test_a_configuration_file_that_cannot_be_read(tmp_path, monkeypatch, content, said):
    monkeypatch.delenv(FULL, raising=False)
    (tmp_path / "bad.yaml").write_bytes(content)

    def main():
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            compose("bad")

    with pytest.raises(SystemExit) as stopped:
        launch(main, "eval")
    assert re.search(said, stopped.value.code)
    assert "\n" not in stopped.value.code


@pytest.mark.parametrize("given", ["[[1]]", "[[a,b],[c]]", "[null]", "[{a:1}]"])
def test_a_group_that_is_given_no_names_is_one_line(tmp_path, monkeypatch, given):
    monkeypatch.delenv(FULL, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.yaml").write_text("x: 1")
    (tmp_path / "main.yaml").write_text("defaults:\n  - model: a\n")

    def main():
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            compose("main", [f"model={given}"])

    with pytest.raises(SystemExit, match="eval: a group, such as model=, takes the name of a file"):
        launch(main, "eval")
    with pytest.raises(TypeError, match="ours"):  # an error of our own is no user's
        launch(lambda: (_ for _ in ()).throw(TypeError("ours")), "eval")


def test_a_log_that_cannot_be_written_is_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)

    def main():
        full = logging.FileHandler("/dev/full")
        full.emit(logging.makeLogRecord({"msg": "2 new rows"}))
        full.stream = None  # closing would write what is left

    launch(main, "eval")
    assert capsys.readouterr().err == ""


def test_a_refused_run_leaves_no_folder_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused, used = tmp_path / "outputs/eval/a", tmp_path / "outputs/eval/b"
    for folder in (refused, used):
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra/config.yaml").write_text("x: 1")
        (folder / "eval.log").write_text("")
    (used / "results.jsonl").write_text("")
    for folder in (refused, used):
        leave_no_trace(folder)
    assert not refused.exists()
    assert len(list(used.iterdir())) == 3
    (used / "results.jsonl").unlink()
    monkeypatch.chdir(used)  # hydra.job.chdir=true
    leave_no_trace(used)
    assert Path.cwd() == used
    monkeypatch.chdir(tmp_path)
    leave_no_trace(used)
    assert not list(tmp_path.iterdir())


NO_ROOM = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def ended(capsys, error):
    """(exit status, what is printed) of a command that raises an error."""
    with pytest.raises(SystemExit) as stopped, ending("leank", lambda: "3 rows are kept; to go on: leank"):
        raise error
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return stopped.value.code, said.strip()


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "leank: stopped by Ctrl-C; 3 rows"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 1, "leank: /a/b: No space left on device; 3 rows"),
        (BlockingIOError("another run\nwrites here"), 1, "leank: another run writes here"),
        (MemoryError(), 1, "leank: out of memory; free some; 3 rows are kept"),
        (MemoryError("out of memory with one sample"), 1, "leank: out of memory with one sample; 3 rows"),
        (RuntimeError(NO_ROOM), 1, "leank: out of memory; free some"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 1, "leank: out of memory; free some"),
    ],
)
def test_one_line_says_what_stopped_a_command_and_what_is_kept(capsys, error, status, line):
    code, said = ended(capsys, error)
    assert code == status
    assert line in said


def test_input_that_is_refused_ends_a_command_with_the_reason():
    """The folder of a run is cleared up before, which is what `kept` does."""
    asked = []
    with pytest.raises(SystemExit, match=r"^leank: ratio=2: lower it$"), ending("leank", lambda: asked.append(1) or ""):
        raise ValueError("ratio=2:\nlower it")
    assert asked


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys):
    with pytest.raises(SystemExit) as stopped, ending("leank"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    assert capsys.readouterr().err.startswith(
        "leank: stopped by SIGTERM; nothing is saved yet; to go on: python -m leank"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a defect"), ending("leank"):
        raise RuntimeError("a defect")


def test_memory_of_the_cpu():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**36, hard))
    try:
        with pytest.raises(RuntimeError) as error:
            torch.empty(2**37, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert out_of_memory(error.value)
    assert not out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOTDIR, False), (errno.EACCES, False), (errno.ENOSPC, True)])
def test_only_after_an_error_that_passes_the_same_command_goes_on(capsys, number, goes_on):
    with pytest.raises(SystemExit), ending("leank_train"):
        raise OSError(number, os.strerror(number), "/proc/x")
    said = capsys.readouterr().err
    assert ("to go on: " in said) == goes_on
    assert ("name a file or a folder that can be written" in said) != goes_on


def test_a_reader_that_has_gone_is_an_error_only_where_something_is_kept(capsys):
    for kept, status, said in ((None, 141, ""), (lambda: "half is kept", 1, "train: Broken pipe; half is kept\n")):
        with pytest.raises(SystemExit) as stopped, ending("train", kept):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        assert (stopped.value.code, capsys.readouterr().err) == (status, said)
