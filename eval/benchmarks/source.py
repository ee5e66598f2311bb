"""Lines of a data set: from .jsonl or .jsonl.gz files, a zip or a folder of them, or a file on the Hugging Face hub.

`checked` holds every line to a schema, a TypedDict that pydantic reads. Fields that it does not name may hold anything.
"""

from __future__ import annotations

import gzip
import reprlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from leank.data_gen.reading import LONGEST, UNREADABLE, parse_json, why

OWN = "take the line out, or give the data set's own file"


@dataclass(frozen=True)
class Line:
    """A line of a file: its number from 1, and what it holds (an object, or the fields of a CSV line)."""

    file: str
    number: int
    data: Any

    def error(self, what: str, cure: str = OWN) -> ValueError:
        """The one line that a user reads: FILE, line N: what is wrong; what to do."""
        return ValueError(f"{self.file}, line {self.number}: {what}; {cure}")


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
    """The lines of NAME.jsonl.

    what: for messages, such as "LongBench trec". path: the file itself (also .gz), a zip that holds it, or a folder
    with either or with the hub's file; None asks the hub. Raises FileNotFoundError, saying which file to put where,
    if there is none, and ValueError for a line that is no JSON object.
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
    if source.suffix == ".zip":
        yield from _zipped(what, name, source, hub)
    else:
        yield from read_file(source)


def read_file(source: Path) -> Iterator[Line]:
    """The lines of one .jsonl or .jsonl.gz file. Raises ValueError for a line that is no JSON object."""
    with _opened(source) as lines:
        yield from _parse(lines, str(source))


def _opened(source: Path) -> IO[bytes]:
    try:
        return gzip.open(source) if source.suffix == ".gz" else source.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {why(error)}; copy it again") from None


def _zipped(what: str, name: str, source: Path, hub: Hub) -> Iterator[Line]:
    try:
        with zipfile.ZipFile(source) as archive:
            member = next((file for file in archive.namelist() if Path(file).name == f"{name}.jsonl"), None)
            if member is None:
                raise FileNotFoundError(f"{what}: no {name}.jsonl in {source}; is it the data set's own {hub.file}?")
            with archive.open(member) as lines:
                yield from _parse(lines, f"{source}/{member}")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # damaged, unknown packing, encrypted
        raise ValueError(f"{source} cannot be read: {why(error)}; copy it again") from None


def _parse(lines: IO[bytes], file: str) -> Iterator[Line]:
    r"""Lines end at \\n alone: JSON may hold any other line separator."""
    number = 0  # told where the file breaks off
    try:
        for number, raw in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), 1):
            if len(raw) > LONGEST:
                raise Line(file, number, None).error(f"it has more than {LONGEST >> 20} MiB")
            if raw.strip():
                yield _line(file, number, raw)
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise Line(file, number + 1, None).error(f"the file breaks off here ({why(error)})", "copy it again") from None


def _line(file: str, number: int, raw: bytes) -> Line:
    line = Line(file, number, None)
    try:
        data = parse_json(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise line.error(why(error)) from None
    except ValueError as error:
        raise line.error(str(error)) from None
    if not isinstance(data, dict):
        raise line.error(f"it is a JSON {type(data).__name__}, no object")
    return Line(file, number, data)


def checked(
    lines: Iterable[Line], schema: TypeAdapter[Any] | Callable[[Any], TypeAdapter[Any]], same: Sequence[str] = ()
) -> Iterator[Line]:
    """Yield the lines as they are.

    schema: of all lines, or a function from a line's object to its own.
    same: fields that name a sample; two lines that agree in them, the first not being empty, are one sample twice.
    Raises ValueError, "FILE, line N: what is wrong; what to do", at the first wrong line.
    """
    seen: dict[str, int] = {}
    for line in lines:
        try:
            wanted = schema if isinstance(schema, TypeAdapter) else schema(line.data)
            wanted.validate_python(line.data, strict=True)
        except ValidationError as error:
            raise line.error(_said(error, line.data)) from None
        if same and line.data.get(same[0]) not in (None, ""):
            first = seen.setdefault(repr([line.data.get(field) for field in same]), line.number)
            if first != line.number:
                what = f'"{same[0]}" is {reprlib.repr(line.data[same[0]])}, as in line {first}'
                raise line.error(f"{what}: one sample would count twice", "take one of the two out")
        yield line


def _said(error: ValidationError, data: dict[str, object]) -> str:
    """Return what pydantic finds wrong with the first wrong field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    name = found[0]["loc"][0]
    if name not in data:
        return f'"{name}" is missing'
    said = dict.fromkeys(one["msg"].replace("Input should", "it must") for one in found if one["loc"][0] == name)
    return f'"{name}" is {reprlib.repr(data[str(name)])}; {", or ".join(said)}'
