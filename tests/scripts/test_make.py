"""`make` installs what has changed, and names the files that are there; a script stands in for python and pip."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
echo "$(basename $0) $*" >> calls
case "$*" in
"-m venv "*) mkdir -p $3/bin; cp $0 $3/bin/python; cp $0 $3/bin/pip ;;
"-m leank_train "*) mkdir -p outputs/demo; [ -z "$VALIDATES" ] || touch outputs/demo/validation.md ;;
"-m leank.eval "*) mkdir -p outputs/demo/eval; touch outputs/demo/eval/summary.md ;;
esac
"""
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "stand_in").write_text(STAND_IN)
    (tmp_path / "stand_in").chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str, **environment: str) -> tuple[str, list[str]]:
    """What `make target` prints, and the arguments with which it has called pip."""
    (checkout / "calls").write_text("")
    # The tests may run under a `make test VENV=...` of their own, which exports what it was given.
    own = ("MAKE", "MFLAGS", "PYTHON", "VENV", "OUT", "VLLM_VENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    line = ["make", "PYTHON=./stand_in", target]
    printed = subprocess.run(
        line, cwd=checkout, env={**env, **environment}, check=True, capture_output=True, text=True
    ).stdout
    return printed, [call for call in (checkout / "calls").read_text().splitlines() if call.startswith("pip ")]


def test_only_other_contents_are_installed_again(checkout):
    assert len(make(checkout, "demo")[1]) == 2
    assert make(checkout, "demo")[1] == []
    assert len(make(checkout, "test")[1]) == 1  # what only tests need
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(checkout / name, (2**31, 2**31))
    assert make(checkout, "test")[1] == make(checkout, "demo")[1] == []
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# other\n")
    assert len(make(checkout, "test")[1]) == 3


def test_the_demo_finds_what_the_tests_have_installed(checkout):
    assert len(make(checkout, "test")[1]) == 3
    printed, called = make(checkout, "demo")
    assert called == []
    assert "Installing" not in printed


def test_an_installation_that_failed_is_tried_again(checkout):
    make(checkout, "demo")
    (checkout / ".venv/base").unlink()
    (checkout / ".venv/bin/pip").unlink()
    (checkout / "stand_in").write_text(STAND_IN.replace("echo", '[ "${0##*/}" != pip ] || exit 1; echo', 1))
    with pytest.raises(subprocess.CalledProcessError):
        make(checkout, "demo")
    (checkout / "stand_in").write_text(STAND_IN)
    assert len(make(checkout, "demo")[1]) == 2


def test_the_demo_names_the_validation_that_there_is(checkout):
    assert "validation.md" not in make(checkout, "demo")[0]
    assert "outputs/demo/validation.md" in make(checkout, "demo", VALIDATES="1")[0]
