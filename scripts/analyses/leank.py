"""What the figures of "LeanK: Learnable K Cache Channel Pruning for Efficient Decoding" show, arXiv 2508.02215."""

from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from annotated_types import MinLen
from torch import Tensor
from torch.nn.functional import cross_entropy

from leank.channel_scores import best, lowest_frequencies, wide
from leank.data_gen.task import Sample
from leank.eval.methods.channels.iap import interactions
from leank.eval.methods.channels.think import ThinK
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.rotary import mean_by_pair, rotary_pairs
from leank.typed import Count, OneOf, Positive, Share
from leank_train.forward.branching import branch, prefill, student
from scripts.analyses.source import Given, Source
from scripts.analyses.table import Panel, Table, analysis

FIVE = ("niah_single_2", "niah_multikey_3", "niah_multivalue", "vt", "fwe")


@analysis(
    *(Panel(measure, f"other_{at[:-1]}", label, at[:-1], where={"axis": at}, limits=(0, 1))
      for measure, label in (("pearson", "Pearson correlation"), ("overlap", "common share of kept channels"))
      for at in ("tasks", "lengths"))
)  # fmt: skip
def staticity(
    source: Given,
    tasks: Annotated[Sequence[str], MinLen(2)] = FIVE,
    length: Positive = 2048,
    lengths: Annotated[Sequence[Positive], MinLen(2)] = (1024, 2048, 4096),
    task: str = "niah_multikey_3",
    samples: Positive = 2,
    queries: Positive = 32,
    ratio: Share = 0.7,
) -> pd.DataFrame:
    """Figure 1 (left, middle) and appendix A: whether the same channels matter in every task and at every length.

      r_i = ||Q_[i] K_[i]^T||_F / ||Q K^T||_F       (appendix A, of the last `queries` queries and all keys)

    One vector r holds all layers, KV heads and channels; it is the mean over `samples`. Rows "pearson" and "overlap" of
    every pair of tasks, then of every pair of lengths; axis says which. Pearson's coefficient follows the few largest
    channels; "overlap" is, of the channels that pruning `ratio` of every head by r keeps for one task, the share that
    it keeps for the other. Masks drawn at random share 1 - ratio.

    Deviation: the paper has one ratio for each query head. Here the query heads of a KV head share one, as they share
    the mask: both norms are over all their queries.

    tasks, length: what is compared at which length, tokens; lengths, task: the lengths that are compared, in one task.
    samples: of each task and length; queries: last queries of a prompt that are observed.
    ratio: share of channels that is pruned for "overlap".
    """
    table, means = Table(), {}
    compared = {"tasks": [(one, length) for one in tasks], "lengths": [(task, one) for one in lengths]}
    for cell in dict.fromkeys(cell for cells in compared.values() for cell in cells):
        each = [
            norm_ratios(layer.queries, layer.keys)
            for index in range(samples)
            for _, layer in source.layers(*cell, index, queries)
        ]
        means[cell] = torch.stack(each).unflatten(0, (samples, -1)).mean(0).cpu()  # [L, H, D]
    for axis, cells in compared.items():
        for one, other in product(dict.fromkeys(cells), repeat=2):
            places = zip(("task", "length", "other_task", "other_length"), (*one, *other), strict=True)
            at: dict[str, Any] = {"axis": axis, **dict(places)}
            a, b = means[one], means[other]
            table.add("pearson", "correlation", np.corrcoef(a.flatten(), b.flatten())[0, 1], **at)
            kept = best(a, ratio)
            table.add("overlap", "share of kept channels", float((kept & best(b, ratio)).sum() / kept.sum()), **at)
    return table.frame


def norm_ratios(queries: Tensor | None, keys: Tensor) -> Tensor:
    """r_i of every channel of one prompt's layer, [H, D], from queries [1, Hq, n, D] and keys [1, H, T, D]."""
    assert queries is not None
    matrix, _ = interactions(queries.to(wide(queries)), keys.to(wide(keys)))  # M_ij = (k_i . k_j)(q_i . q_j)
    return (matrix.diagonal(dim1=-2, dim2=-1) / matrix.sum((-2, -1))[..., None]).sqrt()[0]


