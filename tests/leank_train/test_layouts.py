"""Layouts of bits: what a run leaves, that bytes and losses are what they say, and what is refused."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from leank import backbone as backbones
from leank.allocation import allocate
from leank.head import Head
from leank.mask import ChannelMask
from leank.precision import KEY_BITS, VALUE_BITS, Precision
from leank.typed import BadConfig
from leank_train import layouts
from leank_train.data import HELD_OUT, collate
from leank_train.forward.stored import stored_student
from leank_train.layouts import LEARNED, LayoutStage, closed_form
from leank_train.objective.kl import kl_loss
from leank_train.settings import check
from leank_train.stages import Stage, read
from leank_train.train import run
from tests.helpers.tiny_run import at_step, killed, settings

LAYOUTS = (
    "stage1=steered", "stage1.steps=6", "stage2.steps=0", "pruning.align=16", "pruning.compensation=mean",
    "pruning.bytes=0.3", "pruning.nested=[0.15,0.5]",
)  # fmt: skip
BUDGETS = {"masks/layout_15pct": 0.15, "mask": 0.3, "masks/layout_50pct": 0.5}


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("layouts")
    run(settings(model_folder, *LAYOUTS), out)
    return out


@pytest.fixture
def stage(model_folder):
    config = check(settings(model_folder, *LAYOUTS))
    return LayoutStage(backbones.load(str(model_folder), "float32"), config.stage1, config.pruning)


def test_a_run_leaves_a_layout_for_every_budget(finished):
    masks = [ChannelMask.load(finished / f"{name}.safetensors") for name in BUDGETS]
    for mask, budget in zip(masks, BUDGETS.values(), strict=True):
        assert 0 < mask.middle_bytes <= budget
        assert mask.metadata["bytes"] == budget
        assert mask.mean_keys is not None
        assert {*mask.metadata["heldout"]} == {"tasks", "text"}
    for small, large in pairwise(masks):
        assert (small.precision.key_bits <= large.precision.key_bits).all()
        assert small.middle_bytes < large.middle_bytes
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["bytes"] == masks[1].middle_bytes
    names = {"leank", "layout_15pct", "layout_50pct", "closed_form", "closed_form_15pct", "closed_form_50pct"}
    assert {*metrics["verdict"]["kl"]} == names | {"equal_2bits", "equal_3bits", "equal_4bits", "no_middle"}
    closed = ChannelMask.load(finished / "masks/closed_form.safetensors")
    assert closed.middle_bytes <= 0.3
    path = load_file(finished / "alpha.safetensors")["path"]
    assert path.shape == (2, 2, 17, LEARNED)
    assert (path[..., :-1] >= path[..., 1:]).all()  # a width is given up before the one below it
    assert 0 < path.min() + path.max() <= 2


def test_the_same_command_again_does_no_step_and_gives_the_same(finished, model_folder, monkeypatch):
    files = [f"{name}.safetensors" for name in BUDGETS]
    before = {f: (finished / f).read_bytes() for f in files}
    monkeypatch.setattr(Stage, "training_step", lambda *args: pytest.fail("a step was taken"))
    run(settings(model_folder, *LAYOUTS), finished)
    assert {f: (finished / f).read_bytes() for f in files} == before


def test_a_run_that_was_killed_ends_as_one_that_was_not(finished, model_folder, tmp_path):
    assert killed(lambda: (at_step(4), run(settings(model_folder, *LAYOUTS), tmp_path)))
    run(settings(model_folder, *LAYOUTS, "validation.heldout=0"), tmp_path)
    same = [load_file(folder / "alpha.safetensors")["path"] for folder in (finished, tmp_path)]
    assert torch.equal(*same)


def test_without_steps_the_closed_form_gives_the_layouts(finished, model_folder, tmp_path):
    run(settings(model_folder, *LAYOUTS, "stage1.steps=0"), tmp_path)
    masks = (tmp_path / "mask.safetensors", finished / "masks/closed_form.safetensors")
    mine, beside = (ChannelMask.load(path).precision for path in masks)
    assert torch.equal(mine.key_bits, beside.key_bits)
    assert torch.equal(mine.value_bits, beside.value_bits)
    assert not (tmp_path / "masks/closed_form.safetensors").exists()


def test_bytes_are_those_of_the_layout(stage):
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        of_keys = torch.randint(0, LEARNED + 1, (2, 2), generator=generator)  # a block of 16 is a head here
        of_values = torch.randint(1, LEARNED + 1, (2, 2), generator=generator)
        at = torch.cat([of_keys[..., None].expand(2, 2, 16), of_values[..., None]], -1)
        at[of_keys == 0] = 0  # a head keeps both or neither
        stage.alpha.data = at / LEARNED
        bits = torch.tensor(KEY_BITS, dtype=torch.uint8)[at]
        torch.testing.assert_close(stage.widths().to(torch.uint8), bits)
        precision = Precision(bits[..., :-1], bits[..., -1].clamp(min=VALUE_BITS[0]))
        assert float(stage.stored().detach()) == pytest.approx(precision.middle_bytes, rel=1e-6)


def test_what_lasted_longest_is_stored_first(stage):
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        stage.alpha.data = torch.rand(stage.alpha.shape, generator=generator)
        stage.trace()
    stage.path /= 30
    losses = stage.losses()
    gains = (losses.keys[..., :LEARNED] - losses.keys[..., 1 : LEARNED + 1]) / stage.costs[0].double()
    torch.testing.assert_close(gains, stage.path[..., :-1, :].double())
    assert (losses.keys[..., LEARNED] == 0).all()
    whole = losses.keys[..., 0].sum(-1) + losses.values[..., 0] + stage.path[..., -1, 0] * stage.costs[-1, 0]
    torch.testing.assert_close(losses.empty, whole.double())
    allocate(*losses, [0.2])


def test_the_closed_form_predicts_what_is_measured(model_folder, monkeypatch):
    """One head without its middle, or with 8 or 4 bits for its keys or values: KL is what the losses sum up to."""
    monkeypatch.setattr(layouts, "DOCUMENTS", 2)
    monkeypatch.setattr(layouts, "DRAWS", 60)
    config = check(settings(model_folder, *LAYOUTS))
    backbone = backbones.load(str(model_folder), "float32")
    losses = closed_form(config, backbone, None)
    documents = config.mixture(backbone, per_length=config.data.documents)
    wholes = [collate(backbone, [documents[3 * HELD_OUT + i]]) for i in range(2)]
    predicted, measured = [], []
    whole = torch.full((*losses.keys.shape[:2], losses.keys.shape[2] + 1), 16.0)
    for name, bits in (("empty", 0), ("keys", 8), ("keys", 4), ("values", 8), ("values", 4)):
        for head in range(2):
            widths = whole.clone()
            widths[1, head, slice(-1, None) if name == "values" else slice(-1)] = bits
            found = 0.0
            for batch in wholes:
                prefix, question, full = read(backbone.model, batch, "auto", None)
                hidden = stored_student(
                    backbone.model, prefix, question, batch.answers.ids, batch.answers.lengths, widths,
                    sink=4, window=32, empty_heads="drop",
                )  # fmt: skip
                found += float(kl_loss(Head.of(backbone.model), full, hidden, batch.answers.lengths)) / 2
            measured.append(found)
            of_widths = {
                "empty": losses.empty[1, head],
                "keys": losses.keys[1, head, :, KEY_BITS.index(bits)].sum(),
                "values": losses.values[1, head, VALUE_BITS.index(max(2, bits))],
            }
            predicted.append(float(of_widths[name]))
    ratio = torch.tensor(measured) / torch.tensor(predicted)
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), ratio
    assert (losses.keys[..., -1] == 0).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("stage2.steps=1", "stage2.steps=0"),
        ("stage1.patience=1", "stage1.patience=0"),
        ("stage1.lam=0.1", "stage1.lam=auto"),
        ("extra_ratios=[0.5]", r"extra_ratios=\[\]"),
        ("pruning.nested=[0.0]", "budgets above 0"),
        ("pruning.align=8", "pruning.align=8"),
        ("pruning.bytes=1.5", "pruning.bytes"),
        ("trainer.sequence_parallel=2", "trainer.sequence_parallel"),
    ],
)
def test_what_a_layout_cannot_have_is_refused(model_folder, changed, said):
    with pytest.raises(BadConfig, match=said):
        check(settings(model_folder, *LAYOUTS, changed))
