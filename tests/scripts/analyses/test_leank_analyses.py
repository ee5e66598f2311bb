"""What the analyses of LeanK's figures find, against plain forwards, whole matrices, and counts of masks."""

import numpy as np
import pytest
import torch

from leank.channel_scores import lowest_frequencies
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.mask import ChannelMask
from scripts.analyses.leank import empty_heads, group_removal, kept_by_pair, known, staticity, streaming, w_hf
from scripts.analyses.source import Source
from tests import ROOT
from tests.helpers.analysis_source import DIM, GROUP, HEADS, LAYERS, LENGTH, only, qkv, random_mask, source, tiny_model

TASK = "niah_multikey_1"


def forward(ids, first, keep, sink, window, empty_heads):
    """Logits of a Llama written out, whose rows from `first` on read keys outside sink and window through `keep`."""
    model = tiny_model()
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, place = model.model.embed_tokens(ids), torch.arange(ids.shape[1])
    cos, sin = model.model.rotary_emb(hidden, place[None])
    middle = (place >= sink) & (place <= place[:, None] - window) & (place[:, None] >= first)  # [T, T]
    for layer, mask in zip(model.model.layers, keep, strict=True):
        x, own = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (part(x).view(1, -1, n, DIM).transpose(1, 2) for part, n in (
            (own.q_proj, HEADS * GROUP), (own.k_proj, HEADS), (own.v_proj, HEADS)))  # fmt: skip
        q, k = (y[0] for y in apply_rotary_pos_emb(q, k, cos, sin))
        k, v, mask = (y.repeat_interleave(GROUP, 0) for y in (k, v[0], mask))
        logits = torch.where(middle, q @ (k * mask[:, None]).mT, q @ k.mT) / DIM**0.5
        if empty_heads == "drop":
            logits = logits.masked_fill(middle & ~mask.any(-1)[:, None, None], -torch.inf)
        logits = logits.masked_fill(place > place[:, None], -torch.inf)
        out = (logits.softmax(-1) @ v).transpose(0, 1).reshape(1, len(place), -1)
        hidden = hidden + own.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0]


def expected(found, sample, keep, *sizes):
    ids = found.ids(sample)
    answer = torch.tensor([found.tokenizer(sample.target, add_special_tokens=False)["input_ids"]])
    logits = forward(torch.cat([ids, answer[:, :-1]], 1), ids.shape[1], keep, *sizes)[ids.shape[1] :]
    right = answer[0, 1:]
    return (
        torch.nn.functional.cross_entropy(logits, right).item(),
        (logits.argmax(-1) != right).double().mean().item(),
    )


@pytest.mark.parametrize(("sink", "window", "empty_heads"), [(0, 1, "zero"), (4, 24, "drop")])
def test_answers_under_masks(sink, window, empty_heads):
    found = source()
    sample = found.sample(TASK, LENGTH, 0)
    keep = torch.rand(3, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[0], keep[1, 1, 0] = True, False
    result = known(found, sample, keep, sink, window, empty_heads)
    for mask, loss, wrong in zip(keep, *result, strict=True):
        assert (loss.item(), wrong.item()) == pytest.approx(
            expected(found, sample, mask, sink, window, empty_heads), abs=1e-5
        )


@pytest.mark.parametrize(("per", "groups"), [("model", 2), ("layer", 2 * LAYERS), ("head", 2 * LAYERS * HEADS)])
def test_every_group_is_removed_alone(per, groups):
    found = source()
    rows = group_removal(found, TASK, LENGTH, samples=1, per=per)
    sample, full = found.sample(TASK, LENGTH, 0), torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool)
    loss = only(rows, measure="loss")
    assert len(loss) == groups
    for one in loss[:3]:
        keep = full.clone()
        layer, head = (slice(None) if one[name] is None else one[name] for name in ("layer", "head"))
        keep[layer, head, one["channel"] : one["channel"] + 4] = False
        before, after = (expected(found, sample, mask, 0, 1, "zero")[0] for mask in (full, keep))
        assert one["value"] == pytest.approx(after - before, abs=1e-5)


def test_a_group_must_divide_the_head():
    with pytest.raises(ValueError, match="channels=3 does not divide head_dim=8"):
        group_removal(source(), channels=3)


