"""The analyses behind the papers' figures: functions of a source that return a table, and what to draw of it.

from scripts.analyses import ANALYSES, draw
from scripts.analyses.leank import kept_by_pair
from scripts.analyses.source import Source

table = kept_by_pair(Source.load(mask="mask.safetensors"))
draw(table, ANALYSES["kept_by_pair"].panels).savefig("kept_by_pair.png")
"""

from scripts.analyses import asl, iap, leank, lethe, think
from scripts.analyses.table import ANALYSES, Analysis, draw

__all__ = ["ANALYSES", "Analysis", "asl", "draw", "iap", "leank", "lethe", "think"]
