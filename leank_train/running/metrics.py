"""The types of metrics.json, the results of a training run."""

from typing import TypedDict


class SampleCounts(TypedDict):
    """Which samples validation has scored."""

    per_task_and_length: int
    lengths: list[int]


class Validation(TypedDict):
    """Scores of validation, %.

    recall, exact_match: method -> task, or "average" -> score.
    leank_minus: method -> the points by which the learned mask is above it (mean), and its interval (low, high).
    """

    recall: dict[str, dict[str, float]]
    exact_match: dict[str, dict[str, float]]
    leank_minus: dict[str, dict[str, float]]
    samples: SampleCounts


class Metrics(TypedDict, total=False):
    """The results of a training run; a run without validation has no "validation".

    pruning_ratio: share of K channels that the mask prunes.
    empty_heads, heads: KV heads without kept channels, and all KV heads.
    separation: how far stage 1 has driven the scores apart (`Separation.metrics`).
    distillation: stage -> distillation loss of its last step.
    heldout: stage with early stopping -> "step" and "loss" of its best look, and the step at which it "ended".
    verdict: KL to dense of the mask and of those that it has to beat, and doubts (`leank_train.verdict`).
    seconds: phase -> seconds.
    config: fingerprint of the settings.
    """

    pruning_ratio: float
    empty_heads: int
    heads: int
    alpha_mean: float
    separation: dict[str, float]
    distillation: dict[str, float]
    heldout: dict[str, dict[str, float]]
    verdict: dict[str, object]
    seconds: dict[str, float]
    config: str
    validation: Validation