@analysis(
    Panel("norm", "channel", "mean norm ratio of a group", "layer"),
    Panel("loss", "channel", "loss when removed, nats per token more", "layer"),
)
def group_removal(
    source: Given,
    task: str = "niah_multikey_3",
    length: Positive = 1024,
    samples: Positive = 2,
    channels: Positive = 4,
    per: Annotated[str, OneOf("model", "layer", "head")] = "layer",
    queries: Positive = 32,
) -> pd.DataFrame:
    """Section 2.3, figure 1 (right): whether channels of a large norm are those whose removal hurts.

    Removes groups of neighbouring K channels, one at a time. Rows "norm" (the mean of a group's norm ratios, see
    `staticity`), "loss" (by how much the loss of the right answer grows, in nats per token, when the channels of all
    earlier keys are zero) and "wrong" (the share of answer tokens that the model then gets wrong) of every group,
    "wrong_full" of the full model, and "rank_correlation" of norm and loss (Spearman).

    Deviation: the paper reports the drop of the task's score. It does not say whether a group is removed in all layers
    at once; `per` has the three ways.

    channels: of a group, a divisor of head_dim; per: where a group's channels are removed at a time.
    """
    shape = source.backbone.shape
    if shape.head_dim % channels:
        raise ValueError(f"channels={channels} does not divide head_dim={shape.head_dim}; use a divisor")
    axes: dict[str, Any] = {
        "layer": [None] if per == "model" else range(shape.layers),
        "head": range(shape.kv_heads) if per == "head" else [None],
        "channel": range(0, shape.head_dim, channels),
    }
    everything = slice(None)
    places = [
        (everything if layer is None else layer, everything if head is None else head, slice(first, first + channels))
        for layer, head, first in product(*axes.values())
    ]
    keep = torch.ones(len(places) + 1, *shape)  # the last mask is that of the full model
    for mask, place in zip(keep, places, strict=False):
        mask[place] = 0
    norm, loss, wrong = (torch.zeros(len(keep), dtype=torch.float64) for _ in range(3))
    for index in range(samples):
        seen = source.layers(task, length, index, queries)
        if len(seen) < shape.layers:
            raise ValueError("a layer of the model has a sliding window: it has no middle to remove channels from")
        ratios = torch.stack([norm_ratios(layer.queries, layer.keys) for _, layer in seen]).double().cpu()
        norm[:-1] += torch.stack([ratios[place].mean() for place in places]) / samples
        found = known(source, source.sample(task, length, index), keep, 0, 1, "zero")
        loss += (found.loss - found.loss[-1]) / samples
        wrong += found.wrong / samples
    table = Table()
    at: dict[str, Any] = {"task": task, "length": length}
    table.add("wrong_full", "share of answer tokens", float(wrong[-1]), **at)
    table.add("norm", "norm ratio", norm[:-1], axes, **at)
    table.add("loss", "nats per token", loss[:-1], axes, **at)
    table.add("wrong", "share of answer tokens", wrong[:-1], axes, **at)
    ranks = torch.stack([x[:-1].argsort().argsort().double() for x in (norm, loss)])
    table.add("rank_correlation", "Spearman, norm and loss", float(ranks.corrcoef()[0, 1]), **at)
    return table.frame


class Known(NamedTuple):
    """What M masks leave of one sample's answer. The answer's first token does not count: the dense pass gives it."""

    loss: Tensor  # float64 [M], mean over the answer's tokens, nats
    wrong: Tensor  # float64 [M], share of the answer's tokens that are not the most probable one


