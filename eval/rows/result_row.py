"""What one line of results.jsonl holds; every table, plot and comparison is computed from these rows alone."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, NotRequired

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from leank.typed import LARGEST, OneOf, shown

Count = Annotated[int, Ge(0), Le(LARGEST)]
Amount = Annotated[FiniteFloat, Ge(0), Le(LARGEST)]
Finite = Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)]
STRICT, OPEN = ConfigDict(strict=True), ConfigDict(strict=True, extra="allow")


def _with_total(found: dict[str, float]) -> dict[str, float]:
    if found.get("total", 0) <= 0 or any(size < 0 for name, size in found.items() if name != "allocated"):
        raise ValueError(f"{shown(found)} has no total above 0, or a part below 0")
    return found


@with_config(OPEN)
class Meta(TypedDict, total=False):
    """What tables group by, where a benchmark has it; other fields are as the benchmark has them."""

    op: int
    d: int | str
    turn: int
    mode: str
    depth_percent: Annotated[float, Ge(0), Le(100)]


@with_config(OPEN)
class Matched(TypedDict, total=False):
    """Which settings `match` moved, by their dotted names."""

    settings: list[str]


@with_config(OPEN)
class MethodSettings(TypedDict, total=False):
    """A method's whole configuration (`eval.methods.Method.config`)."""

    channels: dict[str, Any]
    matched: Matched


@with_config(STRICT)
class RowSettings(TypedDict):
    """Everything that a row's answer depends on, beside the sample itself; `ResultRow.config` is its digest."""

    method: MethodSettings  # the method's whole configuration; empty for dense
    format: NotRequired[int]  # version of what a row means
    model: NotRequired[dict[str, object]]  # the model's name, type and contents
    benchmark: NotRequired[dict[str, object]]  # the benchmark's settings
    decode: NotRequired[dict[str, object]]  # max_new_tokens and min_new_tokens where they replace the benchmark's own
    fidelity: NotRequired[int]  # reply tokens at which methods were compared with dense; missing where none were
    # digest of the files that the task's samples come from; missing for a task without files
    data: NotRequired[str | None]
    # how special tokens in the sample's own text were read; missing where the text spells none
    specials: NotRequired[Annotated[str, OneOf("text", "as_is")] | None]


@with_config(STRICT)
class Fidelity(TypedDict):
    """How near a method's next-token distributions are to dense's on one sample (`eval.run.fidelity`).

    Both read the same tokens: a reply of dense, or a given text. Means over tokens are None if `non_finite` is not.
    """

    tokens: Count  # how many distributions were compared
    kl: Finite | None  # KL(dense || method), nats per token
    # share of the tokens after which both have the same likeliest next token, 0 to 1
    top1: Annotated[FiniteFloat, Ge(0), Le(1)] | None
    # loss, dense_loss: -log of the probability of a text's next token, nats per token; None where a reply was read
    loss: Finite | None
    dense_loss: Finite | None
    # first token (0 is the first compared) with NaN or infinite logits of either; None without any
    non_finite: Count | None


def _measured(found: Fidelity | None) -> Fidelity | None:
    if found is not None and found["non_finite"] is None and None in (found["kl"], found["top1"]):
        raise ValueError("kl or top1 is null, and non_finite is, too")
    return found


@with_config(STRICT)
class ResultRow(TypedDict):
    """One method's answer to one sample. The first nine fields are the row's key (`eval.rows.results.Key`)."""

    model: str  # its label
    method: str  # its label
    config: str  # digest of `settings`
    benchmark: str
    task: str
    length: Count | None  # nominal tokens of the prompt and reply; None where a benchmark has no lengths
    sample: str  # id of the sample within its task and length
    seed: int  # of the benchmark's generators
    compress: str  # "after_question" or "before_question"
    score: Annotated[FiniteFloat, Ge(0), Le(1)]  # 0 to 1
    prediction: str  # the reply as text
    answers: list[object]  # what the scorer compared with
    metric: str  # name of the scorer, see `eval.benchmarks.base`
    meta: Meta  # what tables group by, such as op and depth_percent
    prompt_tokens: Count  # prompt_tokens, new_tokens: tokens of the prompt and of the reply
    new_tokens: Count
    # bytes held after the prompt, per part and in "total"; one sample's share of its batch. "allocated" is what the
    # GPU's allocator counts, of which other tensors that are freed meanwhile are taken off.
    cache_bytes: Annotated[dict[str, Finite], AfterValidator(_with_total)]
    middle_tokens: Count | None  # tokens between sink and window at the reply's end; None for dense
    compressed: bool | None  # whether less than the dense cache is held or read; None for dense
    dense_only: bool  # whether the dense pass's logits alone decided the reply
    non_finite: Count | None  # step at which logits were NaN or infinite (0: the first token); None if they never were
    # see `Fidelity`; None where it was not measured, or where dense's reply is empty
    fidelity: Annotated[Fidelity | None, AfterValidator(_measured)]
    # layer above which the prefill dropped tokens, where it looks for that layer itself (ASL); -1 if it found none,
    # None for other methods
    selected_layer: Annotated[int, Ge(-1), Le(LARGEST)] | None
    batch: Count
    settings: RowSettings
    versions: dict[str, str]  # of Python and the libraries
    # prefill, seal, question and decode of the whole batch; first_token and per_token follow from them
    seconds: dict[str, Amount | None]


@cache
def _adapter() -> TypeAdapter[ResultRow]:
    return TypeAdapter(ResultRow)


def check_rows(rows: Iterable[Mapping[str, object]]) -> None:
    """Raise ValueError, naming the sample and the field, at the first row that no report can be computed from."""
    for row in rows:
        try:
            _adapter().validate_python(row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"]))
            what = "is missing" if first["type"] == "missing" else f"is wrong ({first['msg']})"
            key = ", ".join(f"{name!r}: {shown(row.get(name))}" for name in ("method", "task", "length", "sample"))
            raise ValueError(
                f"results row {{{key}}}: {field!r} {what}; it was edited, or another version wrote it: move its "
                "results*.jsonl to another folder and run python -m leank.eval again"
            ) from None
