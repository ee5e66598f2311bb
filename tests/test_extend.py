"""docs/extend/index.md: each of its files, put where the page says, is found there and does what it says."""

import importlib
import json
import math
import re
import sys

import pytest
import torch

from leank.backbone import load
from leank.data_gen.tasks import Mixture
from leank.eval.__main__ import run
from leank.eval.benchmarks import base
from leank.eval.inference.prefill import prefill
from leank.eval.methods import REGISTRY, build_method, name_of
from leank.eval.methods.memory import match, share_of_dense
from leank_train.data import collate
from leank_train.objective import base as objectives
from leank_train.recipes.paper import Stage1, Stage1Config
from leank_train.recipes.recipe import MaskPruning
from tests import ROOT
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model
from tests.helpers.composed import evaluation

PAGE = (ROOT / "docs/extend/index.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
SIZES = {"sink": 2, "window": 6}


@pytest.fixture(autouse=True)
def in_the_tree(tmp_path, monkeypatch):
    """Put the page's files beside those of their packages."""
    base.benchmarks(), objectives.objectives()  # what is registered from here on goes again
    for module, name in ((base, "KNOWN"), (base, "METRICS"), (objectives, "KNOWN")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    modules = []
    for path, code in FILES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code, encoding="utf-8")
        folder = path.rpartition("/")[0].replace("/", ".")
        package = importlib.import_module(folder if folder.startswith("leank_train") else f"leank.{folder}")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
        modules.append(f"{package.__name__}.{file.stem}")
        if file.parent.name in REGISTRY:
            monkeypatch.setitem(REGISTRY, file.parent.name, [*REGISTRY[file.parent.name], file.stem])
    importlib.invalidate_caches()
    yield
    for name in modules:
        sys.modules.pop(name, None)


def test_one_file_of_each_kind_is_on_the_page():
    assert len(FILES) == PAGE.count("```python") == 5


def test_methods_answer_the_benchmark(tmp_path):
    config = evaluation("cache.sink=16", "cache.window=144", "batch_size=2")
    config["benchmark"] = {"name": "lockers", "samples": 2}
    axes = {"channels": "largest_key", "tokens": "value_norm", "bits": "per_token"}
    config["method"] = {"dense": {}, **{name: {axis: {"name": name}} for axis, name in axes.items()}}
    config["method"]["value_norm"]["tokens"]["budget"] = 200
    assert run(config, tmp_path / "run") == 8
    rows = [json.loads(line) for line in (tmp_path / "run/results.jsonl").read_text("utf-8").splitlines()]
    scores = {name: [row["score"] for row in rows if row["method"] == name] for name in config["method"]}
    assert scores["dense"] == [1, 1]
    assert all(len(found) == 2 for found in scores.values())


def test_the_channels_are_those_of_the_largest_keys():
    largest = build_method("one", {"channels": {"name": "largest_key", "ratio": 0.6}}, SIZES)
    assert name_of(largest.channels) == "largest_key"
    model = tiny_model("llama")
    ids, mask = left_padded([40, 33], 0)
    cache = largest.cache(model, prefill(model, ids, mask.bool(), 4))
    kept = DIM - int(0.6 * DIM)
    assert cache.memory().middle_k == (40 - 8 + 33 - 8) * HEADS * LAYERS * kept * 8
    for row, length in enumerate((40, 33)):
        alone = prefill(model, ids[row : row + 1, -length:], None, 4)
        for layer, held in zip(alone.layers, cache.compressed, strict=True):
            best = layer.keys[0].abs().amax(1).argsort(descending=True)[:, :kept].sort().values
            assert torch.equal(held.store.channels.index[row, :, :kept].long(), best)


def test_the_tokens_are_those_of_the_largest_values():
    one = build_method("one", {"tokens": {"name": "value_norm", "budget": 20}}, SIZES)
    model = tiny_model("llama")
    found = prefill(model, left_padded([40], 0)[0], None, 4)
    for layer, held in zip(found.layers, one.cache(model, found).compressed, strict=True):
        best = layer.values[0, :, 2:-6].norm(dim=-1).argsort(descending=True, stable=True)[:, :12]
        for head, tokens in enumerate((best + 2).sort().values):
            assert torch.equal(held.store.prompt.read(0, head)[1].view(-1, DIM), layer.values[0, head, tokens])


@pytest.mark.parametrize("name", ["largest_key", "value_norm"])
def test_match_finds_their_sizes(name):
    axis = next(axis for axis, names in REGISTRY.items() if name in names)
    model = tiny_model("llama")
    found = match(build_method("one", {axis: {"name": name}}, SIZES), 0.7, model.config, [4000], 8)
    assert share_of_dense(found, model.config, [4000], 8) == pytest.approx(0.7, rel=0.03)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_grid_is_off_by_half_a_step(bits):
    codec = build_method("one", {"bits": {"name": "per_token", "bits": bits}}, SIZES).bits.of_layer(0, None)
    x = torch.randn(3, 5, 10, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    codes, scale = codec.encode(x, True)
    assert codes.dtype == torch.uint8
    assert codec.pages(10, 10, x.dtype)[0][0] == 64 * math.ceil(10 * bits / 8)
    error = (codec.decode(codes, scale, True) - x).abs()
    assert (error <= scale[..., None] / (2**bits - 1) + 1e-6).all()


def test_a_stage_minimises_the_objective(model_folder, monkeypatch):
    monkeypatch.setattr("leank_train.stages.OBJECTIVES", objectives.objectives())
    backbone = load(str(model_folder), "float32")
    batch = collate(backbone, [Mixture({"multikey": 1}, backbone.tokenizer, 300, 400, questions=2)[0]])
    losses = {}
    for alpha in (1.0, 0.9):
        config = Stage1Config(5, 0.1)
        object.__setattr__(config, "objective", "cosine")  # its annotation knows the files that were there at import
        stage = Stage1(backbone, config, MaskPruning(ratio=0.7, sink=4, window=32), torch.full(backbone.shape, alpha))
        losses[alpha] = stage.distillation(batch)
    assert losses[1.0].abs() < 1e-6 < losses[0.9]
    stage.backward(losses[0.9])
    assert 0 < stage.alpha.grad.norm() < math.inf
