"""What one line of results.jsonl holds; every table, plot and comparison is computed from these rows alone."""

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict


class RowSettings(TypedDict):
    """Everything that a row's answer depends on, beside the sample itself; `ResultRow.config` is its digest."""

    method: dict[str, Any]  # the method's whole configuration (`eval.methods.Method.config`); empty for dense
    format: NotRequired[int]  # version of what a row means
    model: NotRequired[dict[str, object]]  # the model's name, type and contents
    benchmark: NotRequired[dict[str, object]]  # the benchmark's settings
    decode: NotRequired[dict[str, object]]  # max_new_tokens and min_new_tokens where they replace the benchmark's own
    fidelity: NotRequired[int]  # reply tokens at which methods were compared with dense; missing where none were
    # digest of the files that the task's samples come from; missing for a task without files
    data: NotRequired[str | None]
    # how special tokens in the sample's own text were read; missing where the text spells none
    specials: NotRequired[str | None]


class Fidelity(TypedDict):
    """How near a method's next-token distributions are to dense's on one sample (`eval.run.fidelity`).

    Both read the same tokens: a reply of dense, or a given text. Means over tokens are None if `non_finite` is not.
    """

    tokens: int  # how many distributions were compared
    kl: float | None  # KL(dense || method), nats per token
    # share of the tokens after which both have the same likeliest next token, 0 to 1
    top1: float | None
    # loss, dense_loss: -log of the probability of a text's next token, nats per token; None where a reply was read
    loss: float | None
    dense_loss: float | None
    # first token (0 is the first compared) with NaN or infinite logits of either; None without any
    non_finite: int | None


class ResultRow(TypedDict):
    """One method's answer to one sample. The first nine fields are the row's key (`eval.rows.results.Key`)."""

    model: str  # its label
    method: str  # its label
    config: str  # digest of `settings`
    benchmark: str
    task: str
    length: int | None  # nominal tokens of the prompt and reply; None where a benchmark has no lengths
    sample: str  # id of the sample within its task and length
    seed: int  # of the benchmark's generators
    compress: str  # "after_question" or "before_question"
    score: float  # 0 to 1
    prediction: str  # the reply as text
    answers: list[object]  # what the scorer compared with
    metric: str  # name of the scorer, see `eval.benchmarks.base`
    meta: dict[str, Any]  # what tables group by, such as op and depth_percent
    prompt_tokens: int  # prompt_tokens, new_tokens: tokens of the prompt and of the reply
    new_tokens: int
    # bytes held after the prompt, per part and in "total"; one sample's share of its batch. "allocated" is what the
    # GPU's allocator counts, of which other tensors that are freed meanwhile are taken off.
    cache_bytes: dict[str, float]
    middle_tokens: int | None  # tokens between sink and window at the reply's end; None for dense
    compressed: bool | None  # whether less than the dense cache is held or read; None for dense
    dense_only: bool  # whether the dense pass's logits alone decided the reply
    non_finite: int | None  # step at which logits were NaN or infinite (0: the first token); None if they never were
    # see `Fidelity`; None where it was not measured, or where dense's reply is empty
    fidelity: Fidelity | None
    # layer above which the prefill dropped tokens, where it looks for that layer itself (ASL); -1 if it found none,
    # None for other methods
    selected_layer: int | None
    batch: int
    settings: RowSettings
    versions: dict[str, str]  # of Python and the libraries
    # prefill, seal, question and decode of the whole batch; first_token and per_token follow from them
    seconds: dict[str, float | None]


def check_rows(rows: Iterable[Mapping[str, object]]) -> None:
    """Raise ValueError, naming the sample and the field, at the first row that lacks one: no report is made of it."""
    for row in rows:
        for field in ResultRow.__annotations__.keys() - row.keys():
            key = ", ".join(f"{name!r}: {row.get(name)!r}" for name in ("method", "task", "length", "sample"))
            raise ValueError(
                f"results row {{{key}}}: {field!r} is missing; it was edited, or another version wrote it: move its "
                "results*.jsonl to another folder and run python -m leank.eval again"
            )
