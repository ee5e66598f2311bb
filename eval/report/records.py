"""What summary.json holds, as types. Scores are 0-100; `interval` is a 95% bootstrap interval (low, high)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

Interval = tuple[float, float]
Mark = Literal["not_compressed", "dense_only", "non_finite", "not_selected"]


class Difference(TypedDict):
    """Mean difference of two methods in points, paired by sample. n: samples that both have."""

    n: int
    difference: float
    interval: Interval


class AgainstDense(Difference):
    """One method minus dense.

    same_reply: share of the samples whose replies are equal.
    bytes: the method's cache bytes as a share of dense.
    """

    same_reply: float
    bytes: float


class MethodDifference(Difference):
    """`method`, which has a learned mask, minus the method `minus`."""

    method: str
    minus: str


class Seconds(TypedDict):
    """Mean seconds; None where no row has them."""

    prefill: float | None
    seal: float | None
    first_token: float | None
    per_token: float | None


class Figures(TypedDict):
    """What is said of one method over some samples.

    n: samples.
    score: mean over tasks and lengths, which count alike.
    cache_bytes, allocated_bytes: mean bytes after the prompt, from the tensors and from the GPU's allocator.
    not_compressed, dense_only, non_finite, not_selected: samples whose score says little about the method, see
      eval.report.tables.
    prompt_tokens: mean.
    against_dense: missing for dense and where dense has none of the samples.
    """

    n: int
    score: float
    interval: Interval
    cache_bytes: float | None
    allocated_bytes: float | None
    not_compressed: int
    dense_only: int
    non_finite: int
    not_selected: int
    prompt_tokens: float | None
    seconds: Seconds
    against_dense: NotRequired[AgainstDense]


class MethodFigures(Figures):
    """Figures of one method."""

    method: str


class LengthFigures(MethodFigures):
    """Figures of one method at one length; None where a benchmark has no lengths."""

    length: int | None


class CellFigures(LengthFigures):
    """Figures of one method at one length, in one task."""

    task: str


class OpScores(TypedDict):
    """GSM-Infinite: mean score (0-1) by method and op, for the subset and length in `name`."""

    name: str
    methods: dict[str, dict[str, float]]


class DepthMap(TypedDict):
    """Needle in a haystack: mean score of one method by depth (lines) and length (columns)."""

    method: str
    task: str
    depths: list[float]
    lengths: list[int]
    scores: list[list[float | None]]


class RunSummary(TypedDict):
    """The rows of one model, benchmark and `compress` that differ in the method alone.

    settings: what all rows share, and in "data" the digest of each task's files.
    versions: the different versions that made the rows, as JSON texts.
    dense: label of the method that differences are taken from; None if no row is of it.
    methods: configuration of each method.
    lengths, tasks: in the order of the tables.
    rows: how many there are.
    """

    model: str
    benchmark: str
    compress: str
    settings: dict[str, object]
    versions: list[str]
    dense: str | None
    methods: dict[str, dict[str, Any]]
    lengths: list[int | None]
    tasks: list[str]
    rows: int
    cells: list[CellFigures]
    by_length: list[LengthFigures]
    overall: list[MethodFigures]
    differences: list[MethodDifference]
    by_op: list[OpScores]
    by_depth: list[DepthMap]


class Summary(TypedDict):
    """The whole of summary.json. resamples, level: of the bootstrap."""

    resamples: int
    level: float
    runs: list[RunSummary]
