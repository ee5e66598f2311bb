"""How figures look, and their files: PNG on white, and SVG that takes the colours of the page it stands in."""

import colorsys
import io
import re
from typing import Any, TypedDict

import matplotlib
import matplotlib.colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leank.stats import evenly

# readable on white and on near-black, and told apart by most colour-blind readers; dense is the text's own colour
PALETTE = ("#0083c9", "#e8710a", "#1a9e77", "#c2549f", "#a97c10", "#6b6fd6", "#d13b3b", "#5f8f2f")
MARKERS = "osD^vPX*"
INK = "#010203"  # stands for the text's colour; the SVG has it replaced
NAMES, ROOM, LINE = 3, 8, 0.2  # of a legend: names in a line, lines that a sheet has room for, inches of a line
SETTINGS: Any = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "font.size": 9, "axes.titlesize": 9, "font.family": "sans-serif", "legend.frameon": False,
    "text.parse_math": False,  # a "$" in a label is a letter
}  # fmt: skip


class Style(TypedDict):
    """How the points of a method are drawn."""

    color: str
    marker: str


def colours(number: int) -> list[str]:
    """As many different colours: the palette, or where it is too small, hues that lie apart, in turn dark and light."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    of = (colorsys.hls_to_rgb(evenly(i), 0.38 if i % 2 else 0.55, 0.6) for i in range(number))
    return [matplotlib.colors.to_hex(rgb) for rgb in of]


def sheet(height: float = 3.4, width: float = 7.2) -> Figure:
    """An empty figure, inches."""
    return Figure(figsize=(width, height), layout="constrained")


def legend(figure: Figure) -> None:
    """Name what is drawn above the axes. The sheet grows with the lines of names that it has no room for."""
    names = {name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]}
    lines = -(-len(names) // NAMES)
    if lines > ROOM:
        figure.set_figheight(figure.get_figheight() + (lines - ROOM) * LINE)
    figure.legend(loc="outside upper left", ncols=NAMES)


def plain(axes: Axes) -> Axes:
    """Axes without a box, on a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5, color=INK)
    axes.set_axisbelow(True)
    return axes


def png(figure: Figure) -> bytes:
    """The figure on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, salt: str) -> str:
    """The figure for a page: transparent, texts and axes in the page's text colour. salt: unique in the page."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', text)
    text = re.sub(r"(url\(|xlink:href=\")#", rf"\1#{salt}-", text)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1).replace("<svg ", '<svg role="img" ', 1)
