"""Verdicts over training runs, and the masks that are shipped."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from leank import backbone as backbones
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.methods import build_method
from leank.eval.rows import Collected
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from leank.mask import ChannelMask
from leank.shape import DecoderShape, kv_shape
from leank.shipped import SHIPPED, resolve
from leank_train.data import HELD_OUT, collate
from leank_train.recipes import check
from leank_train.recipes.paper import Stage1
from leank_train.train import run
from leank_train.verdict import MASK, NO_MIDDLE, STAGE1, TASKS, Kivi, Verdict, _divergences, equal, judge, mixtures
from tests.helpers.tiny_run import settings


def verdict(masks, ratios, shares=None, noise=(0.9, 1.0, 1.1, 1.2)):
    """Of masks whose KL is the same number on tasks and on text, but for noise that all documents share."""
    losses = {name: {kind: [kl * n for n in noise] for kind in ("tasks", "text")} for name, kl in masks.items()}
    return Verdict(losses, ratios, shares or {})


GOOD = {MASK: 0.02, STAGE1: 0.02, NO_MIDDLE: 0.9, "lowest_frequencies": 0.5, "mask_80pct": 0.03, "mask_50pct": 0.001}
RATIOS = {MASK: 0.7, STAGE1: 0.7, "lowest_frequencies": 0.7, "mask_80pct": 0.8, "mask_50pct": 0.5}


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


def test_every_file_is_judged_by_what_prunes_as_much():
    """The mask of 50% by all that prune more, that of 80% by the collapse alone."""
    found = verdict({**GOOD, "mask_50pct": 0.05}, RATIOS)
    assert found.doubts() == []
    assert len(found.doubts("mask_50pct")) == 4  # on tasks and text: mask.safetensors at .7, and mask_80pct
    assert "at ratio=0.7, which prunes more: use mask.safetensors" in found.doubts("mask_50pct")[0]
    assert found.doubts("mask_80pct") == []
    assert found.metrics["doubts"] == {"mask_50pct": found.doubts("mask_50pct")}
    assert "on 4 held-out documents of tasks its KL" in found.doubts("mask_50pct")[0]


SHARES = {MASK: 0.15, "layout_31pct": 0.31, "equal_2bits": 0.156, "equal_4bits": 0.281, "kivi": 0.1875, "kivi4": 0.3125}
KLS = {MASK: 0.002, "layout_31pct": 0.001, "equal_2bits": 0.02, "equal_4bits": 0.0012, "kivi": 0.01, "kivi4": 0.0012}


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({}, MASK, None),
        ({}, "layout_31pct", None),
        ({"equal_4bits": 0.0001}, "layout_31pct", "at bytes=0.281 with equal_4bits: use masks/equal_4bits.safetensors"),
        ({"kivi": 0.0001}, "layout_31pct", "at bytes=0.188 with kivi: take the method kivi"),
        ({"kivi4": 0.0001}, "layout_31pct", "at bytes=0.312 with kivi4: take the method kivi4"),  # equal bytes
        ({"kivi4": 0.0001, "equal_4bits": 0.0001}, MASK, None),  # they take more bytes
        ({MASK: 0.0001}, "layout_31pct", "with leank: use mask.safetensors"),
        ({"equal_2bits": 0.5}, "equal_2bits", None),  # a rival alone
    ],
)
def test_a_layout_has_to_beat_what_takes_no_more_bytes(change, name, said):
    doubts = verdict({**KLS, NO_MIDDLE: 0.9, **change}, {}, SHARES).doubts(name)
    assert bool(doubts) == (said is not None)
    assert all(said in doubt for doubt in doubts)


def test_one_document_gives_figures_and_neither_doubt_nor_interval():
    one = verdict({**GOOD, NO_MIDDLE: 0.001}, RATIOS, noise=(1.0,))
    assert one.doubts() == []
    assert one.figures(MASK) == {"tasks": [0.02], "text": [0.02]}
    assert one.metrics["documents"] == 1
    assert len(verdict(GOOD, RATIOS).figures(MASK)["text"]) == 3


def test_kivi_is_a_layout_with_cells_of_its_own_size(model_folder):
    config = check(settings(model_folder))
    backbone = backbones.load(str(model_folder), "float32")
    batch = collate(backbone, [mixtures(config, backbone)[TASKS][2 * HELD_OUT]])
    forms = {"layout": equal(backbone.shape, 2)}
    forms |= {f"kivi{bits}": Kivi.of(backbone.shape, bits) for bits in (2, 4)}
    found = dict(_divergences(config, backbone, batch, forms, None))
    assert 0 < found["kivi4"] < found["kivi2"]
    assert found["kivi2"] != found["layout"]
    assert Kivi.of(DecoderShape(2, 2, 64), 4).middle_bytes == pytest.approx(5 / 16)


@pytest.mark.parametrize("compensated", [False, True])
def test_the_divergence_is_that_of_a_stage(model_folder, compensated):
    config = check(settings(model_folder, "stage1=steered"))
    assert config.stage1.objective == "kl"
    backbone = backbones.load(str(model_folder), "float32")
    keep = torch.rand(tuple(backbone.shape), generator=torch.Generator().manual_seed(0)) < 0.3
    keep[0, 1] = False
    means = torch.randn(tuple(backbone.shape), generator=torch.Generator().manual_seed(1)) if compensated else None
    drop = replace(config.stage1, empty_heads="drop")
    stage = Stage1(backbone, drop, config.pruning, keep.float(), config.trainer, means)
    for mixture in mixtures(config, backbone).values():
        batch = collate(backbone, [mixture[2 * HELD_OUT]])
        found = dict(_divergences(config, backbone, batch, {"mine": keep, "dense": torch.ones_like(keep)}, means))
        assert found["mine"] == pytest.approx(float(stage.distillation(batch).detach()), rel=1e-5)
        assert found["dense"] == pytest.approx(0, abs=1e-6)
        assert found["mine"] > 1e-4


def test_a_run_writes_its_verdict_and_a_doubted_mask_warns_when_it_is_loaded(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Verdict, "doubts", lambda self, name: ["it has collapsed"])
    run(settings(model_folder, "extra_ratios=[0.9]"), tmp_path)
    found = json.loads((tmp_path / "metrics.json").read_text())["verdict"]
    assert {*found["kl"]} == {MASK, STAGE1, "mask_90pct", "lowest_frequencies", NO_MIDDLE}
    assert all(found["kl"][name][TASKS] > 0 for name in found["kl"])
    for file in ("mask.safetensors", "masks/mask_90pct.safetensors", "stage1/mask_align4.safetensors"):
        with pytest.warns(UserWarning, match="it has collapsed"):
            assert ChannelMask.load(tmp_path / file).metadata["heldout_documents"] == found["documents"]


def test_the_verdict_reads_as_many_different_documents_of_each_kind_as_it_says(model_folder):
    config = check(settings(model_folder, "validation.heldout=2"))
    backbone = backbones.load(str(model_folder), "float32")
    keep = torch.rand(tuple(backbone.shape), generator=torch.Generator().manual_seed(0)) < 0.3
    losses = judge(config, backbone, {MASK: ChannelMask(keep, {"ratio": 0.7})}).losses[MASK]
    assert len({*losses[TASKS], *losses["text"]}) == 4


FOLDERS = {name: Path(resolve(name)) for name in SHIPPED}
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
