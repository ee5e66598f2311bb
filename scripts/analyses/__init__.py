"""The analyses behind the papers' figures: functions of a source that return a table, and what to draw of it.

from scripts.analyses import analysis_of
from scripts.analyses.source import Source
from scripts.analyses.table import draw

measure, panels = analysis_of("kept_by_pair")
draw(measure(Source.load(mask="mask.safetensors")), panels).savefig("kept_by_pair.png")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.analyses.table import Analysis

OF_PAPER = {
    "asl": ("ranks", "relative_variance", "selection_layers"),
    "iap": ("interaction", "layer_error", "query_spread"),
    "leank": ("empty_heads", "group_removal", "kept_by_pair", "staticity", "w_hf"),
    "lethe": ("head_similarity", "retained_tokens", "sparsity"),
    "think": ("magnitudes", "singular_energy"),
}
"""Module of a paper's analyses -> their names; a module takes seconds to import."""
NAMES = {name: paper for paper, names in OF_PAPER.items() for name in names}


def analysis_of(name: str) -> Analysis:
    """Return an analysis by its name, one of `NAMES`."""
    import_module(f"scripts.analyses.{NAMES[name]}")
    return import_module("scripts.analyses.table").ANALYSES[name]