def test_heads_stream_by_their_high_frequencies():
    found = source()
    rows = w_hf(found, TASK, (TASK,), LENGTH, samples=2, shares=(0.5,), trials=2, sink=4, window=24)
    prompt = found.observe(found.ids(found.sample(TASK, LENGTH, 0)), 32)
    ratio = high_frequency_ratio(prompt, ~lowest_frequencies(found.config, 0.5).keep, 32)
    assert [one["value"] for one in only(rows, measure="w_hf")] == ratio.flatten().tolist()
    chosen = {(order, trial): heads for order, _, trial, heads in streaming(ratio, (0.5,), 2)}
    assert not chosen["dense", 0].any()
    assert all(int(heads.sum()) == LAYERS * HEADS // 2 for (order, _), heads in chosen.items() if order != "dense")
    assert ratio[chosen["highest", 0]].min() > ratio[~chosen["highest", 0]].max()
    assert torch.equal(chosen["lowest", 0], ~chosen["highest", 0])
    assert not torch.equal(chosen["random", 0], chosen["random", 1])
    assert len(only(rows, measure="exact")) == 5


TASKS = ("niah_single_2", "niah_multikey_1")


def ratios(found, ids, queries):
    """r_i = ||Q_[i] K_[i]^T|| / ||Q K^T|| of appendix A, from whole matrices; over the queries of a group."""
    layers = []
    for q, k, _ in qkv(ids):
        q = q[:, -queries:].reshape(HEADS, GROUP * queries, DIM)
        k = k[::GROUP]
        whole = torch.linalg.matrix_norm(q @ k.mT)
        each = [torch.linalg.matrix_norm(q[..., [i]] @ k[..., [i]].mT) / whole for i in range(DIM)]
        layers.append(torch.stack(each, -1))
    return torch.stack(layers)


def test_correlations_are_those_of_the_whole_matrices():
    found = source()
    rows = staticity(found, TASKS, LENGTH, (LENGTH, LENGTH + 80), TASKS[0], samples=2, queries=16, ratio=0.5)
    cells = [*((task, LENGTH) for task in TASKS), (TASKS[0], LENGTH + 80)]
    mean = {
        cell: torch.stack([ratios(found, found.ids(found.sample(*cell, index)), 16) for index in range(2)]).mean(0)
        for cell in cells
    }
    assert len(rows) == 2 * (2 * 2 + 2 * 2)
    for one in only(rows):
        a, b = (mean[one[task], one[n]] for task, n in (("task", "length"), ("other_task", "other_length")))
        if one["measure"] == "pearson":
            assert one["value"] == pytest.approx(np.corrcoef(a.flatten(), b.flatten())[0, 1], abs=1e-6)
        else:
            kept = [set(map(tuple, np.argwhere((x >= x.sort(-1).values[..., [DIM // 2]]).numpy()))) for x in (a, b)]
            assert one["value"] == pytest.approx(len(kept[0] & kept[1]) / len(kept[0]))
    same = [
        one
        for one in only(rows, measure="pearson")
        if one["task"] == one["other_task"] and one["length"] == one["other_length"]
    ]
    assert [one["value"] for one in same] == pytest.approx([1.0] * 4)


def test_shares_of_a_mask():
    mask = random_mask()
    layers, heads, dim = mask.keep.shape
    rows = only(kept_by_pair(Source(mask=mask)))
    assert len(rows) == (layers + 1) * dim // 2
    for one in rows:
        where = range(layers) if one["layer"] is None else [one["layer"]]
        pair = one["pair"]
        kept = [mask.keep[i, j, c].item() for i in where for j in range(heads) for c in (pair, pair + dim // 2)]
        assert one["value"] == pytest.approx(sum(kept) / len(kept))


def test_a_model_adds_think_at_the_masks_ratio():
    found = source(mask=True)
    rows = kept_by_pair(found, "niah_multikey_1", LENGTH, samples=1)
    of_think = [one["value"] for one in only(rows, method="ThinK", layer=None)]
    dim = found.need_mask().keep.shape[-1]
    kept = dim - int(found.need_mask().pruning_ratio * dim)  # equally many in every head
    assert sum(of_think) / len(of_think) == pytest.approx(kept / dim)


@pytest.mark.parametrize(("name", "peak"), [("llama3.1-8b", 22), ("qwen2.5-7b", 31)])
def test_published_masks_peak_where_the_paper_says(name, peak):
    """Section 5.1: among the high-frequency half, pair 22 of Llama and pair 31 of Qwen stand out."""
    mask = ChannelMask.from_official(ROOT / f"leank_train/assets/masks/published/{name}-instruct.pth")
    rows = only(kept_by_pair(Source(mask=mask)), layer=None)
    shares = torch.tensor([one["value"] for one in rows])
    assert int(shares[: len(shares) // 2].argmax()) == peak
    assert shares[len(shares) // 2 :].mean() > 2 * shares[: len(shares) // 2].mean()


def test_counts_of_a_mask():
    mask = random_mask()
    rows = empty_heads(Source(mask=mask), first=1)
    for one in only(rows, measure="kept"):
        assert one["value"] == sum(mask.keep[one["layer"], one["head"]].tolist())
    assert [one["value"] for one in only(rows, measure="empty")] == [1, *[0] * (LAYERS - 1), 1]
    assert only(rows, measure="empty_in_first")[0]["value"] == 1


def test_a_mask_without_empty_heads_has_no_share():
    mask = ChannelMask(random_mask().keep | True)
    assert only(empty_heads(Source(mask=mask)), measure="empty_in_first")[0]["value"] is None


def test_high_frequencies_of_empty_heads():
    found = source(mask=True)
    rows = only(empty_heads(found, task="niah_multikey_1", length=LENGTH), measure="w_hf")
    prompt = found.observe(found.ids(found.sample("niah_multikey_1", LENGTH, 0)), 32)
    ratio = high_frequency_ratio(prompt, ~lowest_frequencies(found.config, 0.5).keep, 32)
    empty = ratio[0, 1].item()
    assert [one["value"] for one in rows] == pytest.approx([empty, (ratio.sum().item() - empty) / (LAYERS * HEADS - 1)])


def test_the_published_mask_of_qwen():
    """Appendix M: 43% of the empty heads lie in the first five layers."""
    mask = ChannelMask.from_official(ROOT / "leank_train/assets/masks/published/qwen2.5-7b-instruct.pth")
    rows = empty_heads(Source(mask=mask))
    assert only(rows, measure="empty", layer=None)[0]["value"] == 35
    assert only(rows, measure="empty_in_first")[0]["value"] == pytest.approx(0.43, abs=0.005)
