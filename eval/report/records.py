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


class NatsDifference(Difference):
    """Mean difference of two methods in nats a token, paired by sample."""


class FidelityFigures(TypedDict):
    """How near one method's next-token distributions are to dense's over some samples (`eval.inference.divergence`).

    n: samples that were measured.
    tokens: distributions that were compared, over all samples.
    kl: mean KL(dense || method) of the samples, nats a token; None if all logits failed.
    top1: mean top-1 agreement with dense, 0-100; None like kl.
    loss, loss_difference: of texts, nats a token: the method's, and minus dense's; missing for replies.
    non_finite: samples with NaN or infinite logits, which no mean contains.
    """

    n: int
    tokens: int
    kl: float | None
    kl_interval: NotRequired[Interval]
    top1: float | None
    top1_interval: NotRequired[Interval]
    loss: NotRequired[float]
    loss_difference: NotRequired[NatsDifference]
    non_finite: int


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
    fidelity: missing where no sample was compared with dense token by token.
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
    fidelity: NotRequired[FidelityFigures]


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


class TurnFigures(TypedDict):
    """Mean score (0-100) of one method in one turn of its conversations, tasks counted alike."""

    turn: int
    n: int
    score: float
    interval: tuple[float, float]


class TurnScores(TypedDict):
    """Conversations of one mode and length: figures of each method by turn."""

    mode: str
    length: int | None
    methods: dict[str, list[TurnFigures]]


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
    by_turn: list[TurnScores]


class Summary(TypedDict):
    """The whole of summary.json. resamples, level: of the bootstrap."""

    resamples: int
    level: float
    runs: list[RunSummary]
