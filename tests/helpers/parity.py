"""Reads the carried parity rows (tests/data/parity; NOTICE there says whose they are)."""

import json
from typing import Any

from tests import DATA

FOLDER = DATA / "parity"


def rows(name: str) -> list[dict[str, Any]]:
    """All rows of ``<name>.jsonl``."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def label(row: dict[str, Any]) -> str:
    """A short, readable test id."""
    parts = [row.get(key) for key in ("fn", "dataset", "metric", "task", "id", "note", "given", "subject")]
    return "-".join(str(part) for part in parts if part not in (None, ""))[:60].encode("ascii", "replace").decode()
