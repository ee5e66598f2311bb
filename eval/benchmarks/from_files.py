"""Benchmarks whose samples are lines of files, cell by cell (eval.benchmarks.base).

Lines come from .jsonl or .jsonl.gz files, a zip or a folder of them, or a file on the Hugging Face hub. Before any
weights are loaded every line is checked against its schema, becomes a row, and is scored: with an empty reply, and with
its own answer, which has to score above 0.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import reprlib
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from leank.data_gen.reading import UNREADABLE, digest, read_bytes
from leank.errors import in_one_line
from leank.eval.benchmarks.base import Benchmark, Cell, Row, score_row
from leank.extras import require
from leank.typed import Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tasks = Annotated[Sequence[str], MinLen(1)]
OWN = "take the line out, or give the data set's own file"


@dataclass(frozen=True)
class Line:
    """A line of a file: its number from 1, and what it holds (its bytes, or what they say)."""

    file: str
    number: int
    data: Any

    def error(self, what: str) -> ValueError:
        """The one line that a user reads: FILE, line N: what is wrong; what to do."""
        return ValueError(f"{self.file}, line {self.number}: {in_one_line(what)}; {OWN}")


@dataclass(frozen=True)
class Hub:
    """A file of a data set repository on the hub."""

    repo: str
    file: str

    def fetch(self, what: str) -> Path:
        """The file, downloaded once. Raises FileNotFoundError saying what to do without network."""
        try:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.repo, self.file, repo_type="dataset"))
        except Exception as error:  # offline, blocked, moved or not installed: the way out is the same
            raise FileNotFoundError(
                f"{what}: no path= given and {self.repo}/{self.file} cannot be fetched from the hub ({error}). "
                f"Download https://huggingface.co/datasets/{self.repo}/resolve/main/{self.file} "
                "and pass path=<its folder>"
            ) from error


def read(what: str, name: str, path: str | Path | None, hub: Hub) -> Iterator[Line]:
    """The lines of NAME.jsonl, as bytes; of a .json that is one array, its elements.

    what: for messages, such as "LongBench trec". path: the file itself (also .gz), a zip that holds it, or a folder
    with either or with the hub's file; None asks the hub. Raises FileNotFoundError, saying which file to put where,
    if there is none, and ValueError for a damaged one.
    """
    source = Path(path) if path is not None else hub.fetch(what)
    if source.is_dir():
        names = list(dict.fromkeys((f"{name}.jsonl", f"{name}.jsonl.gz", hub.file)))
        found = next((source / file for file in names if (source / file).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{what}: none of {', '.join(names)} in {source}; put one there")
        source = found
    if not source.is_file():
        raise FileNotFoundError(
            f"{what}: benchmark.path={source} does not exist; give a .jsonl file, {hub.file} or a folder"
        )
    try:
        if source.suffix == ".zip":
            with zipfile.ZipFile(source) as archive:
                member = next((file for file in archive.namelist() if Path(file).name == f"{name}.jsonl"), None)
                if member is None:
                    raise FileNotFoundError(f"{what}: no {name}.jsonl in {source}; is it the data set's {hub.file}?")
                content = archive.read(member)
        else:
            content = read_bytes(source)
    except FileNotFoundError:
        raise
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise ValueError(f"{source} cannot be read: {error}; copy it again") from None
    if source.suffix == ".json" and content.lstrip().startswith(b"["):  # an array of all samples
        try:
            return (Line(str(source), number, data) for number, data in enumerate(from_json(content), 1))
        except ValueError as error:
            raise ValueError(f"{source} cannot be read: it is no JSON ({error}); copy it again") from None
    # lines end at \n alone: JSON may hold any other line separator
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return (Line(str(source), number, line) for number, line in enumerate(lines, 1) if line.strip())


def from_hub(what: str, repo: str, name: str | None, split: str, cure: str) -> Iterator[Line]:
    """The rows of a data set that the hub keeps in files of its own, by `datasets`.

    what: for messages. name: its configuration. cure: ends the message, and says what to put where.
    Raises FileNotFoundError without network.
    """
    require(what, "eval", "datasets")
    from datasets import load_dataset

    try:
        found = load_dataset(repo, name, split=split)
        yield from (Line(f"{repo}/{name}/{split}", number, dict(data)) for number, data in enumerate(found, 1))
    except Exception as error:  # offline, blocked or moved: the way out is the same
        said = f"{what}: no path= given and {repo} cannot be fetched from the hub ({str(error)[:200]})"
        raise FileNotFoundError(f"{said}. {cure}") from error


def checked(lines: Iterable[Line], schema: TypeAdapter[Any], same: Sequence[str] = ()) -> Iterator[Line]:
    """Yield what the lines say. Fields that the schema, a TypedDict, does not name may hold anything.

    same: fields that name a sample; two lines that agree in them, the first not being empty, are one sample twice.
    Raises ValueError, "FILE, line N: what is wrong; what to do", at the first wrong line.
    """
    seen: dict[str, int] = {}
    for line in lines:
        data = line.data
        try:
            if isinstance(data, bytes):
                data = from_json(data, allow_inf_nan=False)
            schema.validate_python(data, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise line.error(f"{place}={reprlib.repr(first['input'])}: {first['msg']}") from None
        except ValueError as error:
            raise line.error(f"it is no JSON ({error})") from None
        if same and data.get(same[0]) not in (None, ""):
            first_line = seen.setdefault(repr([data.get(name) for name in same]), line.number)
            if first_line != line.number:
                said = f"{same[0]}={reprlib.repr(data[same[0]])}, as in line {first_line}"
                raise line.error(f"{said}: one sample would count twice")
        yield replace(line, data=data)


def asset(name: str) -> Any:
    """What assets/NAME.json holds: a benchmark's official prompts, and what belongs to them."""
    return json.loads(files("leank.eval.benchmarks").joinpath("assets", f"{name}.json").read_text(encoding="utf-8"))


