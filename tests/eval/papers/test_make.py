"""Commands of items: each runs once, what it leaves is read and judged, and one that fails stops no other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from leank.eval.papers import make
from leank.eval.papers.item import Item
from leank.eval.papers.make import Runner
from leank.eval.papers.page import page

STUDY = {"run": "scripts.analyses ranks OUT length=1024 model=reference", "quick": "length=512"}
CHECK = {"mean": "what is high", "of": "measure == 'high'", "above": 1}
ITEMS = [
    Item(id="think:fig1", shows="first", claim="It is high.", here=[STUDY], checks=[CHECK]),
    Item(id="think:fig2", shows="second", claim="It is high.", here=["leank.eval no_such=1", STUDY], checks=[CHECK]),
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
        first, second = Runner(tmp_path, quick=True).make(ITEMS)
    ((program, name, folder, *given),) = typed_commands
    assert (program, name, given) == ("scripts.analyses", "ranks", ["length=1024", "model=reference", "length=512"])
    assert not first.failed
    assert "no_such" in second.failed[0]
    assert [one.verdict for one in [*first.judgements, *second.judgements]] == ["shows", "shows"]
    text = page([first, second], tmp_path, quick=True)
    assert text.count("| think:fig1") == 1
    assert "Failed: no_such" in text
    assert "(analyses/ranks-" in text
    Runner(tmp_path).make(ITEMS[:1])  # other settings have a folder of their own
    assert {*(tmp_path / "analyses").iterdir()} == {Path(folder), Path(typed_commands[1][2])}


def test_an_analysis_that_fails_says_its_last_line(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stderr="a warning\nscripts.analyses: length=9 is too short\n")
    monkeypatch.setattr(make.subprocess, "run", lambda command, **_: failed)
    (made,) = Runner(tmp_path).make(ITEMS[:1])
    assert made.failed == ["scripts.analyses: length=9 is too short"]
