"""The index of measurements has every command, and whatever names a command names one that is there."""

import re

import pytest

from tests import ROOT

BENCH = ROOT / "scripts/bench"
COMMANDS = {
    ".".join(file.relative_to(BENCH).with_suffix("").parts)
    for file in BENCH.rglob("*.py")
    if '__name__ == "__main__"' in file.read_text(encoding="utf-8")
}


def named(text):
    """The commands in backticks; one that begins with a dot lies in the folder of the one before it."""
    found, folder = set(), ""
    for name in re.findall(r"`([a-z_]*\.[a-z_]+)`", text):
        folder = name.split(".")[0] or folder
        found.add(f"{folder}.{name.split('.')[1]}")
    return found


def test_the_index_has_every_command():
    table = "".join(re.findall(r"^\|.*\n", (BENCH / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named(table) == COMMANDS - {"pictures"}


def test_a_folder_imports_itself_and_what_all_share():
    wrong = []
    for file in BENCH.glob("*/*.py"):
        rooms = re.findall(r"^\s*(?:from|import) scripts\.bench\.(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        wrong += [f"{file}: {room}" for room in rooms if room not in (file.parent.name, "common")]
    assert not wrong


@pytest.mark.parametrize("room", ["docs", "eval", "leank_train", "conf", "scripts", "README.md", "CHANGELOG.md"])
def test_commands_that_are_named_are_there(room):
    files = [ROOT / room] if room.endswith(".md") else (ROOT / room).rglob("*")
    wrong = {}
    for file in files:
        if file.suffix in (".py", ".yaml", ".md", ".ipynb"):
            for name in re.findall(r"\bscripts\.bench\.([a-z_]+(?:\.[a-z_]+)?)", file.read_text(encoding="utf-8")):
                if not (BENCH / f"{name.replace('.', '/')}.py").is_file():
                    wrong[name] = str(file)
    assert not wrong
