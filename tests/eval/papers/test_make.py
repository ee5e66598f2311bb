"""Commands of items: each runs once, what it leaves is read and judged, and one that fails stops no other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from leank.eval.papers import make
from leank.eval.papers.item import Analysed, EvalRun, Expect, Item
from leank.eval.papers.make import Options, Runner
from leank.eval.papers.page import page

STUDY = Analysed("ranks", {"length": 1024}, quick={"length": 512}, overrides=("model=reference",))
CLAIM = Expect("what is high", lambda row: row["measure"] == "high", bound=1.0)
ITEMS = [
    Item("think:fig1", "first", "It is high.", here=(STUDY,), claims=(CLAIM,)),
    Item("think:fig2", "second", "It is high.", here=(EvalRun(("no_such=1",)), STUDY), claims=(CLAIM,)),
]


@pytest.fixture
def typed_commands(monkeypatch):
    """Record the commands, and leave twenty rows of 2 and one without a value in their folder."""
    typed = []

    def run(command, **_):
        typed.append(command[2:])
        folder = Path(command[4])
        folder.mkdir(parents=True)
        (folder / "rows.csv").write_text("measure,value\n" + "high,2.0\n" * 20 + "high,\n")
        (folder / "figure.png").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(make.subprocess, "run", run)
    return typed


def test_commands_run_once_and_a_failing_one_stops_no_other(typed_commands, tmp_path):
    for _ in range(2):  # the second run makes nothing again
        first, second = Runner(tmp_path, Options(quick=True)).make(ITEMS)
    assert [(line[0], line[1], *line[3:]) for line in typed_commands] == [
        ("scripts.analyses", "ranks", "length=512", "model=reference")
    ]
    assert not first.failed
    assert "no_such" in second.failed[0]
    assert [one.verdict for one in first.judgements + second.judgements] == ["shows", "shows"]
    text = page([first, second], tmp_path, quick=True)
    assert text.count("| think:fig1") == 1
    assert "Failed: no_such" in text
    assert "(analyses/ranks-" in text
    assert list((tmp_path / "analyses").glob("ranks-*/rows.csv"))


def test_other_settings_have_a_folder_of_their_own(typed_commands, tmp_path):
    Runner(tmp_path, Options(quick=True)).make(ITEMS[:1])
    Runner(tmp_path, Options()).make(ITEMS[:1])
    assert len(list((tmp_path / "analyses").iterdir())) == len(typed_commands) == 2


def test_an_analysis_that_fails_says_its_last_line(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stderr="a warning\nscripts.analyses: length=9 is too short\n")
    monkeypatch.setattr(make.subprocess, "run", lambda command, **_: failed)
    (made,) = Runner(tmp_path, Options()).make(ITEMS[:1])
    assert made.failed == ["scripts.analyses: length=9 is too short"]
