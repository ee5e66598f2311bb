"""docs/methods.md: its example runs as it stands, and its tables name what there is."""

import re

import pytest
import torch
import yaml

from leank.conf.eval import method_options
from leank.eval.inference.prefill import prefill
from leank.eval.methods import REGISTRY, method, name_of
from leank.eval.methods.match import match, share_of_dense
from tests import ROOT
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model

DOCS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
SIZES = {"sink": 2, "window": 6}


@pytest.fixture
def largest_key(tmp_path, monkeypatch):
    """The example's configuration; its file is where Python finds it."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(code.splitlines()) <= 25
    (tmp_path / "my_methods.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (given,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    (label,) = loaded = yaml.safe_load(given)
    assert f"conf/method/{label}.yaml" in DOCS
    return method(label, loaded[label], SIZES)


def test_the_example_of_a_new_method(largest_key):
    model = tiny_model("llama")
    ids, mask = left_padded([40, 33], 0)
    cache = largest_key.cache(model, prefill(model, ids, mask.bool(), 4))
    kept = DIM - int(0.6 * DIM)
    middles = (40 - 8 + 33 - 8) * HEADS * LAYERS
    assert cache.memory().middle_k == middles * kept * 8
    assert name_of(largest_key.channels) == "my_methods:LargestKey"
    for row, length in enumerate((40, 33)):  # the kept channels are those of the largest |k|
        alone = prefill(model, ids[row : row + 1, -length:], None, 4)
        for layer, held in zip(alone.layers, cache.compressed, strict=True):
            largest = layer.keys[0].abs().amax(1).argsort(descending=True)[:, :kept].sort().values
            assert torch.equal(held.store.channels.index[row, :, :kept].long(), largest)
    found = match(largest_key, 0.7, model.config, [4000], 8)
    assert share_of_dense(found, model.config, [4000], 8) == pytest.approx(0.7, rel=0.03)


def test_every_method_is_in_a_table():
    rows = [line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)} - set(REGISTRY)  # a table of axes
    configured = {*method_options()} - {"dense"}
    mentioned = {name for name in configured if f"`{name}`" in DOCS}
    assert mentioned == configured
    assert named <= configured
    assert {name for names in REGISTRY.values() for name in names} <= named


def test_the_setting_that_match_moves_is_bold():
    lines = {
        line.split("`")[1]: line.split("|")[3]
        for line in DOCS.splitlines()
        if line[:3] == "| `" and line.count("|") == 5
    }
    for axis, names in REGISTRY.items():
        for name in names:
            free = method("one", {axis: {"name": name}}, {"sink": 0, "window": 1}).axes[axis].free
            assert re.findall(r"\*\*(\w+)\*\*", lines[name]) == ([free] if free else []), name


def test_a_choice_that_cannot_be_imported_is_named():
    with pytest.raises(ValueError, match=r"method\.x\.channels\.name='no_such:Thing' cannot be imported"):
        method("x", {"channels": {"name": "no_such:Thing"}})
    with pytest.raises(ValueError, match=r"name='leank\.eval\.methods\.channels\.think:Thing' cannot be imported"):
        method("x", {"channels": {"name": "leank.eval.methods.channels.think:Thing"}})
