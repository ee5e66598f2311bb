"""Tests, in the folders of the packages that they test; `helpers` has what several of them use."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
