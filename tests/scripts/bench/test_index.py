"""The index of measurements has every program, and whatever names a program names one that is there."""

import re

import pytest

from tests import ROOT

BENCH = ROOT / "scripts/bench"
PROGRAMS = {file.stem for file in BENCH.rglob("*.py") if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}


def test_the_index_has_every_program():
    named = re.findall(r"`([a-z_]+)[ `]", (BENCH / "README.md").read_text(encoding="utf-8"))
    assert {*named} >= PROGRAMS


@pytest.mark.parametrize("room", ["docs", "eval", "leank_train", "conf", "scripts", "README.md"])
def test_programs_that_are_named_are_there(room):
    files = [ROOT / room] if room.endswith(".md") else (ROOT / room).rglob("*")
    wrong = {}
    for file in files:
        if file.suffix in (".py", ".yaml", ".md", ".ipynb"):
            text = file.read_text(encoding="utf-8").replace("scripts.bench.kernels.attention --variants", "")
            for name in re.findall(r"\bscripts\.bench\.([a-z_]+(?:\.[a-z_]+)?)", text):
                if not (BENCH / f"{name.replace('.', '/')}.py").is_file():
                    wrong[name] = str(file)
    assert not wrong
