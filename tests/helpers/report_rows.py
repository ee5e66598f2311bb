"""Rows as a run leaves them, made up, and what reads a report's page; for tests of all that is computed from rows."""

import json
from html.parser import HTMLParser

import numpy as np

from leank.eval.rows import Results


def row(method, sample, score, task="vt", length=4096, config=None, **more):
    """One row of results.jsonl; `more` replaces fields."""
    settings = {"format": 1, "model": {"name": "m"}, "method": config or ({} if method == "dense" else {"sink": 1})}
    return {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "method": method, "config": f"{method}{json.dumps(config)}",
        "benchmark": "ruler", "task": task, "length": length, "sample": str(sample), "seed": 1,
        "compress": "after_question", "score": score, "prediction": f"<b>{method}</b> {score}", "answers": ["a & b"],
        "metric": "ruler_all", "meta": {}, "prompt_tokens": (length or 50) - 30, "new_tokens": 4,
        "middle_tokens": None if method == "dense" else 20, "compressed": None if method == "dense" else True,
        "dense_only": False, "non_finite": None, "fidelity": None, "selected_layer": None,
        "cache_bytes": {"total": 1000 if method == "dense" else 250}, "batch": 1, "settings": settings,
        "versions": {"torch": "x"},
        "seconds": {"prefill": 1.0, "seal": 0.1, "decode": 1.0, "first_token": 1.0, "per_token": 0.02},
        **more,
    }  # fmt: skip


def grid():
    """Rows of three methods, two tasks and two lengths, 12 random scores in each cell."""
    draw = np.random.default_rng(0)
    return [
        row(method, sample, float(draw.integers(0, 5)) / 4, task, length)
        for length in (4096, 8192)
        for task in ("vt", "niah_single_1")
        for method in ("dense", "leank", "think")
        for sample in range(12)
    ]


def stored(folder, rows):
    """Write rows as a run does. Returns the folder."""
    with Results(folder) as results:
        for one in rows:
            results.append(one)
    return folder


class Checker(HTMLParser):
    """Every tag closed in order; what the page would load."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        links = [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        self.loads += [v for v in links if not v.startswith(("#", "data:"))]
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)


def checked(page):
    """Read a page of HTML, whose tags are closed and which loads nothing. Returns what the reader found."""
    checker = Checker()
    checker.feed(page)
    assert (checker.open, checker.loads) == ([], [])
    return checker
