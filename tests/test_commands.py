"""The commands that the pages show are read by the programs they name; none is carried out."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile

import pytest
from hydra import compose, initialize_config_module

from tests import ROOT
from tests.helpers.pages import PAGES

OF_PROGRAMS = ("leank.eval.papers", "leank.data_gen", "scripts.")
CONFIGS = {"leank_train": "train", "leank.eval": "eval"}
OPERATORS = {*"&;|()<"}
LEFT_OPEN = {"...", "[--fuse]", "$S"}  # a line with one of these is not a whole command
OTHER = {"report", "diff", "doctor", "share"}  # no settings
WRITTEN = re.compile(r"largest_key|value_norm|per_token|lockers|=cosine")  # what the reader writes; see test_extend.py


def lines(text: str) -> list[str]:
    """The lines of code on a page: those that are indented, with continuations joined, and what stands in backticks."""
    text = text.replace("\\\n", " ")
    return re.findall(r"^ {4,}(.+)$", text, re.MULTILINE) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def words(line: str) -> list[str]:
    """The words of a shell command, without its comment; operators such as & stand alone."""
    read = shlex.shlex(line, posix=True, punctuation_chars=True)
    read.whitespace_split = True
    try:
        return list(read)
    except ValueError:  # prose in backticks, with an apostrophe
        return []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each `python -m MODULE ...` of a page that gives it words, as the module and these words."""
    for line in lines(text):
        if "python -m " not in line:
            continue
        given = [word.replace("{,_mixed}", "") for word in words(line)]
        for place in [at for at, word in enumerate(given) if word == "-m" and given[at - 1] == "python"]:
            module, *rest = list(takewhile(lambda word: word[:1] not in OPERATORS, given[place + 1 :]))
            if rest and not (LEFT_OPEN | OTHER) & {*rest} and not any(map(WRITTEN.search, rest)):
                yield module, rest


SHOWN = {
    " ".join((module, *rest)): (module, rest)
    for page in PAGES if page.name != "CHANGELOG.md"
    for module, rest in commands(page.read_text(encoding="utf-8"))
}  # fmt: skip


def of(*programs: str) -> list[object]:
    """The commands of programs that begin so."""
    return [pytest.param(*given, id=shown) for shown, given in SHOWN.items() if given[0].startswith(programs)]


class Read(BaseException):
    """The arguments of a program were read, which is all that is asked."""


def test_there_are_commands():
    assert len(SHOWN) > 100


@pytest.mark.parametrize(("module", "given"), of(*OF_PROGRAMS))
def test_programs_read_their_arguments(module, given, monkeypatch):
    def only(parse):
        def read(self, args=None, namespace=None):
            parse(self, args, namespace)
            raise Read

        return read

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, only(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr("sys.argv", [module, *given])
    try:
        program = importlib.import_module(f"{module}.__main__")
    except ModuleNotFoundError:
        program = importlib.import_module(module)
    with pytest.raises(Read):
        program.main()


def member(word: str) -> str:
    """An override with the first of the values that a sweep gives it."""
    key, equals, value = word.partition("=")
    return f"{key}{equals}{value if value[:1] in '[{' else value.partition(',')[0]}"


@pytest.mark.parametrize(("module", "given"), [one for one in of(*CONFIGS) if one.values[0] in CONFIGS])
def test_settings_are_those_of_the_configuration(module, given):
    overrides = [member(word) for word in given if word != "-m"]
    with initialize_config_module(f"conf.{CONFIGS[module]}", version_base="1.3"):
        assert compose(CONFIGS[module], overrides)


BENCHMARKS = sorted(
    file.stem for file in ROOT.glob("scripts/bench/*.py") if "__main__" in file.read_text(encoding="utf-8")
)
HELPFUL = (
    "leank_train", "leank_train doctor", "leank_train share", "leank.eval", "leank.eval report", "leank.eval diff",
    "leank.eval.papers", "leank.eval.lm_eval", "leank.eval.serving.serve", "leank.eval.serving.plan",
    "leank.data_gen", "scripts.sweep", "scripts.wandb_workspace", "scripts.analyses",
    "scripts.reference_model.pretrain",
    *(f"scripts.bench.{name}" for name in BENCHMARKS),
)  # fmt: skip


@pytest.mark.parametrize("command", HELPFUL)
def test_help_imports_nothing_that_takes_seconds(command):
    """PyTorch alone takes 1.5 s of CPU time, transformers' models three more."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not re.search(r"\| +(torch|transformers|lightning)$", done.stderr, re.MULTILINE)
