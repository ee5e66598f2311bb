"""results.jsonl: one row per model, method and sample, appended durably; every report is computed from rows alone.

A row is complete on disk before the next begins: one write, then fsync. A kill can tear the last line only. The next
run cuts a torn line off and does its sample anew.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, GetPydanticSchema, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from leank.files import Lock, remove_partial, sync_folder
from leank.typed import LARGEST, Count, OneOf

NAME = "results.jsonl"
GLOB = "results*.jsonl"
HOUR = 3600.0
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
OPEN = ConfigDict(**STRICT, extra="allow")


@with_config(OPEN)
class _Matched(TypedDict):
    """What tables read of how a method was matched with others (`eval.run.build.matched`)."""

    settings: list[str]


@with_config(OPEN)
class _Method(TypedDict, total=False):
    """What tables read of a method's configuration."""

    channels: dict[str, Any]
    matched: _Matched


@with_config(OPEN)
class _Meta(TypedDict, total=False):
    """What tables group by, where a benchmark has it."""

    op: int
    d: int | str
    turn: int
    mode: str
    depth_percent: float


def _with_total(found: dict[str, float]) -> dict[str, float]:
    if found.get("total", 0) <= 0:
        raise ValueError("there is no total above 0")
    return found


class RowSettings(TypedDict):
    """Everything that a row's answer depends on, beside the sample itself; `ResultRow.config` is its digest."""

    # the method's whole configuration (`eval.methods.Method.config`); empty for dense
    method: Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(_Method))]
    format: NotRequired[int]  # version of what a row means
    model: NotRequired[dict[str, object]]  # the model's name, type and contents
    benchmark: NotRequired[dict[str, object]]  # the benchmark's settings
    decode: NotRequired[dict[str, object]]  # max_new_tokens and min_new_tokens where they replace the benchmark's own
    fidelity: NotRequired[int]  # reply tokens at which methods were compared with dense; missing where none were
    # tokens of a block of `Fidelity.along`, where methods read dense's reply in place of writing one
    by_position: NotRequired[int]
    # digest of the files that the task's samples come from; missing for a task without files
    data: NotRequired[str | None]
    # how special tokens in the sample's own text were read; missing where the text spells none
    specials: NotRequired[Annotated[str, OneOf("text", "as_is")] | None]
    thought: NotRequired[str]  # "cut": thoughts are not scored; missing where the model has no token that ends one
    sampling: NotRequired[dict[str, object]]  # `eval.inference.sampling.Sampling.identity`; missing where greedy


class Along(TypedDict):
    """`Fidelity` by position in a reply, or a text, that was read as it is decoded; a list has a figure of each block.

    A row's last block may be shorter than `block`. bytes (but dense's) and seconds are those of the batch, which ends
    with its longest row: where a shorter one ends within a block, they are of the whole block.
    """

    block: Annotated[int, Ge(1)]  # tokens
    stepped: bool  # whether every token was a captured decoding step; else tokens came in pieces, with the same result
    kl: list[Annotated[float, Ge(-1e-3), Le(LARGEST)]]  # mean over the block, as `Fidelity.kl`
    top1: list[Annotated[float, Ge(0), Le(1)]]
    # bytes held at the block's end, one sample's share; of dense, those of K and V without room for tokens to come
    bytes: NotRequired[list[Annotated[float, Ge(0), Le(LARGEST)]]]
    # of them, those of no tokens and no room for tokens: tables, schedules, the kernels' scratch memory; none of dense
    tables: NotRequired[list[Annotated[float, Ge(0), Le(LARGEST)]]]
    # the others, known before (`eval.methods.memory.planned_bytes`); None where the prompt decides
    planned: NotRequired[list[Annotated[float, Ge(0), Le(LARGEST)] | None]]
    seconds: NotRequired[list[Annotated[float, Ge(0), Le(LARGEST)]]]  # of a token of the batch, mean over the block
    # of a reply: share of the block's tokens that end a 4-gram which the reply has had before
    repeated: NotRequired[list[Annotated[float, Ge(0), Le(1)]]]


class Fidelity(TypedDict):
    """How near a method's next-token distributions are to dense's on one sample (`eval.run.fidelity`).

    Both read the same tokens: a reply of dense, or a given text. Means over tokens are None if `non_finite` is not.
    """

    tokens: Count  # how many distributions were compared
    kl: Annotated[float, Ge(-1e-3), Le(LARGEST)] | None  # KL(dense || method), nats per token; rounding may be below 0
    # share of the tokens after which both have the same likeliest next token, 0 to 1
    top1: Annotated[float, Ge(0), Le(1)] | None
    # loss, dense_loss: -log of the probability of a text's next token, nats per token; None where a reply was read
    loss: float | None
    dense_loss: float | None
    # first token (0 is the first compared) with NaN or infinite logits of either; None without any
    non_finite: int | None
    along: NotRequired[Along]  # by position, where that was measured and all logits are finite


