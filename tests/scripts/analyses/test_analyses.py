"""What holds for every analysis: it is found by name, named in the docs, and runs in bfloat16 with rows for JSON."""

import copy
import json
from dataclasses import fields, replace

import pytest
import torch

from scripts.analyses import ANALYSES, Analysis, analysis
from scripts.analyses.analysis import PLACE, row
from scripts.analyses.source import Source
from tests import ROOT
from tests.helpers.analysis_source import LENGTH, random_mask, source, tiny_model

TASK = "niah_single_2"
SMALL = {
    "task": TASK, "tasks": (TASK, "niah_multikey_1"), "length": LENGTH, "lengths": (LENGTH, 400), "samples": 1,
    "trials": 1, "steps": 8, "evict_at": 64, "sparse_ratio": 2.0, "sink": 4, "window": 16, "kernel": 3, "budget": 80,
    "top": 20, "queries": 16,
}  # fmt: skip


def small(name):
    """The analysis with small settings, of those that it has."""
    made = analysis(name)
    return made(**{field.name: SMALL[field.name] for field in fields(made) if field.name in SMALL})


@pytest.fixture(scope="module")
def half():
    return replace(source(mask=True), model=copy.deepcopy(tiny_model()).bfloat16())


@pytest.mark.parametrize("name", ANALYSES)
def test_runs_in_bfloat16(name, half):
    study = small(name)
    assert isinstance(study, Analysis)
    rows = json.loads(json.dumps(study.measure(half), allow_nan=False))
    assert all({"measure", "value", "unit", *PLACE} <= one.keys() for one in rows)
    assert study.plot(rows).get_axes()


@pytest.mark.parametrize("name", ANALYSES)
def test_is_in_the_docs(name):
    assert f"| `{name}` |" in (ROOT / "docs/analyses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ANALYSES)
def test_what_is_missing_is_named(name):
    of_mask = name in ("empty_heads", "kept_by_pair")
    lacks = Source() if of_mask else Source(mask=random_mask())
    with pytest.raises(ValueError, match="mask is not set" if of_mask else "model is not set"):
        small(name).measure(lacks)


def test_unknown_names_empty_rows_and_values_that_are_not_finite():
    with pytest.raises(ValueError, match="analysis='w_fh' is unknown; choose one of"):
        analysis("w_fh")
    with pytest.raises(ValueError, match="no rows"):
        small("staticity").plot([])
    with pytest.raises(ValueError, match="pearson is nan"):
        row("pearson", float(torch.nan), "correlation")


def test_samples_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="length=4096 is more than the model's max_position_embeddings=1024"):
        source().sample(TASK, 4096, 0)
