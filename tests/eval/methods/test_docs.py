"""docs/methods.md: its tables name what there is."""

import re

from leank.conf.eval import method_options
from leank.eval.methods import REGISTRY, build_method
from tests import ROOT

DOCS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def test_every_method_is_in_a_table():
    rows = [line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)} - set(REGISTRY)  # a table of axes
    configured = {*method_options()} - {"dense"}
    mentioned = {name for name in configured if f"`{name}`" in DOCS}
    assert mentioned == configured
    choices = {name for names in REGISTRY.values() for name in names}
    assert choices <= named <= configured | choices


def test_the_setting_that_match_moves_is_bold():
    lines = {
        line.split("`")[1]: line.split("|")[3]
        for line in DOCS.splitlines()
        if line[:3] == "| `" and line.count("|") == 5
    }
    for axis, names in REGISTRY.items():
        for name in names:
            free = build_method("one", {axis: {"name": name}}, {"sink": 0, "window": 1}).axes[axis].free
            assert re.findall(r"\*\*(\w+)\*\*", lines[name]) == ([free] if free else []), name
