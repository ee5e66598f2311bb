"""The models that the package ships: what is in their folders, and that their cards tell the truth."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
from safetensors import safe_open

from leank import backbone as backbones
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.methods import build_method
from leank.eval.rows.results import Collected
from leank.eval.run.job import Job
from leank.eval.run.settings import Settings
from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.shipped import SHIPPED

FOLDERS = {name: Path(str(files("leank_train"))) / "assets" / name for name in SHIPPED}
MASKS = [(name, mask.name) for name, folder in FOLDERS.items() for mask in sorted(folder.glob("mask_*"))]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_describes_the_weights(name):
    folder, config = FOLDERS[name], backbones.load_config(name)
    card = (folder / "README.md").read_text(encoding="utf-8")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        sizes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118
    parameters = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)
    kv = config.num_key_value_heads
    heads = f"{config.num_attention_heads} query, {kv} KV ({config.num_hidden_layers * kv} KV heads in all)"
    for row in (
        f"| layers, width, MLP | {config.num_hidden_layers}, {config.hidden_size}, {config.intermediate_size:,} |",
        f"| heads | {heads}, head_dim {config.head_dim} |",
    ):
        assert row in card
    assert f"{config.vocab_size:,} tokens, digits one by one" in card
    told = float(re.search(r"\| parameters \| ([\d.]+) M", card).group(1))
    assert told == pytest.approx(parameters / 1e6, rel=0.005)
    assert f"trained to {config.max_position_embeddings:,} tokens" in card
    assert len(backbones.load_tokenizer(name)) == config.vocab_size


def test_there_are_masks():
    assert {name for name, _ in MASKS} == {*SHIPPED}


@pytest.mark.parametrize(("name", "file"), MASKS)
def test_a_shipped_mask_fits_its_model(name, file):
    mask = ChannelMask.load(FOLDERS[name] / file)
    assert tuple(mask.keep.shape) == tuple(kv_shape(backbones.load_config(name)))
    wanted = float(re.search(r"mask_(\d+)pct", file).group(1)) / 100
    assert mask.metadata["ratio"] == wanted
    assert abs(mask.pruning_ratio - wanted) < 0.02
    assert (mask.metadata["sink"], mask.metadata["window"]) == (16, 144)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_model_retrieves_and_so_do_its_masks(name):
    """Two needles in text of 1,024 tokens."""
    model, tokenizer = ModelConfig(name, "float32", device="cpu"), backbones.load_tokenizer(name)
    masks = {file: {"name": "leank", "mask": str(FOLDERS[name] / file)} for owner, file in MASKS if owner == name}
    methods = [
        build_method("dense"),
        *(build_method(m, {"channels": c}, {"sink": 16, "window": 144}) for m, c in masks.items()),
    ]
    rows, needles = Collected(), Ruler(["niah_multikey_1"], [1024], samples=2, seed=7, split="test")
    Job(model, methods, needles, Settings(batch_size=2, max_new_tokens=16)).run(rows, load_model(model), tokenizer)
    assert {(r["method"], r["sample"]): r["score"] for r in rows.rows} == {
        (m.label, i): 1.0 for m in methods for i in "01"
    }
