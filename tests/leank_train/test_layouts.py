"""Layouts of bits: what a run leaves, that bytes and losses are what they say, and what is refused."""

import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from leank import backbone as backbones
from leank.allocation import Grid, allocate, blocks, channel_scores, first_gains, gains, key_costs, value_costs
from leank.head import Head
from leank.mask import ChannelMask
from leank.precision import KEY_BITS, ROOM, VALUE_BITS
from leank.shape import DecoderShape
from leank.tensor_files import DamagedFile, read_checkpoint
from leank.typed import BadConfig
from leank_train import closed_form as closing
from leank_train.closed_form import Losses, closed_form
from leank_train.data import HELD_OUT, collate
from leank_train.forward.stored import rounded, stored_student
from leank_train.objective.distill import counted
from leank_train.objective.kl import kl_loss
from leank_train.recipes import check, layouts
from leank_train.recipes.factors import MaskStage
from leank_train.recipes.layouts import LayoutPruning, LayoutStage
from leank_train.recipes.recipe import MaskPruning
from leank_train.run_folder import Run
from leank_train.stages import StageConfig, read
from leank_train.train import run
from leank_train.verdict import KIVI
from tests.conftest import tiny_model
from tests.helpers.layouts import loss_of, random_losses
from tests.helpers.tiny_run import at_step, killed, settings

LAYOUTS = (
    "stage1=steered", "stage1.steps=6", "stage2.steps=0", "pruning.align=16", "pruning.compensation=mean",
    "pruning.bytes=0.3", "pruning.nested=[0.15,0.5]",
    "data.calibration=3",  # the closed form takes most of the time of so small a run
)  # fmt: skip
BUDGETS = {"masks/layout_15pct": 0.15, "mask": 0.3, "masks/layout_50pct": 0.5}


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("layouts")
    run(settings(model_folder, *LAYOUTS), out)
    return out


def stage_of(closed, budget=0.1):
    """A stage that begins at losses of a closed form; the model is no part of it."""
    shape, pruning = DecoderShape(*closed.keys.shape[:3]), LayoutPruning(align=ROOM, bytes=budget)
    backbone = SimpleNamespace(model=tiny_model("llama"), shape=shape)
    return LayoutStage(backbone, StageConfig(6, 0.1), pruning, closed, budget)


def test_documents_draw_labels_of_their_own():
    seeds = [7 + closing.DOCUMENT_SEEDS * i for i in range(100)]
    draws = {tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds}
    assert len(draws) == 100


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
    assert {*metrics["verdict"]["kl"]} == names | {"equal_2bits", "equal_3bits", "equal_4bits", "no_middle", *KIVI}
    closed = ChannelMask.load(finished / "masks/closed_form.safetensors")
    assert closed.middle_bytes <= 0.3
    path = load_file(finished / "alpha.safetensors")["path"]
    assert path.shape == (2, 2, 3)  # one block of K, V and the drop of each head
    assert (path != 0.5).any()
    assert ((path >= 0) & (path <= 1)).all()


def test_a_run_that_was_killed_ends_as_one_that_was_not(finished, model_folder, tmp_path):
    assert killed(lambda: (at_step(4), run(settings(model_folder, *LAYOUTS), tmp_path)))
    run(settings(model_folder, *LAYOUTS, "validation.heldout=0"), tmp_path)
    same = [load_file(folder / "alpha.safetensors")["path"] for folder in (finished, tmp_path)]
    assert torch.equal(*same)