def _with_means(found: Fidelity) -> Fidelity:
    if {found["kl"] is None, found["top1"] is None} != {found["non_finite"] is not None}:
        raise ValueError("kl and top1 are None where non_finite is not, and nowhere else")
    along = [values for values in found.get("along", {}).values() if isinstance(values, list)]
    if len({len(values) for values in along}) > 1:
        raise ValueError("lists of along have different lengths")
    return found


class ResultRow(TypedDict):
    """One method's answer to one sample. The first nine fields and `reply` are the row's key (`Key`)."""

    model: str  # its label
    method: str  # its label
    config: str  # digest of `settings`
    benchmark: str
    task: str
    length: Count | None  # nominal tokens of the prompt and reply; None where a benchmark has no lengths
    sample: str  # id of the sample within its task and length
    seed: int  # of the benchmark's generators
    compress: str  # "after_question" or "before_question"
    reply: NotRequired[Count]  # its number among the sample's replies, from 0; missing where decoding is greedy
    score: Annotated[float, Ge(0), Le(1)]
    prediction: str  # the reply as text
    tokens: NotRequired[list[Count]]  # of dense's reply, where every method read that; a run that goes on takes it
    answers: list[object]  # what the scorer compared with
    # of a sampled reply whose scorer can name it: the answer that the reply states, by which replies vote; None if none
    stated: NotRequired[str | None]
    metric: str  # name of the scorer, see `eval.benchmarks.base`
    # what tables group by, such as op and depth_percent
    meta: Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(_Meta))]
    prompt_tokens: Count  # prompt_tokens, new_tokens: tokens of the prompt and of the reply
    new_tokens: Count
    # what cut the reply off: "thought" if it ends inside a thought, "limit" if only max_new_tokens ended it, None if
    # nothing did; older rows lack it
    cut: NotRequired[Annotated[str, OneOf("thought", "limit")] | None]
    repeated: NotRequired[Annotated[float, Ge(0), Le(1)]]  # share of the reply's 4-grams that it has had before
    # bytes held after the prompt, per part and in "total"; one sample's share of its batch. "allocated" is what the
    # GPU's allocator counts, of which other tensors that are freed meanwhile are taken off.
    cache_bytes: Annotated[dict[str, Annotated[float, Le(LARGEST)]], AfterValidator(_with_total)]
    middle_tokens: int | None  # tokens between sink and window at the reply's end; None for dense
    compressed: bool | None  # whether less than the dense cache is held or read; None for dense
    dense_only: bool  # whether the dense pass's logits alone decided the reply
    non_finite: int | None  # step at which logits were NaN or infinite (0: the first token); None if they never were
    # see `Fidelity`; None where it was not measured, or where dense's reply is empty
    fidelity: Annotated[Fidelity, AfterValidator(_with_means)] | None
    # layer above which the prefill dropped tokens, where it looks for that layer itself (ASL); -1 if it found none,
    # None for other methods
    selected_layer: int | None
    # numbers of the prompt's middle beyond the largest that their format stores (FP8); None where no format has a
    # largest number, or tokens are evicted while decoding; older rows lack it
    saturated: NotRequired[Count | None]
    batch: int
    settings: RowSettings
    versions: dict[str, str]  # of Python and the libraries
    # prefill, seal, question and decode of the whole batch; first_token and per_token follow from them
    seconds: dict[str, Annotated[float, Ge(0), Le(LARGEST)] | None]


class Key(NamedTuple):
    """What tells a row from every other; `ResultRow` describes the fields."""

    model: str
    method: str
    config: str
    benchmark: str
    task: str
    length: int | None
    sample: str
    seed: int
    compress: str
    reply: int = 0


_ROW = TypeAdapter(with_config(STRICT)(ResultRow))
ReplyKey = tuple[object, ...]


