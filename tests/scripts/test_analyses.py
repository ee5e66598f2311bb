"""Every analysis against plain forwards, whole matrices and counts of masks; it is found by name, and runs in bf16."""

import copy
import functools
from dataclasses import replace
from importlib import import_module
from inspect import signature

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from leank.channel_scores import lowest_frequencies
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.channels.iap import IAP
from leank.eval.methods.channels.think import ThinK
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.eval.methods.tokens.lethe import Lethe
from leank.mask import ChannelMask
from scripts.analyses import NAMES, OF_PAPER, analysis_of
from scripts.analyses.asl import ranks, relative_variance, selection_layers
from scripts.analyses.iap import interaction, layer_error, query_spread
from scripts.analyses.leank import empty_heads, group_removal, kept_by_pair, known, staticity, streaming, w_hf
from scripts.analyses.lethe import growth, head_similarity, held_while_decoding, retained_tokens, sparsity
from scripts.analyses.source import Source
from scripts.analyses.table import ANALYSES, PLACE, Table, draw
from scripts.analyses.think import UNIFORM, magnitudes, singular_energy
from tests import ROOT, conftest
from tests.helpers.text_tokenizers import tokenizer
from tests.oracles.attention import weights
from tests.oracles.plain_forward import plain_forward

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 8
LENGTH = 320  # the shortest at which the tasks of these tests have room