@torch.no_grad()
def known(source: Source, sample: Sample, keep: Tensor, sink: int, window: int, empty_heads: str) -> Known:
    """Run the right answer under every mask [M, L, H, D] with training's Eq. 1; the prompt is prefilled once.

    sink, window, empty_heads: as in `leank_train.forward.branching.student`.
    Raises ValueError for an answer of one token, which no mask can change.
    """
    backbone, ids = source.backbone, source.ids(sample)
    answer = torch.tensor([backbone.encode(sample.target)], device=ids.device)
    tokens = answer.shape[1] - 1
    if tokens < 1:
        raise ValueError(f"the answer {sample.target!r} of task={sample.task!r} is one token; choose another task")
    prefix = prefill(backbone.model, ids[:, :-1], [ids.shape[1] - 1])
    asked = branch(backbone.model, prefix, ids[:, -1:], [1])
    found = []
    for one in keep.to(ids.device, prefix.keys[0].dtype):
        hidden = student(
            backbone.model, prefix, asked, answer[:, :-1], [tokens], one,
            sink=sink, window=window, empty_heads=empty_heads,
        )  # fmt: skip
        logits = backbone.model.get_output_embeddings()(hidden)[0].float()  # [tokens, vocabulary]
        loss = cross_entropy(logits, answer[0, 1:], reduction="none").double().mean()
        found.append(torch.stack([loss, (logits.argmax(-1) != answer[0, 1:]).double().mean()]).cpu())
    return Known(*torch.stack(found, 1))


