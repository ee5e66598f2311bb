"""What holds for every analysis: it is found by name, named in the docs, and runs and is drawn in bfloat16."""

import copy
from dataclasses import replace
from inspect import signature

import numpy as np
import pytest

from scripts.analyses import ANALYSES, draw
from scripts.analyses.source import Source
from scripts.analyses.table import PLACE, Table
from tests import ROOT
from tests.helpers.analysis_source import LENGTH, random_mask, source, tiny_model

TASK = "niah_single_2"
SMALL = {
    "task": TASK, "tasks": (TASK, "niah_multikey_1"), "length": LENGTH, "lengths": (LENGTH, 400), "samples": 1,
    "trials": 1, "steps": 8, "evict_at": 64, "sparse_ratio": 2.0, "sink": 4, "window": 16, "kernel": 3, "budget": 80,
    "top": 20, "queries": 16,
}  # fmt: skip


def small(name):
    """The small settings of an analysis, of those that it has."""
    return {key: SMALL[key] for key in signature(ANALYSES[name].measure).parameters if key in SMALL}


@pytest.fixture(scope="module")
def half():
    return replace(source(mask=True), model=copy.deepcopy(tiny_model()).bfloat16())


@pytest.mark.parametrize("name", ANALYSES)
def test_runs_in_bfloat16(name, half):
    measure, panels = ANALYSES[name]
    table = measure(half, **small(name))
    assert {"measure", "value", "unit", *PLACE} <= {*table.columns}
    assert {panel.measure for panel in panels} <= {*table["measure"]}
    drawn = [axes for axes in draw(table, panels).get_axes() if axes.has_data()]
    assert len(drawn) >= len(panels)


@pytest.mark.parametrize("name", ANALYSES)
def test_is_in_the_docs(name):
    assert f"| `{name}` |" in (ROOT / "docs/analyses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ANALYSES)
def test_what_is_missing_is_named(name):
    of_mask = name in ("empty_heads", "kept_by_pair")
    lacks = Source() if of_mask else Source(mask=random_mask())
    with pytest.raises(ValueError, match="mask is not set" if of_mask else "model is not set"):
        ANALYSES[name].measure(lacks, **small(name))


def test_values_that_are_not_finite_empty_tables_and_settings_are_refused():
    table = Table()
    table.add("share", "share", [0.5, np.nan], {"layer": range(2)})  # a share of nothing is empty
    with pytest.raises(ValueError, match="pearson is infinite"):
        table.add("pearson", "correlation", np.inf)
    with pytest.raises(ValueError, match="no rows"):
        draw(table.frame, ANALYSES["empty_heads"].panels)
    with pytest.raises(ValueError, match="samples"):
        ANALYSES["staticity"].measure(source(), samples=0)


def test_samples_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="length=4096 is more than the model's max_position_embeddings=1024"):
        source().sample(TASK, 4096, 0)
