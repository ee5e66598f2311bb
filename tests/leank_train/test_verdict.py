"""The verdict: what is doubted, and its figures against the loss of a stage."""

import json

import pytest
import torch

from leank import backbone as backbones
from leank.mask import ChannelMask
from leank_train.settings import check
from leank_train.stages import Stage1
from leank_train.train import run
from leank_train.verdict import MASK, NO_MIDDLE, STAGE1, TASKS, Verdict, _divergences, _documents
from tests.helpers.tiny_run import settings


def verdict(masks, ratios):
    """Of masks whose KL is the same number on tasks and on text, but for noise that all documents share."""
    noise = [0.9, 1.0, 1.1, 1.2]
    losses = {name: {kind: [kl * n for n in noise] for kind in ("tasks", "text")} for name, kl in masks.items()}
    return Verdict(losses, ratios)


GOOD = {MASK: 0.02, STAGE1: 0.02, NO_MIDDLE: 0.9, "lowest_frequencies": 0.5, "mask_80pct": 0.03, "mask_50pct": 0.001}
RATIOS = {MASK: 0.7, "mask_80pct": 0.8, "mask_50pct": 0.5}


def test_nobody_doubts_a_good_mask():
    assert verdict(GOOD, RATIOS).doubts() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({NO_MIDDLE: 0.01}, "worse than with no middle at all"),
        ({NO_MIDDLE: 0.03}, "it has collapsed"),
        ({"lowest_frequencies": 0.01}, "lowest frequencies, which cost no training"),
        ({STAGE1: 0.01}, "without stage 2: use the mask in stage1/"),
        ({"mask_80pct": 0.01}, "at ratio=0.8, which prunes more: use masks/mask_80pct.safetensors"),
    ],
)
def test_a_mask_that_another_beats_is_doubted(change, said):
    doubts = verdict({**GOOD, **change}, RATIOS).doubts()
    assert doubts
    assert all(said in doubt for doubt in doubts)


def test_a_difference_within_the_noise_is_no_doubt():
    losses = {name: {kind: [kl, kl] for kind in ("tasks", "text")} for name, kl in GOOD.items()}
    losses["mask_80pct"] = {kind: [0.001, 0.03] for kind in ("tasks", "text")}
    assert Verdict(losses, RATIOS).doubts() == []


@pytest.mark.parametrize("compensated", [False, True])
def test_the_divergence_is_that_of_a_stage(model_folder, compensated):
    config = check(settings(model_folder, "stage1=steered"))
    assert config.stage1.objective == "kl"
    backbone = backbones.load(str(model_folder), "float32")
    keep = torch.rand(tuple(backbone.shape), generator=torch.Generator().manual_seed(0)) < 0.3
    keep[0, 1] = False
    means = torch.randn(tuple(backbone.shape), generator=torch.Generator().manual_seed(1)) if compensated else None
    stage = Stage1(backbone, config.stage1, config.pruning, parallel=config.trainer, mean_keys=means)
    for _, batch in _documents(config, backbone, 1):
        found = _divergences(config, backbone, batch, {"mine": keep, "dense": torch.ones_like(keep)}, means)
        assert found["mine"] == pytest.approx(float(stage.distillation(batch, keep)), rel=1e-5)
        assert found["dense"] == pytest.approx(0, abs=1e-6)
        assert found["mine"] > 1e-4


def test_a_run_writes_its_verdict_and_a_doubted_mask_warns_when_it_is_loaded(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Verdict, "doubts", lambda self: ["it has collapsed"])
    run(settings(model_folder, "extra_ratios=[0.9]"), tmp_path)
    found = json.loads((tmp_path / "metrics.json").read_text())["verdict"]
    assert {*found["kl"]} == {MASK, STAGE1, "mask_90pct", "lowest_frequencies", NO_MIDDLE}
    assert all(found["kl"][name][TASKS] > 0 for name in found["kl"])
    with pytest.warns(UserWarning, match="it has collapsed"):
        ChannelMask.load(tmp_path / "mask.safetensors")
