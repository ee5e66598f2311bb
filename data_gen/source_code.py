"""Source code in Python as text: of a folder of the user's, or of the standard library that comes with every Python."""

import sysconfig
from functools import lru_cache
from pathlib import Path

from leank.data_gen.haystack import SPLITS
from leank.data_gen.reading import digest, read_text

_APART = {"site-packages", "test", "tests", "idlelib", "pydoc_data", "__pycache__"}  # no library, or data
_TEST_SHARE = 10  # every tenth module, by a digest of its path, is kept for evaluation


@lru_cache(maxsize=4)
def modules(folder: str | None, split: str) -> tuple[str, ...]:
    """Return the texts of a folder's .py files, in the order of their paths.

    folder: default None: the standard library of the Python that runs, whose versions differ.
    split: "train", "test" (about every tenth file) or "all".
    Raises FileNotFoundError if there are none.
    """
    assert split in SPLITS
    root = Path(folder or sysconfig.get_path("stdlib"))
    found = [p.relative_to(root) for p in sorted(root.rglob("*.py")) if not _APART & {*p.relative_to(root).parts}]
    if split != "all":
        found = [p for p in found if (int(digest(p.as_posix()), 16) % _TEST_SHARE == 0) == (split == "test")]
    if not found:
        raise FileNotFoundError(f"{str(root)!r} has no .py files (split={split!r}); give a folder with more of them")
    return tuple(read_text(root / p) for p in found)


@lru_cache(maxsize=4)
def lines(folder: str | None, split: str) -> tuple[str, ...]:
    """Return the lines of `modules`, one module behind the other."""
    return tuple(line.rstrip() for text in modules(folder, split) for line in text.splitlines())
