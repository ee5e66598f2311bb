"""The analyses behind the papers' figures: `analysis(name)` is a frozen dataclass of settings that measures and plots.

from scripts.analyses import analysis
from scripts.analyses.source import Source

kept = analysis("kept_by_pair")()
rows = kept.measure(Source.load(mask="mask.safetensors"))
kept.plot(rows).savefig("kept_by_pair.png")
"""

from __future__ import annotations

from importlib import import_module

from scripts.analyses.analysis import Analysis

# name -> class, in the module of that name; imported when first used
ANALYSES = {
    "empty_heads": "EmptyHeads",
    "group_removal": "GroupRemoval",
    "head_similarity": "HeadSimilarity",
    "interaction": "Interaction",
    "kept_by_pair": "KeptByPair",
    "layer_error": "LayerError",
    "magnitudes": "Magnitudes",
    "query_spread": "QuerySpread",
    "ranks": "Ranks",
    "relative_variance": "RelativeVariance",
    "retained_tokens": "RetainedTokens",
    "selection_layers": "SelectionLayers",
    "singular_energy": "SingularEnergy",
    "sparsity": "Sparsity",
    "staticity": "Staticity",
    "w_hf": "HighFrequencyRatio",
}

__all__ = ["ANALYSES", "Analysis", "analysis"]


def analysis(name: str) -> type[Analysis]:
    """Return the analysis of this name. Raises ValueError with the known names if there is none."""
    if name not in ANALYSES:
        raise ValueError(f"analysis={name!r} is unknown; choose one of {', '.join(ANALYSES)}")
    return getattr(import_module(f"scripts.analyses.{name}"), ANALYSES[name])
