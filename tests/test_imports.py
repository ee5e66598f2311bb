"""Imports go one way, between packages, between the rooms of a package, and between files; nothing goes in a circle.

The rooms and their layers are read from docs/understand/architecture.md. Every import counts: those inside functions
and those for types alone, too.
"""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests import ROOT

PACKAGES = {
    "leank.data_gen": "data_gen", "leank": "leank", "leank.eval": "eval", "leank_train": "leank_train"
}  # the folder of each  # fmt: skip
FORBIDDEN = {
    "leank.data_gen": ("torch", "lightning", "leank.eval", "leank_train", "scripts", "tests"),
    "leank": ("leank.eval", "leank_train", "scripts", "tests"),
    "leank.eval": ("leank_train", "scripts", "tests"),
    "leank_train": ("scripts", "tests"),
}


def layers():
    """{package: its floors from the top one down, each a set of rooms}."""
    page = (ROOT / "docs/understand/architecture.md").read_text(encoding="utf-8").split("## Layers")[1]
    lines = re.findall(r"^    (leank\S*) +(.+(?:\n {8,}.+)*)$", page, re.MULTILINE)
    return {name.replace("/", "."): [set(re.findall(r"\w+", floor)) for floor in rooms.split("->")]
            for name, rooms in lines}  # fmt: skip


LAYERS = layers()


def modules():
    """Every module of the packages: name -> file. Links of `leank` lead to packages that have a line of their own."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(above.is_symlink() for above in file.parents):
                inside = file.relative_to(ROOT / folder).with_suffix("").parts
                found[".".join([package, *inside]).removesuffix(".__init__")] = file
    return found


MODULES = modules()
LINKED = {module for module in MODULES if module.startswith(("leank.eval", "leank.data_gen"))}


def is_module(name):
    return name in MODULES or ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file()


def package_of(module):
    """The package of a module; `leank` has only what lies in none of the others."""
    return max((p for p in PACKAGES if f"{module}.".startswith(f"{p}.")), key=len, default=None)


@functools.cache
def imported(file):
    """(module, line) of every import of a file; a name that is a module of its own counts as that."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: name the module in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole if is_module(whole) else node.module or "", node.lineno))
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_one_way(package):
    """`leank` itself hands on `compressed_cache` of `leank.eval`, when it is asked for."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for module, file in MODULES.items()
        if package_of(module) == package and module != "leank"
        for name, line in imported(file)
        if any(f"{name}.".startswith(f"{wrong}.") for wrong in FORBIDDEN[package])
    ]
    assert not wrong


def test_no_test_file_is_imported():
    """What several tests use lies in tests/helpers, or is a fixture of a conftest.py: there a reader looks for it."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for name, line in imported(file)
        if name.startswith("tests.") and name.split(".")[-1].startswith("test_")
    ]
    assert not wrong


def room(module, package):
    """The room of a package that a module lies in, or None."""
    inside = module.removeprefix(f"{package}.")
    return inside.split(".")[0] if inside != module and not (package == "leank" and module in LINKED) else None


@pytest.mark.parametrize("package", LAYERS)
def test_rooms_import_from_the_floors_below(package):
    floor = {name: number for number, names in enumerate(LAYERS[package]) for name in names}
    assert floor.keys() == {room(module, package) for module in MODULES} - {None}
    wrong = []
    for module, file in MODULES.items():
        if (here := room(module, package)) is None:
            continue
        for name, line in imported(file):
            there = room(name, package)
            if there in floor and there != here and floor[there] <= floor[here]:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {here} imports {there}")
    assert not wrong


def test_no_file_imports_itself_through_others():
    graph = {module: {name for name, _ in imported(file)} & MODULES.keys() for module, file in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")
