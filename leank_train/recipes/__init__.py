"""Recipes: what a run learns, and how. Each is a file, which has its settings, what it refuses, its steps and results.

paper     scores of K's channels in two stages, as the paper has it
factors   masks from the closed form, and by how much it is wrong
layouts   bits for every channel of K and every head's V
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from leank.typed import group, shown, typed
from leank_train.recipes.factors import Factors
from leank_train.recipes.layouts import Layouts
from leank_train.recipes.paper import Paper
from leank_train.recipes.recipe import Recipe
from leank_train.settings import check_outside, need, plain


def check(given: DictConfig | Mapping[str, object]) -> Recipe:
    """Return the recipe of a configuration with its settings, after all checks that need no weights.

    Raises BadConfig for a setting that cannot work, ValueError for an unknown task or a ratio that no mask can have,
    FileNotFoundError if the model or files that settings name are missing.
    """
    resolved = plain(given)
    if resolved.get("logger") is None:
        resolved["logger"] = {}
    kind = chosen(resolved)
    config = typed(kind, own(kind, resolved))
    check_outside(config)
    return config


def chosen(resolved: Mapping[str, object]) -> type[Recipe]:
    """Return the recipe that a configuration asks for; without a step, scores are those of the closed form."""
    pruning = group(resolved.get("pruning"), "pruning")
    learns = pruning.get("learns", "scores")
    need(learns in ("scores", "factors"), f"pruning.learns={shown(learns)} must be 'scores' or 'factors'")
    stages = [group(resolved.get(name), name) for name in ("stage1", "stage2")]
    if pruning.get("bytes") is not None:
        return Layouts
    return Factors if learns == "factors" or not any(stage.get("steps") for stage in stages) else Paper


def own(kind: type[Recipe], resolved: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration without the settings of other recipes; raise BadConfig for one that is wanted."""
    found: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in resolved.items()}
    for key, only in kind.elsewhere.items():  # a stage without steps may have any
        name, _, setting = key.rpartition(".")
        values = found[name] if name else found
        value, idle = values.pop(setting, only), name == "stage1" and not values.get("steps")
        need(only is ... or value == only or idle, f"{key}={shown(value)} has no effect {kind.where}; set {key}={only}")
    return found