@analysis(
    Panel("kept", "pair", "kept channels", by=("method",), where={"scope": "model"}),
    Panel("kept", "pair", "kept channels of the mask", "layer", where={"method": "mask", "scope": "layer"},
          limits=(0, 1)),
)  # fmt: skip
def kept_by_pair(
    source: Given, task: str = "niah_multikey_3", length: Positive = 2048, samples: Count = 2
) -> pd.DataFrame:
    """Section 5.1, figures 7 and 9: the share of the kept channels in each RoPE pair.

    Pair p of D / 2 has the frequency theta^(-2p / D). Without a model it rotates the channels p and p + D / 2, and with
    one those that the model says; ThinK at the mask's pruning ratio stands beside it then. Rows "kept" by method and
    pair: of all layers (their layer is empty, their scope "model"), and of each.
    task, length, samples: what ThinK sees; samples=0 leaves it out.
    """
    mask = source.need_mask()
    layers, _, dim = mask.keep.shape
    pairs = (torch.arange(dim) % (dim // 2)).expand(layers, dim)
    if source.model is not None:
        pairs = rotary_pairs(source.config)
    table = Table()

    def add(method: str, keep: Tensor, **at: Any) -> None:
        by_layer = mean_by_pair(keep, pairs)  # [L, pairs]
        axes = {"pair": range(by_layer.shape[1])}
        table.add("kept", "share of channels", by_layer.mean(0), axes, method=method, scope="model", **at)
        places = {"layer": range(layers), **axes}
        table.add("kept", "share of channels", by_layer, places, method=method, scope="layer", **at)

    add("mask", mask.keep)
    if source.model is not None and samples:
        rule = ThinK(mask.pruning_ratio)
        prompts = [source.ids(source.sample(task, length, index)) for index in range(samples)]
        masks = [rule.keep_mask(source.observe(ids, rule.obs_queries), source.config) for ids in prompts]
        mean = torch.stack([keep[0].double().cpu() for keep in masks]).mean(0)
        add("ThinK", mean, task=task, length=length)
    return table.frame


def head_ratios(source: Source, task: str, length: int, queries: int) -> Tensor:
    """w_hf of every KV head on sample 0 of a task, [L, H]; NaN in layers with sliding-window attention."""
    prompt = source.observe(source.ids(source.sample(task, length, 0)), queries)
    return high_frequency_ratio(prompt, ~lowest_frequencies(source.config, 0.5).keep, queries)


@analysis(Panel("kept", "layer", "kept channels", "head"), Panel("empty", "layer", "empty heads"))
def empty_heads(
    source: Given, first: Positive = 5, task: str = "vt", length: Positive = 2048, queries: Positive = 32
) -> pd.DataFrame:
    """Appendix M: where a mask's empty heads lie. An empty head stores no middle, neither K nor V.

    The paper says that most lie in shallow layers (43% of Qwen's in the first five), and that they have a high share of
    high frequencies, w_hf. Rows "kept" by head, "empty" by layer and of all layers, "empty_in_first" (the share of the
    empty heads in the `first` layers), and with a model the mean "w_hf" of empty heads and of the others.

    task, length, queries: where w_hf is measured, and on how many last queries.
    """
    kept = torch.as_tensor(source.need_mask().channels_per_head)
    empty = kept == 0
    by_layer, total = empty.sum(1), int(empty.sum())
    table = Table()
    table.add("kept", "channels", kept, {"layer": range(len(kept)), "head": range(kept.shape[1])})
    table.add("empty", "heads", by_layer, {"layer": range(len(kept))})
    table.add("empty", "heads", total)
    early = int(by_layer[:first].sum()) / total if total else np.nan
    table.add("empty_in_first", "share of empty heads", early, layers=first)
    if source.model is not None:
        ratio = head_ratios(source, task, length, queries)
        for group, heads in (("empty", empty), ("others", ~empty)):
            mean = float(ratio[heads & ratio.isfinite()].mean())
            table.add("w_hf", "ratio of norms", mean, task=task, length=length, group=group)
    return table.frame


@analysis(
    Panel("w_hf", "head", "w_hf", "layer", limits=(0, 1)),
    Panel("exact", "share", "exact answers, %", by=("order",), limits=(0, 103)),
)
def w_hf(
    source: Given,
    task: str = "vt",
    tasks: Annotated[Sequence[str], MinLen(1)] = ("vt", "niah_multikey_3"),
    length: Positive = 2048,
    samples: Positive = 4,
    shares: Annotated[Sequence[Share], MinLen(1)] = (0.25, 0.5),
    trials: Positive = 4,
    queries: Positive = 32,
    sink: Count = 16,
    window: Positive = 144,
) -> pd.DataFrame:
    """Section 5.2, figure 8; appendix D, table 11: the share of high frequencies, and what if heads stream by it.

      w_hf = ||q_high K_high^T||_F / ||q K^T||_F       (`eval.methods.tokens.duo_attention`)

    A streaming head reads the sink and the window alone. Rows "w_hf" of every head, and "exact" by task, order of the
    heads (highest w_hf first, lowest first, or random as a control), share of the heads that stream, and trial: how
    many % of the answers greedy decoding writes whole, which needs no decoding to know (`known`). The paper has
    RULER's recall of free replies.

    task, queries: the sample, and its last queries, on which w_hf is measured.
    tasks, samples: on which the models are compared; trials: draws of random heads.
    sink, window: tokens that a streaming head reads.
    """
    ratio = head_ratios(source, task, length, queries)
    table = Table()
    places = {"layer": range(len(ratio)), "head": range(ratio.shape[1])}
    table.add("w_hf", "ratio of norms", ratio, places, task=task, length=length)
    chosen = streaming(ratio, shares, trials)
    dim = source.backbone.shape.head_dim
    keep = ~torch.stack([heads for *_, heads in chosen])[..., None].expand(-1, -1, -1, dim)
    for each in tasks:
        exact = torch.zeros(len(chosen), dtype=torch.float64)
        for index in range(1, 1 + samples):  # sample 0 is the one on which w_hf was measured
            found = known(source, source.sample(each, length, index), keep, sink, window, "drop")
            exact += 100 * (found.wrong == 0) / samples
        for (order, share, trial, _), value in zip(chosen, exact.tolist(), strict=True):
            table.add("exact", "%", value, task=each, length=length, order=order, share=share, trial=trial)
    return table.frame


def streaming(ratio: Tensor, shares: Sequence[float], trials: int) -> list[tuple[str, float, int, Tensor]]:
    """Order, share, trial, and the heads [L, H] that stream; none of them in the dense model, which is first."""
    there = ratio.isfinite()  # not so in layers with sliding-window attention
    orders = [("highest", 0, -ratio), ("lowest", 0, ratio)]
    orders += [
        ("random", trial, torch.rand(ratio.shape, generator=torch.Generator().manual_seed(trial)))
        for trial in range(trials)
    ]
    chosen = [("dense", 0.0, 0, torch.zeros_like(there))]
    for share in shares:
        count = int(share * int(there.sum()) + 0.5)
        for order, trial, score in orders:
            place = score.masked_fill(~there, torch.inf).flatten().argsort(stable=True).argsort()
            chosen.append((order, share, trial, (place < count).view_as(there)))
    return chosen