@functools.cache
def tiny_model() -> PreTrainedModel:
    return conftest.tiny_model(
        "llama", 3, vocab_size=len(tokenizer("reference")), intermediate_size=40, num_hidden_layers=LAYERS,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def source(mask: bool = False) -> Source:
    return Source(tiny_model(), tokenizer("reference"), random_mask() if mask else None, "tiny")


def prompt(index: int = 0, task: str = "niah_single_2") -> torch.Tensor:
    """The tokens of a sample."""
    return source().ids(source().sample(task, LENGTH, index))


def random_mask(seed: int = 0) -> ChannelMask:
    """A mask in which one head of the first layer is empty."""
    keep = torch.rand(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) < 0.5
    keep[0, 1] = False
    return ChannelMask(keep)


@torch.no_grad()
def qkv(ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of every layer, after RoPE: q, k, v, each [Hq, T, D] with KV heads repeated, from transformers' modules."""
    model, found, seen = tiny_model(), [], {}

    def catch(module, args, kwargs):
        seen[module.layer_idx] = (kwargs["hidden_states"], kwargs["position_embeddings"])

    hooks = [layer.self_attn.register_forward_pre_hook(catch, with_kwargs=True) for layer in model.model.layers]
    model.set_attn_implementation("sdpa")
    model(ids)
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(model.model.layers):
        hidden, (cos, sin) = seen[index]
        own = layer.self_attn
        q, k, v = (part(hidden).view(1, -1, heads, DIM).transpose(1, 2) for part, heads in (
            (own.q_proj, HEADS * GROUP), (own.k_proj, HEADS), (own.v_proj, HEADS)))  # fmt: skip
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        found.append((q[0], k[0].repeat_interleave(GROUP, 0), v[0].repeat_interleave(GROUP, 0)))
    return found


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The whole matrix of causal attention weights [Hq, T, T]."""
    return weights(q[None], k[None])[0]


def only(table, **wanted):
    """The lines of a table whose columns have the `wanted` values, as dictionaries; what is empty is None."""
    lines = table.astype(object).where(table.notna(), None).to_dict("records")
    whole = [{name: int(x) if name != "value" and isinstance(x, float) and x.is_integer() else x
              for name, x in one.items()} for one in lines]  # fmt: skip
    return [one for one in whole if all(one.get(name) == value for name, value in wanted.items())]


TASK = "niah_single_2"
SMALL = {
    "task": TASK, "tasks": (TASK, "niah_multikey_1"), "length": LENGTH, "lengths": (LENGTH, 400), "samples": 1,
    "trials": 1, "steps": 8, "evict_at": 64, "sparse_ratio": 2.0, "sink": 4, "window": 16, "kernel": 3, "budget": 80,
    "top": 20, "queries": 16,
}  # fmt: skip


def small(name):
    """The small settings of an analysis, of those that it has."""
    return {key: SMALL[key] for key in signature(analysis_of(name).measure).parameters if key in SMALL}


@pytest.fixture(scope="module")
def half():
    return replace(source(mask=True), model=copy.deepcopy(tiny_model()).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_runs_in_bfloat16(name, half):
    measure, panels = analysis_of(name)
    table = measure(half, **small(name))
    assert {"measure", "value", "unit", *PLACE} <= {*table.columns}
    assert {panel.measure for panel in panels} <= {*table["measure"]}
    drawn = [axes for axes in draw(table, panels).get_axes() if axes.has_data()]
    assert len(drawn) >= len(panels)


@pytest.mark.parametrize("name", NAMES)
def test_is_in_the_docs(name):
    assert f"| `{name}` |" in (ROOT / "docs/lab/analyses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name):
    of_mask = name in ("empty_heads", "kept_by_pair")
    lacks = Source() if of_mask else Source(mask=random_mask())
    with pytest.raises(ValueError, match="mask is not set" if of_mask else "model is not set"):
        analysis_of(name).measure(lacks, **small(name))


def test_every_analysis_has_its_name():
    for paper in OF_PAPER:
        import_module(f"scripts.analyses.{paper}")
    assert {*ANALYSES} == {*NAMES}


def test_values_that_are_not_finite_empty_tables_and_settings_are_refused():
    table = Table()
    table.add("share", "share", [0.5, np.nan], {"layer": range(2)})  # a share of nothing is empty
    with pytest.raises(ValueError, match="pearson is infinite"):
        table.add("pearson", "correlation", np.inf)
    with pytest.raises(ValueError, match="no rows"):
        draw(table.frame, analysis_of("empty_heads").panels)
    with pytest.raises(ValueError, match="samples"):
        analysis_of("staticity").measure(source(), samples=0)


def test_samples_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="length=4096 is more than the model's max_position_embeddings=1024"):
        source().sample(TASK, 4096, 0)


# LeanK's figures


MULTIKEY = "niah_multikey_1"


def expected(found, sample, keep, sink, window, empty_heads):
    """Loss of the answer, and the share of its tokens that are wrong, from one pass over prompt and answer."""
    ids = found.ids(sample)
    answer = torch.tensor([found.tokenizer(sample.target, add_special_tokens=False)["input_ids"]])
    sizes = {"sink": sink, "window": window, "empty_heads": empty_heads}
    whole = torch.cat([ids, answer[:, :-1]], 1)[0]
    hidden = plain_forward(tiny_model(), whole, ids.shape[1], keep.double(), **sizes)
    logits = tiny_model().lm_head(hidden[ids.shape[1] :])
    right = answer[0, 1:]
    return (
        torch.nn.functional.cross_entropy(logits, right).item(),
        (logits.argmax(-1) != right).double().mean().item(),
    )


@pytest.mark.parametrize(("sink", "window", "empty_heads"), [(0, 1, "zero"), (4, 24, "drop")])
def test_answers_under_masks(sink, window, empty_heads):
    found = source()
    sample = found.sample(MULTIKEY, LENGTH, 0)
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
    rows = group_removal(found, MULTIKEY, LENGTH, samples=1, per=per)
    sample, full = found.sample(MULTIKEY, LENGTH, 0), torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool)
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
    rows = w_hf(found, MULTIKEY, (MULTIKEY,), LENGTH, samples=2, shares=(0.5,), trials=2, sink=4, window=24)
    prompt = found.observe(found.ids(found.sample(MULTIKEY, LENGTH, 0)), 32)
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
    mask = ChannelMask.from_official(ROOT / f"models/masks/published/{name}-instruct.pth")
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
    mask = ChannelMask.from_official(ROOT / "models/masks/published/qwen2.5-7b-instruct.pth")
    rows = empty_heads(Source(mask=mask))
    assert only(rows, measure="empty", layer=None)[0]["value"] == 35
    assert only(rows, measure="empty_in_first")[0]["value"] == pytest.approx(0.43, abs=0.005)


# ASL: ranks, their variance and selection layers


WINDOW, KERNEL, BUDGET = 16, 3, 80


def scores(ids):
    """Of every layer: the attention of the last queries to each token before them, summed over heads and pooled."""
    layers = []
    for q, k, _ in qkv(ids):
        given = attention(q, k)[:, -WINDOW:, :-WINDOW].sum((0, 1))
        around = torch.cat([given.new_zeros(1), given, given.new_zeros(1)])
        layers.append(torch.stack([around[i : i + KERNEL].sum() / KERNEL for i in range(len(given))]))
    return layers


def places(layer):
    return [1 + int((layer > score).sum()) for score in layer]


def variance(places, k):
    """The mean over tokens among the first k anywhere of the variance of their ranks."""
    tokens = [t for t in range(len(places[0])) if any(layer[t] <= k for layer in places)]
    each = [[layer[t] for layer in places] for t in tokens]
    return sum(sum((x - sum(one) / len(one)) ** 2 for x in one) / len(one) for one in each) / len(each)


def test_relative_variances():
    rows = relative_variance(source(), (TASK,), LENGTH, 1, BUDGET, WINDOW, KERNEL, observed=(2, 3), firsts=(1,))
    found_ranks = [places(layer) for layer in scores(prompt())]
    for observed in (2, 3):
        found = [variance(found_ranks[max(0, layer + 1 - observed) : layer + 1], BUDGET - WINDOW) for layer in (1, 2)]
        mine = [one["value"] for one in only(rows, observed=observed)]
        assert mine == pytest.approx([1, found[1] / found[0]], abs=1e-6)
    assert [one["layer"] for one in only(rows)] == [1, 2] * 2


@pytest.mark.parametrize("tau", [0.3, 0.9, 0.999])
def test_the_selection_layer_is_where_asl_drops_tokens(tau):
    found = source()
    rows = selection_layers(found, (TASK,), LENGTH, 3, (tau,), BUDGET, WINDOW, KERNEL, observed=2, first=1)
    selected, whole = (
        [one["value"] for one in only(rows, measure=name)] for name in ("selection_layer", "whole_layers")
    )
    assert whole == [LAYERS if layer is None else layer + 1 for layer in selected]
    for one in only(rows, measure="selection_layer"):
        passed = ASL(BUDGET, tau, WINDOW, KERNEL, 2, 1).row(found.model, prompt(one["sample"]), 0, 0)
        dropped = [index for index, layer in enumerate(passed.layers) if layer.kept is not None]
        if dropped:
            assert one["value"] == dropped[0] - 1
        else:  # nothing is above the last layer
            assert one["value"] in (None, LAYERS - 1)


def test_ranks_and_places():
    rows = ranks(source(), (TASK,), LENGTH, top=20, bins=5, window=WINDOW, kernel=KERNEL)
    found = scores(prompt())
    tokens, preferred = len(found[0]), found[-1].topk(20).indices
    for layer, score in enumerate(found):
        share = score / score.sum()
        binned = [sum(share[t] for t in range(tokens) if t * 5 // tokens == number).item() for number in range(5)]
        mine = [one["value"] for one in only(rows, measure="attention", layer=layer)]
        assert mine == pytest.approx(binned, abs=1e-6)
        top = only(rows, measure="top_share", layer=layer)[0]["value"]
        assert top == pytest.approx(sum(sorted(share.tolist())[-20:]), abs=1e-6)
        median = torch.tensor(places(score)).double()[preferred].quantile(0.5).item() / tokens
        assert only(rows, measure="rank", layer=layer, quantile=0.5)[0]["value"] == pytest.approx(median)


def test_a_budget_that_holds_the_prompt_is_refused():
    with pytest.raises(ValueError, match="budget=1024 holds all"):
        relative_variance(source(), (TASK,), LENGTH, 1, budget=1024)


# IAP: interaction terms, spread of queries and errors per layer


QUERIES = 16


def terms(q, k, head):
    """M_ij of one KV head, channel by channel, summed over the query heads of its group."""
    matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
    for member in range(head * GROUP, (head + 1) * GROUP):
        for i in range(DIM):
            for j in range(DIM):
                matrix[i, j] += (k[member, :, i] @ k[member, :, j]) * (
                    q[member, -QUERIES:, i] @ q[member, -QUERIES:, j]
                )
    return matrix


def test_interactions_and_their_shares():
    rows = interaction(source(), TASK, LENGTH, samples=1, queries=QUERIES, head=1)
    for layer, (q, k, _) in enumerate(qkv(prompt())):
        matrices = [terms(q, k, head) for head in range(HEADS)]
        for one in only(rows, measure="interaction", layer=layer):
            wanted = matrices[1][one["channel"], one["other"]] / matrices[1].abs().max()
            assert one["value"] == pytest.approx(wanted.item(), abs=1e-6)
        upper = [(i, j) for i in range(DIM) for j in range(i, DIM)]
        off, extreme, held = 0.0, 0.0, 0.0
        for m in (matrix.abs() for matrix in matrices):
            outside = m - m.diag().diag()
            off += (outside.sum() / m.sum()).item() / HEADS
            largest = sorted(upper, key=lambda ij, m=m: -m[ij])[:DIM]
            extreme += sum(i != j for i, j in largest) / DIM / HEADS
            held += (outside.sum(0).max() / outside.sum()).item() / HEADS  # a tenth of 8 channels: one
        for name, wanted in (("off_diagonal", off), ("extreme", extreme), ("concentrated", held)):
            assert only(rows, measure=name, layer=layer)[0]["value"] == pytest.approx(wanted, abs=1e-6)
    assert len(only(rows, measure="interaction")) == LAYERS * DIM * (DIM + 1) // 2


def test_spread_of_queries():
    rows = query_spread(source(), TASK, LENGTH, QUERIES, head=2)
    for layer, (q, _, _) in enumerate(qkv(prompt())):
        last = q[:, -QUERIES:]
        for name, wanted in (("mean", last[2].mean(0)), ("deviation", last[2].std(0))):
            assert [one["value"] for one in only(rows, measure=name, layer=layer)] == pytest.approx(wanted.tolist())
        unsteady = (last.std(1) > last.mean(1).abs()).double().mean().item()
        assert only(rows, measure="unsteady", layer=layer)[0]["value"] == pytest.approx(unsteady)


def test_errors_of_pruned_layers():
    found, ratio = source(), 0.5
    rows = layer_error(found, TASK, LENGTH, samples=1, ratios=(ratio,), queries=QUERIES)
    seen = found.observe(prompt(), QUERIES)
    for name, rule in (("ThinK", ThinK(ratio, QUERIES)), ("IAP", IAP(ratio, QUERIES))):
        keep = rule.keep_mask(seen, found.config)[0].repeat_interleave(GROUP, 1)[:, :, None]  # [L, Hq, 1, D]
        for layer, (q, k, v) in enumerate(qkv(prompt())):
            last, cut = q[:, -QUERIES:], k * keep[layer]
            logits = ((last @ k.mT - last @ cut.mT).norm() / (last @ k.mT).norm()).item()
            full, pruned = ((attention(q, keys) @ v)[:, -QUERIES:] for keys in (k, cut))
            for measure, wanted in (("logits", logits), ("outputs", ((full - pruned).norm() / full.norm()).item())):
                one = only(rows, measure=measure, method=name, layer=layer)
                assert one[0]["value"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("measure", [interaction, query_spread])
def test_layers_that_the_model_lacks_are_refused(measure):
    with pytest.raises(ValueError, match="layers 0 to 2, not 7"):
        measure(source(), layers=[7])


# Lethe: sparsity while decoding, similarity of heads, and the tokens that its cache holds


@torch.no_grad()
def written(ids, steps):
    """The prompt and the tokens that greedy decoding adds, each from a whole pass."""
    for _ in range(steps):
        ids = torch.cat([ids, tiny_model()(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def test_sparsity_of_every_step():
    rows = sparsity(source(), (TASK,), LENGTH, steps=2, every=2)
    ids = prompt()
    end, whole = ids.shape[1], written(ids, 2)
    for layer, (q, k, _) in enumerate(qkv(whole)):
        for step in (0, 2):
            s = attention(q, k)[:, end - 1 + step, : end + step].sum(0)
            n = len(s) ** 0.5
            wanted = (n - s.sum() / s.square().sum().sqrt()) / (n - 1)
            mine = only(rows, measure="hoyer", layer=layer, step=step)
            assert [one["value"] for one in mine] == pytest.approx([wanted.item()], abs=1e-6)
    assert len(only(rows, measure="hoyer")) == 2 * LAYERS


def test_similarity_of_heads():
    rows = head_similarity(source(), TASK, LENGTH, queries=8, sink=4, window=24)
    for layer, (q, k, _) in enumerate(qkv(prompt())):
        given = attention(q, k)[:, -8:].sum(1)
        for part, some in (("all", given), ("middle", given[:, 4:-24])):
            found = []
            for i in range(HEADS * GROUP):
                for j in range(i + 1, HEADS * GROUP):
                    found.append(((some[i] @ some[j]) / some[i].norm() / some[j].norm()).item())
                    one = only(rows, measure="cosine", layer=layer, part=part, head=i, other_head=j)
                    assert one[0]["value"] == pytest.approx(found[-1], abs=1e-6)
            mean = only(rows, measure="mean_cosine", layer=layer, part=part)[0]["value"]
            assert mean == pytest.approx(sum(found) / len(found), abs=1e-6)


def test_rows_of_retained_tokens():
    """A dense cache holds what it has seen; with rounds, a layer holds less, and never more than it has seen."""
    given = {"samples": 2, "steps": 20, "sink": 4, "window": 12, "flush": 4}
    dense = retained_tokens(source(), TASK, LENGTH, **given, evict_at=10_000)
    held, seen = (only(dense, measure=name, sample=0) for name in ("held", "seen"))
    end = prompt().shape[1]
    assert [one["value"] for one in held] == [one["value"] for one in seen] == [end + 4 * i for i in range(5)] * LAYERS
    assert [one["value"] for one in only(dense, measure="growth")] == [1.0] * 2 * LAYERS
    rounds = retained_tokens(source(), TASK, LENGTH, **given, evict_at=64, sparse_ratio=2.0)
    held, seen = (only(rounds, measure=name) for name in ("held", "seen"))
    assert all(a["value"] <= b["value"] for a, b in zip(held, seen, strict=True))
    assert held[4]["value"] < seen[4]["value"]


def test_samples_side_by_side_hold_what_each_holds_alone():
    """Prompts of other lengths stand beside each other, padded; each alone is what it is in their company."""
    found = source()
    prompts = [found.ids(found.sample(TASK, LENGTH, index))[0].tolist()[: -3 * index or None] for index in range(3)]
    given = (24, Lethe(evict_at=64, sparse_ratio=2.0), Sizes(4, 12, 4))
    together = held_while_decoding(found, prompts, *given)
    assert len({*together[0, 0, 0]}) > 1
    for index, one in enumerate(prompts):
        assert (held_while_decoding(found, [one], *given)[..., 0] == together[..., index]).all()


@pytest.mark.parametrize(("held", "wanted"), [([4, 5, 6, 7, 8, 9], 1.0), ([4, 9, 4, 9, 4, 9], 0.0),
                                              ([4, 5, 6, 6, 6, 6], 0.0), ([4, 6, 4, 5, 4, 5], -1 / 3)])  # fmt: skip
def test_growth_is_that_of_the_peak(held, wanted):
    assert growth(4 + np.arange(6), np.array(held)) == pytest.approx(wanted)


# ThinK: sizes of channels, and singular values of attention


def test_sizes_of_channels():
    rows = magnitudes(source(), TASK, LENGTH, head=1)
    for layer, (_, k, v) in enumerate(qkv(prompt())):
        for part, held in (("K", k[::GROUP]), ("V", v[::GROUP])):
            mean = held.abs().sum(1) / held.shape[1]
            for channel in range(DIM):
                ordered = held[1, :, channel].abs().sort().values
                for name, wanted in (
                    ("mean", mean[1, channel]),
                    ("low", ordered.quantile(0.1)),
                    ("high", ordered.quantile(0.9)),
                ):
                    one = only(rows, measure=name, layer=layer, part=part, channel=channel)
                    assert one[0]["value"] == pytest.approx(wanted.item(), abs=1e-6)
            for head in range(HEADS):
                one = only(rows, measure="spread", layer=layer, part=part, head=head)
                assert one[0]["value"] == pytest.approx((mean[head].std() / mean[head].mean()).item(), abs=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_singular_values_of_attention(whole):
    """Of the whole matrix, with all queries or the last ones."""
    ids = prompt()
    queries = ids.shape[1] if whole else 64
    rows = singular_energy(source(), TASK, LENGTH, queries, ranks=10)
    weights = [attention(q, k)[:, -queries:] for q, k, _ in qkv(ids)]
    uniform = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.float64).tril()
    weights.append((uniform / uniform.sum(-1, keepdim=True))[None, -queries:])
    for name, matrix in zip([*map(str, range(len(weights) - 1)), UNIFORM], weights, strict=True):
        energy = torch.linalg.svdvals(matrix).square()
        energy = energy / energy.sum(-1, keepdim=True)
        for measure, wanted in (("energy", energy), ("cumulative", energy.cumsum(-1))):
            mine = [one["value"] for one in only(rows, measure=measure, of=name)]
            assert mine == pytest.approx(wanted.mean(0)[:10].tolist(), abs=1e-6)
        needed = [next(n for n, x in enumerate(one.cumsum(0).tolist(), 1) if x >= 0.9) for one in energy]
        assert only(rows, measure="rank", of=name)[0]["value"] == pytest.approx(sum(needed) / len(needed))
