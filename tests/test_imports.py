"""Imports go one way: data_gen <- leank_train <- eval; nothing imports scripts or tests."""

import ast

import pytest

from tests import ROOT

FORBIDDEN = {
    "data_gen": {"torch", "lightning", "leank_train", "eval", "scripts", "tests", "conf"},
    "leank_train": {"eval", "scripts", "tests"},
    "eval": {"scripts", "tests"},
}


def imported(file):
    """Top-level packages that a file imports, anywhere in it; relative imports are its own package's."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0], node.lineno


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [f"{f.relative_to(ROOT)}:{n} imports {m}" for f in files for m, n in imported(f) if m in FORBIDDEN[package]]
    assert not wrong