def test_a_closed_form_that_was_stopped_goes_on_from_its_last_document(model_folder, tmp_path, monkeypatch, capsys):
    config = settings(model_folder, *LAYOUTS, "stage1.steps=0", "validation.heldout=0")
    run(config, tmp_path / "whole")
    write, seen = closing.write_checkpoint, []

    def stopped(path, state):
        write(path, state)
        seen.append(state["documents"])
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(closing, "write_checkpoint", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped")
    capsys.readouterr()
    run(config, tmp_path / "stopped")
    assert seen == [1, 2, 3]
    assert re.search(r"closed form: .*, from 3 documents: 10 of 15 passes; .* left", capsys.readouterr().out)
    mine, other = (ChannelMask.load(tmp_path / name / "mask.safetensors").precision for name in ("whole", "stopped"))
    assert torch.equal(mine.key_bits, other.key_bits)
    kept = [read_checkpoint(tmp_path / name / "checkpoints/closed_form.ckpt", "") for name in ("whole", "stopped")]
    assert all(torch.equal(kept[0][part], kept[1][part]) for part in ("keys", "values", "empty"))
    (tmp_path / "stopped/checkpoints/closed_form.ckpt").write_bytes(b"x")
    with pytest.raises(DamagedFile, match=r"closed_form\.ckpt is damaged .*; remove it, and the closed form"):
        run(config, tmp_path / "stopped")


def test_a_run_packs_scales(finished, model_folder, tmp_path):
    """Every layout of it, and what they cost is what fits."""
    config = settings(model_folder, *LAYOUTS, "pruning.scales=packed", "stage1.steps=2", "validation.heldout=1")
    metrics = run(config, tmp_path)
    for name in ("mask", "masks/layout_15pct", "masks/closed_form", "masks/equal_2bits"):
        mask = ChannelMask.load(tmp_path / f"{name}.safetensors")
        assert mask.precision.packed
    whole, packed = (ChannelMask.load(out / "mask.safetensors").precision for out in (finished, tmp_path))
    assert not whole.packed
    assert packed.middle_bytes <= 0.3
    assert packed.key_bits.sum() + packed.value_bits.sum() > whole.key_bits.sum() + whole.value_bits.sum()
    assert metrics["verdict"]["bytes"]["equal_2bits"] == mask.middle_bytes


def test_without_steps_the_closed_form_gives_the_layouts(finished, model_folder, tmp_path):
    run(settings(model_folder, *LAYOUTS, "stage1.steps=0"), tmp_path)
    masks = (tmp_path / "mask.safetensors", finished / "masks/closed_form.safetensors")
    mine, beside = (ChannelMask.load(path).precision for path in masks)
    assert torch.equal(mine.key_bits, beside.key_bits)
    assert torch.equal(mine.value_bits, beside.value_bits)
    assert not (tmp_path / "masks/closed_form.safetensors").exists()


def test_without_steps_and_budget_the_closed_form_gives_nested_masks(model_folder, tmp_path, caplog):
    given = [setting for setting in LAYOUTS if "bytes" not in setting and "nested" not in setting]
    config = settings(model_folder, *given, "stage1.steps=0", "pruning.ratio=0.5", "extra_ratios=[0.75]")
    assert run(config, tmp_path)["separation"] == {}
    assert "arbitrary" not in caplog.text  # of the cut: ranks are spread evenly
    wide, narrow = (ChannelMask.load(tmp_path / name) for name in ("mask.safetensors", "masks/mask_75pct.safetensors"))
    assert (wide.pruning_ratio, narrow.pruning_ratio) == (0.5, 0.75)
    assert (narrow.keep <= wide.keep).all()
    assert wide.mean_keys is not None
    scores = load_file(tmp_path / "alpha.safetensors")["alpha"]
    assert scores.unique().numel() == scores.numel()  # every channel has its rank
    assert {"leank", "mask_75pct"} < {*json.loads((tmp_path / "metrics.json").read_text())["verdict"]["kl"]}


def test_factors_of_a_mask_give_nested_masks(model_folder, tmp_path):
    """Beside the closed form's; the same command again does no step."""
    given = [setting for setting in LAYOUTS if "bytes" not in setting and "nested" not in setting]
    given += ["pruning.learns=factors", "pruning.ratio=0.5", "pruning.nested=[0.25,0.75]", "pruning.align=1"]
    first = run(settings(model_folder, *given), tmp_path)
    names = "masks/mask_25pct", "mask", "masks/mask_75pct", "masks/closed_form"
    *masks, closed = [ChannelMask.load(tmp_path / f"{name}.safetensors") for name in names]
    assert [mask.pruning_ratio for mask in (*masks, closed)] == [0.25, 0.5, 0.75, 0.5]
    for wide, narrow in pairwise(masks):
        assert (narrow.keep <= wide.keep).all()
        assert torch.equal(wide.mean_keys, narrow.mean_keys)
    assert masks[0].mean_keys.abs().max() > 0
    assert closed.mean_keys is not None
    path = read_checkpoint(tmp_path / "checkpoints/stage1/done.ckpt", "")["alpha"]
    assert (path != 0.5).any()
    assert ((path >= 0) & (path <= 1)).all()
    assert {"leank", "closed_form", "mask_25pct", "mask_75pct"} < {*first["verdict"]["kl"]}
    again = run(settings(model_folder, *given), tmp_path)
    assert again["verdict"] == first["verdict"]


def test_factors_need_no_nested_masks(model_folder, tmp_path):
    given = [setting for setting in LAYOUTS if "bytes" not in setting and "nested" not in setting]
    given += ["pruning.learns=factors", "pruning.ratio=0.5", "stage1.steps=1", "data.calibration=1"]
    run(settings(model_folder, *given), tmp_path)
    assert ChannelMask.load(tmp_path / "mask.safetensors").pruning_ratio == 0.5


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8])
def test_a_mask_stage_without_factors_is_the_closed_form(ratio, monkeypatch):
    """Its hard waterline keeps the channels that the closed form's scores keep, and what they cost is expected."""
    monkeypatch.setattr(layouts, "SOFT", 1e-9)
    closed = Losses(*random_losses(1, heads=3, blocks=12))
    shape, align = DecoderShape(*closed.keys.shape[:3]), 4
    backbone = SimpleNamespace(model=tiny_model("llama"), shape=shape)
    pruning = MaskPruning(ratio=ratio, align=align)
    stage = MaskStage(backbone, StageConfig(6, 0.1), pruning, closed.of_masks, 1 - ratio).double()
    with torch.no_grad():
        stage.path.fill_(0.5)
    scores = channel_scores(closed.keys[..., 0], closed.empty, align)
    assert torch.equal(stage.channel_scores(), scores)
    fills = stage.fills(stage.waterline(1 - ratio)).detach().round()
    found = stage.widths(fills)
    keep = (found[..., :-2] > 0) & (found[..., -1:] > 0)
    share = float(keep.double().mean())
    assert abs(share - (1 - ratio)) < 0.15  # a step along a hull may be several blocks
    assert torch.equal(keep, ChannelMask.from_scores(scores, 1 - share, align, "nearest").keep)
    assert float(stage.bytes(fills)) == pytest.approx(share)
    lost = torch.where(keep.any(-1), (closed.keys[..., 0] * ~keep).sum(-1), closed.empty).sum()
    assert float(stage.expected(fills)) == pytest.approx(float(lost), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_hard_waterline_is_what_allocate_gives(seed, monkeypatch):
    """Where no width is filled in part, the student reads the layout of this budget, and bytes and loss are its own."""
    monkeypatch.setattr(layouts, "SOFT", 1e-9)
    closed = Losses(*random_losses(seed, heads=3, blocks=3))
    stage = stage_of(closed).double()
    stage.gains = exact_gains(stage, closed)
    for budget in (0.15, 0.3, 0.45):
        (layout,) = allocate(*closed, [budget], ROOM)
        fills = stage.fills(stage.waterline(layout.middle_bytes + 1e-7)).round()
        found = stage.widths(fills)
        kept = layout.keep.any(-1)
        assert torch.equal(found[..., -1] > 0, kept)
        assert torch.equal(found[..., :-2][kept], layout.key_bits[kept].double())
        assert torch.equal(found[..., -2][kept], layout.value_bits[kept].double())
        assert float(stage.bytes(fills)) == pytest.approx(layout.middle_bytes, rel=1e-6)
        assert float(stage.expected(fills)) == pytest.approx(loss_of(layout, *closed), rel=1e-5, abs=1e-6)


def exact_gains(stage, closed):
    """The logarithms of the stage's gains in double: a stage has them in float32."""
    of_blocks = blocks(closed.keys, ROOM)[1]
    of_keys, of_values = gains(of_blocks, ROOM * key_costs()), gains(closed.values, value_costs(closed.keys.shape[2]))
    of_heads = first_gains(of_blocks, closed.values, closed.empty, ROOM, Grid.of_layouts(closed.keys.shape[2]))
    found = torch.zeros_like(stage.gains)
    found[..., :-2, :], found[..., -2, :-1], found[..., -1, 0] = of_keys, of_values, of_heads
    for head in range(found.shape[1]):  # the first step of a head pays for its first block, too
        first = int(of_keys[0, head, :, 0].argmax())
        for i in range(5):
            if of_keys[0, head, first, i] == of_keys[0, head, first, 0]:
                found[0, head, first, i] = max(of_heads[0, head], of_keys[0, head, first, i])
    found = found.clamp(min=1e-30).log()
    torch.testing.assert_close(stage.gains, found, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("budget", [0.15, 0.3])
def test_the_gradient_keeps_the_bytes(budget):
    """What one factor gains the others lose: the widths' gradient is that of a waterline found anew."""
    stage = stage_of(Losses(*random_losses(0, heads=3, blocks=3))).double()
    with torch.no_grad():
        stage.alpha += 0.02 * torch.randn(stage.alpha.shape, generator=torch.Generator().manual_seed(0))
    fills = stage.fills(stage.waterline(budget))
    assert float(stage.bytes(fills)) == pytest.approx(budget, abs=1e-6)
    weights = torch.rand(stage.widths(fills).shape, generator=torch.Generator().manual_seed(1)).double()
    (found,) = torch.autograd.grad((stage.widths(fills) * weights).sum(), stage.alpha, retain_graph=True)
    (of_bytes,) = torch.autograd.grad(stage.bytes(fills), stage.alpha)
    wanted, step = torch.zeros_like(found), 1e-6
    for i in range(found.numel()):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                stage.alpha.view(-1)[i] += sign * step
                ends.append((stage.widths(stage.fills(stage.waterline(budget))) * weights).sum())
                stage.alpha.view(-1)[i] -= sign * step
        wanted.view(-1)[i] = (ends[0] - ends[1]) / (2 * step)
    assert float(of_bytes.abs().max()) < 0.02 * float(found.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()))


def test_a_larger_factor_gets_more_bytes():
    closed = Losses(*random_losses(3, heads=3, blocks=3))
    stage = stage_of(closed)
    stage.path.fill_(0.5)
    for mine, of_closed in zip(stage.losses(), closed, strict=True):  # factors of one
        torch.testing.assert_close(mine, of_closed)
    budgets = [0.15, 0.2, 0.3, 0.4]
    before = allocate(*closed, budgets)
    stage.path[0, 1] = 1.0
    after = allocate(*stage.losses(), budgets)
    spent = [[sum(x[0, 1] for x in layout.token_bytes()) for layout in found] for found in (before, after)]
    assert all(a <= b for a, b in zip(*spent, strict=True))
    assert sum(spent[0]) < sum(spent[1])
    factor = torch.tensor(layouts.SPAN, dtype=torch.float64).exp()
    torch.testing.assert_close(stage.losses().empty[0, 1], closed.empty[0, 1] * factor)
    torch.testing.assert_close(stage.losses().keys[0, 1].sum(0), closed.keys[0, 1].sum(0) * factor)
    torch.testing.assert_close(stage.losses().keys[0, 0].sum(0), closed.keys[0, 0].sum(0))


def test_the_closed_form_predicts_what_is_measured(model_folder, tmp_path, monkeypatch):
    """One head without its middle, or with 8 or 4 bits for its keys or values: KL is what the losses sum up to."""
    monkeypatch.setattr(closing, "DRAWS", 60)
    config = check(settings(model_folder, *LAYOUTS, "data.calibration=2"))
    backbone = backbones.load(str(model_folder), "float32")
    losses = closed_form(Run(config, {}, "", tmp_path, True, True), backbone, None)
    documents = config.mixture(backbone, per_length=config.data.documents)
    wholes = [collate(backbone, [documents[3 * HELD_OUT + i]]) for i in range(2)]
    predicted, measured = [], []
    whole = torch.full((*losses.keys.shape[:2], losses.keys.shape[2] + 2), 16.0)
    for name, bits in (("empty", 0), ("keys", 8), ("keys", 4), ("values", 8), ("values", 4)):
        for head in range(2):
            widths = whole.clone()
            widths[..., -1] = 1
            widths[1, head, -2 if name == "values" else slice(-2)] = bits
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


def test_sums_of_squares_that_do_not_fit_change_no_loss(model_folder, tmp_path, monkeypatch):
    """Errors that are rounded anew in every draw are those that are rounded once."""
    config = check(settings(model_folder, *LAYOUTS, "data.calibration=1"))
    backbone, calls, of_both = backbones.load(str(model_folder), "float64"), [], []
    monkeypatch.setattr(closing, "rounded", lambda *given: calls.append(1) or rounded(*given))
    for most in (closing.SQUARES, 0):
        monkeypatch.setattr(closing, "SQUARES", most)
        out = tmp_path / str(most)
        of_both.append((closed_form(Run(config, {}, "", out, True, True), backbone, None), len(calls)))
    (once, number), (anew, more) = of_both
    assert more - number == closing.DRAWS * number > 0
    torch.testing.assert_close(anew, once, rtol=1e-12, atol=0)


def test_the_closed_form_is_measured_on_the_dense_model(model_folder, tmp_path, monkeypatch):
    """The pass that gives the gradients has the dense model's rows, in a document and in questions."""
    config = check(settings(model_folder, *LAYOUTS, "data.calibration=1"))
    backbone = backbones.load(str(model_folder), "float32")
    documents = config.mixture(backbone, per_length=config.data.documents)
    dense, passed = [], []

    def towards_labels(head, rows, generator):
        passed.append(rows)
        return torch.zeros_like(rows)

    def noted(*given):
        found = read(*given)
        dense.append(found[2].flatten(0, 1))
        return found

    monkeypatch.setattr(closing, "DRAWS", 1)
    monkeypatch.setattr(closing, "read", noted)
    monkeypatch.setattr(closing, "_towards_labels", towards_labels)
    closed_form(Run(config, {}, "", tmp_path, True, True), backbone, None)
    batch = collate(backbone, [documents[3 * HELD_OUT]])
    rows = counted(batch.answers.lengths, batch.answers.ids.shape[1]).flatten()
    torch.testing.assert_close(passed[0], dense[0][rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("stage2.steps=1", "stage2.steps=0"),
        ("stage1.lam=0.1", "stage1.lam=auto"),
        ("extra_ratios=[0.5]", r"extra_ratios=\[\]"),
        ("pruning.nested=[0.0]", "budget 0"),
        ("pruning.align=8", "pruning.align=8"),
        ("pruning.bytes=1.5", "pruning.bytes"),
    ],
)
def test_what_a_layout_cannot_have_is_refused(model_folder, changed, said):
    with pytest.raises(BadConfig, match=said):
        check(settings(model_folder, *LAYOUTS, changed))
