"""What Hydra refuses is one line, and a run that is refused leaves no folder."""

import os
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from conf.launch import FULL, launch, leave_no_trace

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
        "eval: In 'eval': Could not find 'experiment/nope'; Available options in 'experiment': reference_gsm, "
        "reference_ruler; see --help"
    )
    assert FULL not in os.environ


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
