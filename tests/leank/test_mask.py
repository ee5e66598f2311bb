"""Masks: their files and kinds, the scores they are made of, and the channels that RoPE pairs."""

import json
import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, Gemma3TextConfig, LlamaConfig, PhiConfig

from leank.channel_scores import MeanScores, lowest_frequencies, query_key_scores, random_mask
from leank.eval.cache.storage.channels import layer_masks
from leank.eval.methods.channels.leank import LeanK
from leank.mask import FORMAT, ROUNDINGS, ChannelMask, check_ratio
from leank.rotary import mean_by_pair, rotary_pairs, rotates_halves
from leank.tensor_files import write_tensors
from leank_train.forward.branching import prefill
from tests import ROOT
from tests.conftest import tiny_model
from tests.helpers.families import build, trained

PUBLISHED = ROOT / "models/masks/published"
scores = st.builds(
    lambda seed, shape, levels: (
        torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).double() / levels
    ),
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([8, 16])),
    st.sampled_from([1, 2, 1000]),  # 1 level = all zero; 2 = many ties
)


@contextmanager
def unchecked():
    """Ratios that `from_scores` refuses, too: its arithmetic holds for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leank.mask.check_ratio", lambda *settings: None)
        yield


@pytest.mark.parametrize(
    ("name", "shape", "ratio", "heads"),
    [
        ("llama3.1-8b", (32, 8, 128), 0.6875, {0: 47, 32: 120, 64: 67, 96: 22}),
        ("qwen2.5-7b", (28, 4, 128), 0.7098, {0: 35, 32: 34, 64: 33, 96: 10}),
    ],
)
def test_published_masks(name, shape, ratio, heads):
    mask = ChannelMask.from_official(PUBLISHED / f"{name}-instruct.pth")
    assert mask.keep.shape == shape
    assert mask.pruning_ratio == pytest.approx(ratio, abs=5e-5)
    assert {n: int((mask.channels_per_head == n).sum()) for n in mask.channels_per_head.unique().tolist()} == heads


@settings(deadline=None, max_examples=60)
@given(scores, st.floats(0, 0.99), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["nearest", "floor", "exact"]))
def test_from_scores_meets_its_budget(alpha, ratio, align, rounding):
    with unchecked():
        mask = ChannelMask.from_scores(alpha, ratio, align, rounding)
    assert (mask.channels_per_head % align == 0).all()
    for head_alpha, head_keep in zip(alpha.flatten(0, 1), mask.keep.flatten(0, 1), strict=True):
        if head_keep.any() and not head_keep.all():  # within a head nothing pruned beats anything kept
            assert head_alpha[head_keep].min() >= head_alpha[~head_keep].max()
    kept, asked = int(mask.keep.sum()), alpha.numel() * (1 - ratio)
    if rounding == "exact":
        assert abs(kept - asked) <= align / 2 + 1e-6
    elif rounding == "floor":
        assert kept <= asked + 0.5 + 1e-6
    else:
        assert abs(kept - asked) <= align / 2 * alpha.shape[0] * alpha.shape[1] + 0.5


@settings(deadline=None, max_examples=30)
@given(scores, st.floats(0, 0.99), st.sampled_from([2, 4]))
def test_nearest_and_floor_against_the_obvious_loop(alpha, ratio, align):
    order = sorted(range(alpha.numel()), key=lambda i: (-alpha.flatten()[i].item(), i))
    best = set(order[: math.floor(alpha.numel() * (1 - ratio) + 0.5)])
    dim = alpha.shape[-1]
    for rounding, up in (("nearest", align // 2), ("floor", 0)):
        with unchecked():
            keep = ChannelMask.from_scores(alpha, ratio, align, rounding).keep.flatten(0, 1)
        for head in range(keep.shape[0]):
            channels = range(head * dim, head * dim + dim)
            n = (sum(c in best for c in channels) + up) // align * align
            assert keep[head].nonzero().flatten().tolist() == sorted(
                c - head * dim for c in sorted(channels, key=lambda i: (-alpha.flatten()[i].item(), i))[:n]
            )


def test_exact_is_the_best_choice_of_whole_blocks():
    alpha = torch.rand(1, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = ChannelMask.from_scores(alpha, 0.5, 2, "exact")
    top = alpha.sort(descending=True).values[0]
    options = [
        sum(top[h, : 2 * n[h]].sum().item() for h in range(3))
        for n in torch.cartesian_prod(*[torch.arange(3)] * 3).tolist()
        if sum(n) == 3
    ]
    assert alpha[mask.keep].sum().item() == pytest.approx(max(options))


@pytest.mark.parametrize("rounding", ["nearest", "floor", "exact"])
def test_half_a_channel_counts_as_one(rounding):
    """2.5 of 5 are 3, although round() makes 2 of it."""
    assert ChannelMask.from_scores(torch.arange(5.0).view(1, 1, 5), 0.5, 1, rounding).keep.tolist() == [
        [[False, False, True, True, True]]
    ]


def test_official_rounding_passes_all_ties():
    alpha = torch.zeros(1, 2, 8)
    alpha[0, 0, :2] = 1
    assert ChannelMask.from_scores(alpha, 0.7, 4, "official").pruning_ratio == 0
    assert ChannelMask.from_scores(alpha, 0.7, 4, "exact").channels_per_head.tolist() == [[4, 0]]
    spread = torch.linspace(0, 1, 16).view(1, 2, 8)
    assert ChannelMask.from_scores(spread, 0.5, 4, "official").channels_per_head.tolist() == [[0, 8]]


@pytest.mark.parametrize("rounding", ["nearest", "floor", "exact"])
@pytest.mark.parametrize("align", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_ratio_is_refused_where_no_scores_can_meet_it(heads, align, rounding):
    """Refused: whatever the scores, all heads end empty, or all whole. Else some scores end between."""
    orders = [torch.arange(4 * heads, 0, -1), *(torch.randperm(4 * heads) for _ in range(8))]
    for ratio in [n / 25 for n in range(1, 25)]:
        with unchecked():
            masks = [ChannelMask.from_scores(o.view(1, heads, 4), ratio, align, rounding) for o in orders]
        between = [0 < mask.pruning_ratio < 1 for mask in masks]
        if any(between):
            check_ratio((1, heads, 4), ratio, align, rounding)
        else:
            (end,) = {mask.pruning_ratio for mask in masks}
            words = "empty every head" if end else "prune nothing"
            with pytest.raises(ValueError, match=f"ratio={ratio} with align={align} would {words}"):
                check_ratio((1, heads, 4), ratio, align, rounding)


def test_masks_that_hardly_anybody_wants_are_named(tmp_path):
    empty = ChannelMask(torch.zeros(1, 2, 8, dtype=torch.bool))
    coarse = ChannelMask.from_scores(torch.rand(1, 2, 8), 0.3, 8, "exact")  # one of two heads: 50%
    fine = ChannelMask.from_scores(torch.rand(4, 4, 8), 0.3, 1, "exact")
    less, none = (ChannelMask(coarse.keep, {"ratio": ratio}) for ratio in (0.7, 0.0))
    masks = ((coarse, 0.3), (less, 0.7), (none, 0.0))
    misses = [(mask, rf"prunes 50\.0% of the channels, not ratio={r}") for mask, r in masks]
    for mask, said in ((empty, "all heads are empty"), *misses):
        mask.save(path := tmp_path / "mask.safetensors")
        with pytest.warns(UserWarning, match=rf"mask={path}: (it )?{said}"):
            assert torch.equal(ChannelMask.load(path).keep, mask.keep)
    torch.save(empty.keep.float(), tmp_path / "mask.pth")
    with pytest.warns(UserWarning, match=r"mask\.pth: all heads are empty"):
        ChannelMask.from_official(tmp_path / "mask.pth")
    fine.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChannelMask.load(path)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64])
def test_a_mask_is_made_of_booleans_alone(kind):
    with pytest.raises(ValueError, match=r"keep is torch\..* \[1, 1, 4\]; give a bool tensor"):
        ChannelMask(torch.tensor([[[0.01, 0.0, 1.0, 1.0]]]).to(kind))
    with pytest.raises(ValueError, match="give a bool tensor"):
        layer_masks(torch.ones(1, 1, 4, dtype=kind))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_ratio_zero_keeps_everything(rounding):
    assert ChannelMask.from_scores(torch.rand(2, 2, 8), 0.0, 4, rounding).pruning_ratio == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratio": 1.0}, "ratio=1.0"),
        ({"ratio": -0.1}, "ratio=-0.1"),
        ({"ratio": math.nan}, "ratio=nan"),
        ({"align": 3}, "align=3 does not divide head_dim=8"),
        ({"align": 0}, "align=0"),
        ({"rounding": "up"}, "rounding='up'"),
        ({"alpha": torch.full((1, 1, 8), math.nan)}, "NaN"),
        ({"alpha": torch.ones(8)}, r"shape \[8\]"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        ChannelMask.from_scores(
            **{"alpha": torch.ones(1, 1, 8), "ratio": 0.5, "align": 4, "rounding": "exact", **change}
        )


def test_the_same_mask_gives_the_same_bytes(tmp_path):
    mask = ChannelMask.from_scores(torch.rand(3, 2, 16), 0.7, 4, "exact", metadata={"model": "café/x", "b": [1, 2]})
    for copy in range(20):
        mask.save(tmp_path / f"run/{copy}")
    assert len({path.read_bytes() for path in (tmp_path / "run").iterdir()}) == 1
    found = ChannelMask.load(tmp_path / "run/0")
    assert torch.equal(found.keep, mask.keep)
    assert found.metadata == mask.metadata
    assert found.metadata["alignment"] == 4


@pytest.mark.parametrize("kind", [np.float64, np.float32, float])
def test_settings_of_numpys_types_are_saved_as_plain_numbers(tmp_path, kind):
    alpha = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(0))
    made = ChannelMask.from_scores(alpha, kind(0.5), np.int64(4) if kind is not float else 4.0, "exact")
    made.save(tmp_path / "mask.safetensors")
    ChannelMask.from_scores(alpha, 0.5, 4, "exact").save(tmp_path / "plain.safetensors")
    assert (tmp_path / "mask.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change",
    [{"model": 3}, {"model": "a\n# b"}, {"sink": None}, {"sink": "16"}, {"window": -1}, {"lengths": [1]},
     {"seed": "x"}, {"ratio": True}, {"ratio": 70}, {"ratio": float("nan")}, {"doubts": "no"}, {"doubts": ["a\nb"]},
     {"architecture": ["x"]},
     {"heldout": [0.1]}, {"heldout": {"text": 5}}, {"heldout": {"text": ["x", None, {}]}},
     {"heldout": {"text": [float("nan"), 0.0, 0.2]}},
     {"heldout": {"a\nb": [0.1, 0.0, 0.2]}}],
    ids=str,
)  # fmt: skip
def test_metadata_that_no_training_writes_is_refused_by_name(change, tmp_path):
    file, (name,) = tmp_path / "mask.safetensors", change
    header = {"format": FORMAT, "metadata": json.dumps(change)}
    write_tensors(file, {"keep": torch.ones(1, 1, 4, dtype=torch.bool)}, header)
    with pytest.raises(ValueError, match=f"^mask={file}: metadata: {name}=.*; take {name} out, or train") as error:
        ChannelMask.load(file)
    assert "\n" not in str(error.value)


def test_the_folder_of_a_training_run_is_its_mask(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is a folder without mask\.safetensors; give that of a training run"):
        ChannelMask.load(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match=r"mask=.* is a training run without a mask yet"):
        ChannelMask.load(tmp_path)
    ChannelMask(torch.ones(1, 1, 2, dtype=torch.bool)).save(tmp_path / "mask.safetensors")
    assert LeanK(str(tmp_path)).loaded.pruning_ratio == 0  # as `mask=FOLDER` of an evaluation


def test_files_that_are_no_masks(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"mask=.*none\.safetensors"):
        ChannelMask.load(tmp_path / "none.safetensors")
    torch.save(torch.ones(2), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="copy it again, or train again"):
        ChannelMask.load(tmp_path / "other.pt")
    ones = torch.ones(2, 2, 4)
    for other in (ones[0], ones[:0], 2 * ones, ones.to_sparse(), ones.to("meta"), {"mask": ones}):
        torch.save(other, tmp_path / "other.pth")
        with pytest.raises(ValueError, match=r"other\.pth must hold one tensor .* of zeros and ones"):
            ChannelMask.from_official(tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pth"):
        ChannelMask.from_official(tmp_path / "text.pth")
    with pytest.raises(ValueError, match="bool"):
        ChannelMask(torch.ones(2, 2, 2))


def test_a_published_mask_runs_no_code(tmp_path):
    class Code:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save(Code(), tmp_path / "code.pth")
    with pytest.raises(ValueError, match=r"code\.pth is damaged.*\(UnpicklingError\)"):
        ChannelMask.from_official(tmp_path / "code.pth")
    assert not (tmp_path / "ran").exists()


def test_a_mask_of_another_shape_is_refused_and_one_of_another_name_warned_of():
    config = SimpleNamespace(
        num_hidden_layers=2, num_key_value_heads=3, hidden_size=48, num_attention_heads=6, _name_or_path="org/SMALL"
    )
    keep = torch.ones(2, 3, 8, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChannelMask(keep, {"model": "local/Small"}).check_model(config)
    with pytest.raises(ValueError, match=r"org/large.*\[1, 3, 8\].*org/SMALL.*\[2, 3, 8\]"):
        ChannelMask(keep[:1], {"model": "org/large"}).check_model(config)
    with pytest.warns(UserWarning, match="org/large"):
        ChannelMask(keep, {"model": "org/large"}).check_model(config)


KEEP = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) > 0.5
MEANS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def test_means_come_back_from_the_file(tmp_path):
    ChannelMask(KEEP, {"seed": 1}, MEANS).save(tmp_path / "m.safetensors")
    read = ChannelMask.load(tmp_path / "m.safetensors")
    assert torch.equal(read.keep, KEEP)
    assert torch.equal(read.mean_keys, MEANS)


@pytest.mark.parametrize("means", [MEANS.double(), MEANS[:, :, :4].contiguous(), torch.full((2, 3, 8), torch.nan)])
def test_means_that_do_not_fit_are_refused(tmp_path, means):
    with pytest.raises(ValueError, match="mean_keys"):
        ChannelMask(KEEP, mean_keys=means)
    header = {"format": "leank-channel-mask-1", "metadata": "{}"}
    write_tensors(tmp_path / "m.safetensors", {"keep": KEEP, "mean_keys": means}, header)
    with pytest.raises(ValueError, match=r"m\.safetensors.*mean_keys"):
        ChannelMask.load(tmp_path / "m.safetensors")


def test_lowest_frequencies_keeps_whole_rotary_pairs():
    model = tiny_model("qwen2")
    mask = lowest_frequencies(model.config, 0.7)
    frequencies = model.model.rotary_emb.inv_freq  # [D / 2]
    kept = frequencies.argsort()[:1]  # int(4 * 0.3 + 0.5)
    assert mask.keep.shape == (2, 2, 8)
    assert mask.keep[1, 1].nonzero().flatten().tolist() == [int(kept), int(kept) + 4]
    assert lowest_frequencies(model.config, 0.0).pruning_ratio == 0


def test_random_mask_is_even_and_repeatable():
    mask = random_mask((2, 3, 16), 0.7, seed=5)
    assert (mask.channels_per_head == 5).all()
    assert torch.equal(mask.keep, random_mask((2, 3, 16), 0.7, seed=5).keep)
    assert not torch.equal(mask.keep, random_mask((2, 3, 16), 0.7, seed=6).keep)


def test_mean_scores_need_finite_samples():
    with pytest.raises(ValueError, match="no sample"):
        MeanScores().mask(0.5)
    broken = MeanScores()
    broken.add(torch.ones(1, 2, 2, 4))
    scores = torch.ones(1, 2, 2, 4)
    scores[0, 1, 0, 3] = torch.inf
    broken.add(scores)
    with pytest.raises(ValueError, match="samples holds NaN or infinite scores in 1 of 4 KV heads, such as layer 1"):
        broken.mask(0.5)


def test_scores_of_a_half_precision_model_do_not_overflow():
    queries, squares = torch.full((1, 4, 3, 2), 300.0, dtype=torch.float16), torch.ones(1, 2, 2)
    assert query_key_scores(queries, squares, "squares").tolist() == [[[3 * 300.0**2] * 2] * 2]


UNTURNED = ("cohere2", "exaone4")  # their first layer, of full attention, has no rotary positions


@pytest.mark.parametrize("name", [name for name in trained() if name not in UNTURNED])
def test_pairs_are_those_that_the_model_turns(name):
    """Equal tokens have equal keys before RoPE, so after it a pair keeps its length and other channels do not move."""
    model = build(name)
    keys = prefill(model, torch.full((1, 40), 7), [40]).keys[0][0]  # [H, positions, D]
    pairs = rotary_pairs(model.config)[0]
    still = (keys - keys[:, :1]).abs().amax((0, 1)) < 1e-6
    assert torch.equal(still, pairs < 0)
    turns = []
    for pair in range(int(pairs.max()) + 1):
        low, high = (pairs == pair).nonzero().flatten().tolist()
        turned = torch.complex(keys[..., low], keys[..., high])
        torch.testing.assert_close(turned.abs(), turned.abs()[:, :1].expand(turned.shape))
        step = turned[:, 1] / turned[:, 0]
        turns.append(step.angle().abs().mean().item())
        torch.testing.assert_close(step, step[:1].expand(step.shape))  # the same in every head
    assert turns == sorted(turns, reverse=True)
    if (pairs >= 0).all():
        kept = lowest_frequencies(model.config, 0.5).keep[0, 0]
        assert sorted(turns.index(turns[p]) for p in pairs[kept].unique()) == list(range(len(turns) // 2, len(turns)))


def test_a_mean_by_pair_is_a_loop_over_channels():
    values = torch.rand(2, 3, 8, dtype=torch.float64)
    pairs = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, -1, -1, -1, -1]])
    found = mean_by_pair(values, pairs)
    for layer, pair in ((0, 0), (0, 3), (1, 1)):
        of_pair = [values[layer, :, c].mean() for c in range(8) if pairs[layer, c] == pair]
        assert found[layer, pair] == pytest.approx(float(sum(of_pair) / 2))
    assert found[1, 2:].isnan().all()


def test_layers_with_rope_of_their_own():
    own = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(
        num_hidden_layers=2, head_dim=8, layer_types=["full_attention", "sliding_attention"], rope_parameters=own
    )
    assert rotary_pairs(config).tolist() == [[0, 1, 0, 1, -1, -1, -1, -1], [0, 1, 2, 3, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match="needs a model that rotates all channels"):
        lowest_frequencies(config, 0.5)
    assert not rotates_halves(config)
    assert [rotates_halves(one) for one in (LlamaConfig(), PhiConfig(), CohereConfig())] == [True, False, False]
