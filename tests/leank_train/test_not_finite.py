"""Weights, scores and masks that are no numbers are named before anything is computed from them."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank.eval.inference.models import ModelConfig, load_model
from leank.mask import FORMAT, ChannelMask
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank_train.stages import Stage
from leank_train.train import run
from tests.helpers.refusals import says
from tests.helpers.tiny_run import save_model, settings


@pytest.fixture
def no_step(monkeypatch):
    """Training must not begin."""
    monkeypatch.setattr(Stage, "training_step", lambda *args: pytest.fail("training has begun"))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_model_whose_weights_are_not_finite(tmp_path, no_step, value):
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    broken = r"NaN or infinite numbers in 2 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.we"
    says(lambda: run(settings(folder), tmp_path / "run"), re.escape(f"model.name='{folder}' has"), broken)
    says(lambda: load_model(ModelConfig(str(folder), device="cpu")), broken)


def test_weights_that_float16_cannot_hold(tmp_path):
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_model(ModelConfig(str(folder), device="cpu"))
    said = r"in 1 tensor, such as model\.norm\.weight; .*, or set model\.dtype=bfloat16, as float16 ends at 65504"
    says(lambda: load_model(ModelConfig(str(folder), dtype="float16", device="cpu")), said)


@pytest.mark.parametrize("name", ["last", "done"])
def test_scores_that_are_not_finite_are_named_before_a_step(model_folder, tmp_path, monkeypatch, name):
    run(settings(model_folder, "stage1.steps=2", "stage2.steps=0"), tmp_path)
    file = tmp_path / f"checkpoints/stage1/{name}.ckpt"
    state = read_checkpoint(file, "")
    (state["state_dict"] if name == "last" else state)["alpha"][1, 0, 3] = math.nan
    write_checkpoint(file, state)
    if name == "last":
        file.with_name("done.ckpt").unlink()
    monkeypatch.setattr(Stage, "training_step", lambda *args: pytest.fail("training has begun"))
    says(
        lambda: run(settings(model_folder, "stage1.steps=2", "stage2.steps=0"), tmp_path),
        rf"{name}\.ckpt holds NaN or infinite scores in 1 of 4 KV heads, such as layer 1, head 0; .*remove it",
    )


@pytest.mark.parametrize(
    ("keep", "header", "said"),
    [
        (torch.full((2, 2, 16), math.nan), {}, r"holds torch.float32 \[2, 2, 16\], and a mask is bool \[layers"),
        (torch.ones(2, 16, dtype=torch.bool), {}, r"holds torch.bool \[2, 16\], and a mask is bool"),
        (torch.ones(2, 2, 16, dtype=torch.bool), {"metadata": json.dumps("x" * 2**21)}, "its metadata has 2097154"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no sha256")
def test_a_mask_that_is_none_is_named(tmp_path, keep, header, said):
    save_file({"keep": keep}, tmp_path / "m.safetensors", {"format": FORMAT, "metadata": "{}", **header})
    says(lambda: ChannelMask.load(tmp_path / "m.safetensors"), rf"mask={tmp_path}/m\.safetensors .*{said}")
