"""Lines of a data set: from .jsonl or .jsonl.gz files, a zip or a folder of them, or a file on the Hugging Face hub."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def read(what: str, name: str, path: str | Path | None, hub: Hub) -> Iterator[dict[str, Any]]:
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
        raise FileNotFoundError(f"{what}: {source} does not exist; give a .jsonl file, {hub.file} or a folder")
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            member = next((file for file in archive.namelist() if Path(file).name == f"{name}.jsonl"), None)
            if member is None:
                raise FileNotFoundError(f"{what}: no {name}.jsonl in {source}; is it the data set's own {hub.file}?")
            with io.TextIOWrapper(archive.open(member), encoding="utf-8") as lines:
                yield from _parse(lines, source)
    else:
        opener = gzip.open if source.suffix == ".gz" else open
        with opener(source, "rt", encoding="utf-8") as lines:
            yield from _parse(lines, source)


def _parse(lines: Iterable[str], source: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        for line in lines:
            number += 1
            data = json.loads(line) if line.strip() else None
            if isinstance(data, dict):
                yield data
            elif line.strip():
                raise ValueError("no JSON object")
    except (ValueError, OSError, EOFError) as error:  # wrong UTF-8 and wrong JSON are ValueErrors
        where = f"{source}, line {number}"
        raise ValueError(f"{where} cannot be read ({error}); take it out, or give the data set's own file") from error