@dataclass
class FromFiles(Benchmark):
    """A benchmark of files; its subclasses say where lines are, what they must hold, and how they become rows."""

    path: str | None = None  # where the data is; None asks the hub
    samples: Samples | None = None  # how many samples of each task are used, from the first on; None takes all
    name: str = ""
    seed: Seed = 0
    _lines: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)
    _reply: int | None = field(default=None, repr=False)

    schema: ClassVar[TypeAdapter[Any]]  # of a line
    same: ClassVar[tuple[str, ...]] = ()  # fields that name a sample, see `checked`
    cut: ClassVar[bool] = False  # whether prompts are cut to `max_length` tokens, or what the model's positions leave
    counted: ClassVar[tuple[str, ...]] = ()  # settings that answers depend on
    one_file: ClassVar[bool] = False  # whether the lines of several tasks may stand in one .jsonl

    def wanted(self) -> Sequence[str]:
        """The tasks. Raises ValueError for an unknown one."""
        return [self.name]

    @abstractmethod
    def lines(self, task: str) -> Iterator[Line]:
        """The task's lines, as they stand in the files."""

    @abstractmethod
    def build(self, task: str, data: Any) -> Row:
        """One line as a row. Raises ValueError for fields that are right one by one and not together."""

    def right(self, row: Row) -> Sequence[str]:
        """Replies of which one must score above 0; none where the official scorer may give the true answer 0."""
        return [str(answer) for answer in row.answers]

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        """Read, build and score every line once; see `Benchmark.prepare`."""
        self._limit, self._reply = limit, max_new_tokens
        tasks = self.wanted()
        if len(tasks) > 1 and not self.one_file and self._file and not str(self.path).endswith(".zip"):
            raise ValueError(
                f"benchmark.path={self.path} is the file of one task, and {len(tasks)} are to be run; name its task in "
                "benchmark.tasks, or give the folder of all files"
            )
        for task in tasks:
            lines = list(checked(self.lines(task), self.schema, self.same))
            if not lines:
                raise ValueError(f"benchmark.path={self.path}: {task} has no lines")
            for line in lines:
                self.try_line(line, task)
            self._lines[task] = {str(number): line.data for number, line in enumerate(lines[: self.samples])}
            self._digests[task] = self._known_by(task, lines)

    def try_line(self, line: Line, task: str) -> Row:
        """Build a line's row, and score an empty reply and right ones. Raises ValueError, naming the line."""
        try:
            row = self.build(task, line.data)
            score_row(row, "")
            if (replies := self.right(row)) and not any(score_row(row, reply) > 0 for reply in replies):
                raise ValueError(
                    f"its own answer {reprlib.repr(row.answers)} scores 0, so that no reply could be right"
                )
            return row
        except (ValueError, KeyError, TypeError) as error:
            raise line.error(f"it is no sample of {task}: {error}") from None

    def tried(self) -> Iterable[tuple[Cell, str]]:
        """The sample of the longest prompt in each cell."""
        for cell in self.cells():
            lines = self._lines[cell.task]
            yield cell, max(cell.samples, key=lambda sample: len(self.build(cell.task, lines[sample]).prompt))

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        """Return a digest of what a task's lines hold, wherever they lie and however they are packed."""
        return digest("\n".join(json.dumps(line.data, sort_keys=True) for line in lines))

    @cached_property
    def _file(self) -> dict[str, str]:
        if self.path is None or not Path(self.path).is_file():
            return {}
        return {"file": hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:10]}

    def identity(self) -> dict[str, object]:
        """What is `counted`, and the digest of a single file; `data` tells those of a folder or the hub apart."""
        return {name: getattr(self, name) for name in self.counted} | self._file

    def data(self, task: str) -> str | None:
        return None if self._file else self._digests[task]

    def cells(self) -> list[Cell]:
        return [Cell(task, None, tuple(lines)) for task, lines in self._lines.items()]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        row = replace(self.build(cell.task, self._lines[cell.task][sample]), id=sample)
        if not self.cut:
            return row
        most: int | None = getattr(self, "max_length", None)
        if most is None and self._limit is not None:
            # the seam of a cut prompt may cost a token or two
            most = self._limit - (self._reply or row.max_new_tokens) - overhead - 8
        return row if most is None else cut_in_the_middle(row, most, tokenizer)


def cut_in_the_middle(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The row; of a prompt of more than `max_length` tokens its first and last max_length // 2 tokens, decoded.

    Both halves are decoded on their own without special tokens, so re-encoding may differ by a token at the seam. Where
    the question itself is cut, all is context. Raises ValueError for a length without room for a prompt.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no prompt; use the model's context less the reply")
    ids = tokenizer.encode(row.prompt)
    if len(ids) <= max_length:
        return row
    half = max_length // 2
    prompt = "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:]))
    question = row.question if prompt.endswith(row.question) else ""
    return replace(row, context=prompt.removesuffix(question), question=question)
