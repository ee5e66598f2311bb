"""Figures become files only where a test looks at them: layout and fonts take half of the time of a small run.

Elsewhere a file of the right kind is written that shows nothing; what puts the figure together runs everywhere.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

DRAW = Figure.savefig


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("L", (1, 1)).save(out, "PNG")
    return out.getvalue()


PNG, SVG = _png(), '<svg height="1"></svg>'


def _blank(self: Figure, out: Path | io.IOBase, format: str | None = None, **given: object) -> None:
    if isinstance(out, Path):
        out.write_bytes(SVG.encode() if out.suffix == ".svg" else PNG)
    else:
        out.write(SVG if format == "svg" else PNG)


def draw_none() -> None:
    """Change matplotlib in this process until `drawn`."""
    Figure.savefig = _blank


@contextmanager
def drawn() -> Iterator[None]:
    """What is done here draws its figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", DRAW)
        yield