def reply_key(key: Key, settings: RowSettings) -> ReplyKey:
    """Return what names the reply that all methods of a sample read: everything but the method."""
    common = {name: value for name, value in settings.items() if name != "method"}
    return *key._replace(method="", config=""), json.dumps(common, sort_keys=True)


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a stored row. Raises KeyError if a field of the key is missing."""
    return Key._make([*(row[name] for name in Key._fields[:-1]), row.get("reply", 0)])


class Results:
    """The open file of a run, of one process at a time, which knows the `keys` of all rows and appends new ones."""

    def __init__(self, directory: str | os.PathLike[str], part: str = "", folder: str = "hydra.run.dir") -> None:
        """Open or create the file, cut off a torn last line, and read the keys of all parts.

        part: ending of a shard's own file, such as "-0-of-4"; empty without shards.
        folder: what sets the directory, for the message to a second writer.
        Raises BlockingIOError if another run is writing here, ValueError for a damaged line in the middle.
        """
        self.path = Path(directory) / NAME.replace(".", f"{part}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._new = not self.path.exists()
        busy = f"{self.path} is being written by another run; wait for it or choose another {folder}"
        self._lock = Lock(self.path, busy)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            self._cut_torn_line()
            self.keys: set[Key] = set()
            self.replies: dict[ReplyKey, list[int]] = {}  # that all methods read, see `ResultRow.tokens`
            for row in read(directory):
                self.keys.add(key_of(row))
                if "tokens" in row:
                    self.replies[reply_key(key_of(row), row["settings"])] = row["tokens"]
            remove_partial(self.path.parent, HOUR)  # other shards may be writing a report
            if self._new:
                sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if not size:
            return
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as lines:
            keep = lines.rfind(b"\n") + 1
        if keep < size:
            os.ftruncate(self._file, keep)
            os.fsync(self._file)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row and wait until it is on disk. Raises ValueError for a row that is there already."""
        key = key_of(row)
        if key in self.keys:
            raise ValueError(f"this row is in {self.path} already: {key}")
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.keys.add(key)
        if "tokens" in row:
            self.replies[reply_key(key, row["settings"])] = row["tokens"]  # type: ignore[arg-type, assignment]

    def close(self) -> None:
        """Close the file and let another process write it."""
        os.close(self._file)
        self._lock.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._new and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)  # a run that is refused leaves no file
        self.close()


class Collected:
    """Rows that stay in memory, where a caller of the replay wants no file; to `Job.run` they are as `Results`."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.replies: dict[ReplyKey, list[int]] = {}
        self.rows: list[ResultRow] = []

    def append(self, row: ResultRow) -> None:
        """Keep one row."""
        key = key_of(row)
        self.keys.add(key)
        if "tokens" in row:
            self.replies[reply_key(key, row["settings"])] = row["tokens"]
        self.rows.append(row)


def read(path: str | os.PathLike[str]) -> Iterator[ResultRow]:
    """Yield the rows of a file, or of all files in a run directory (a shard each), but for a torn last line.

    Every row has a key; `check_rows` looks for the other fields.
    Raises FileNotFoundError, or ValueError naming the line that is damaged or no row.
    """
    if Path(path).is_dir() and (parts := sorted(Path(path).glob(GLOB))):
        seen: set[Key] = set()
        for row in _in_turn(parts):
            if (key := key_of(row)) not in seen:  # two shards may have done the same row
                seen.add(key)
                yield row
        return
    file = Path(path) / NAME if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give the directory of a run of python -m leank.eval")
    yield from _read(file)


def check_rows(rows: Iterable[Mapping[str, object]]) -> None:
    """Raise ValueError, naming the sample and the field, at the first row that no report can be made of."""
    for row in rows:
        try:
            _ROW.validate_python(row)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            what = "is missing" if first["type"] == "missing" else f"is wrong ({first['msg']})"
            key = ", ".join(f"{name!r}: {row.get(name)!r}" for name in ("method", "task", "length", "sample"))
            raise ValueError(
                f"results row {{{key}}}: {'.'.join(map(str, first['loc']))!r} {what}; it was edited, or another "
                "version wrote it: move its results*.jsonl to another folder and run python -m leank.eval again"
            ) from None


def _in_turn(parts: list[Path]) -> Iterator[ResultRow]:
    """Yield one task and length of each shard in turn, so that tables name tasks in the plan's order."""
    numbered = sorted(parts, key=lambda part: [int(n) for n in re.findall(r"\d+", part.name)])
    cells = ([list(rows) for _, rows in groupby(_read(p), lambda row: (row["task"], row["length"]))] for p in numbered)
    for dealt in zip_longest(*cells, fillvalue=()):
        for rows in dealt:
            yield from rows


def _read(file: Path) -> Iterator[ResultRow]:
    """Yield the rows of one file; those of equal settings or versions share one object, which saves much memory."""
    shared: dict[bytes, object] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = from_json(line)
                hash(key_of(row))
                for name in ("settings", "versions"):
                    if name in row:
                        row[name] = shared.setdefault(to_json(row[name], inf_nan_mode="constants"), row[name])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{file}, line {number} is no result row ({error!r}); take that line out and run again to redo it"
                ) from None
            yield row
