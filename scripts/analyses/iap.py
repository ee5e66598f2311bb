"""What the figures of IAP's paper show.

"Rethinking KV Cache Pruning with Channel Interdependence for Efficient Long-Context Inference".
"""

from collections.abc import Sequence
from typing import Annotated, Any

import pandas as pd
import torch
from annotated_types import Ge, MinLen
from torch import Tensor

from leank.channel_scores import wide
from leank.eval.cache.attention import dense
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.channels.iap import IAP, interactions
from leank.eval.methods.channels.think import ThinK
from leank.typed import Count, Positive, Share
from scripts.analyses.source import Given, chosen_head, chosen_layers, full_attention
from scripts.analyses.table import Panel, Table, analysis

SHARES = ("off_diagonal", "extreme", "concentrated")


@analysis(
    Panel("interaction", "other", "M, share of the largest |M|", "channel", each="layer"),
    *(Panel(share, "layer", share.replace("_", " "), limits=(0, 1.03)) for share in SHARES),
)
def interaction(
    source: Given,
    task: str = "niah_single_2",
    length: Positive = 2048,
    samples: Positive = 2,
    queries: Positive = 32,
    layers: Sequence[Count] | None = None,
    head: Count = 0,
) -> pd.DataFrame:
    """Figures 1 and 4: interaction terms of channels, M_ij = (k_i . k_j) (q_i . q_j), of last queries and all keys.

    Rows "interaction" hold M_ij for i <= j of one head in the chosen layers, as shares of the largest |M|, of the
    first sample. Three shares sum up every layer, each the mean over KV heads and samples: how much of |M| lies off the
    diagonal ("off_diagonal"); how many of the D largest |M_ij| (i <= j) do ("extreme"); and how much of what lies off
    the diagonal falls to the tenth of the channels that has most of it ("concentrated").

    layers: whose matrices are rows; None takes the first, the middle and the last.
    head: KV head whose matrices are rows.
    """
    at: dict[str, Any] = {"task": task, "length": length}
    table, sums = Table(), dict[int, list[Tensor]]()
    shown = chosen_layers(layers, source.config.num_hidden_layers)
    for index in range(samples):
        for layer, found in source.layers(task, length, index, queries):
            assert found.queries is not None
            matrix = interactions(found.queries.to(wide(found.queries)), found.keys.to(wide(found.keys)))[0][0]
            sums.setdefault(layer, []).append(shares(matrix).cpu())
            if index == 0 and layer in shown:
                one = matrix[chosen_head(head, len(matrix))]
                scaled = (one / one.abs().max()).cpu()
                for i, row in enumerate(scaled):
                    table.add("interaction", "share of the largest", row[i:], {"other": range(i, len(row))},
                              channel=i, layer=layer, head=head, **at)  # fmt: skip
    for layer, each in sums.items():
        for name, share in zip(SHARES, torch.stack(each).mean(0).tolist(), strict=True):
            table.add(name, "share", share, layer=layer, **at)
    return table.frame


def shares(matrix: Tensor) -> Tensor:
    """The `SHARES` of matrices M [H, D, D], the means over heads, [3]."""
    dim = matrix.shape[-1]
    size, diagonal = matrix.abs(), torch.eye(dim, dtype=torch.bool, device=matrix.device)
    off = size.masked_fill(diagonal, 0)
    row, column = torch.triu_indices(dim, dim, device=matrix.device)
    largest = size[:, row, column].topk(dim).indices
    involved = off.sum(-1).sort(-1, descending=True).values  # of each channel
    found = (
        off.sum((-2, -1)) / size.sum((-2, -1)),
        (row[largest] != column[largest]).to(matrix.dtype).mean(-1),
        involved[:, : max(1, dim // 10)].sum(-1) / involved.sum(-1),
    )
    return torch.stack(found).mean(1)


@analysis(
    Panel("mean", "channel", "mean of a query's channel", by=("layer",)),
    Panel("deviation", "channel", "standard deviation", by=("layer",)),
    Panel("unsteady", "layer", "channels of deviation > |mean|", limits=(0, 1.03)),
)
def query_spread(
    source: Given,
    task: str = "niah_single_2",
    length: Positive = 2048,
    queries: Annotated[Positive, Ge(2)] = 32,
    layers: Sequence[Count] | None = None,
    head: Count = 0,
) -> pd.DataFrame:
    """Figure 2: how much the queries of an observation window vary.

    Rows "mean" and "deviation" by channel of one query head, after RoPE, over the last `queries` queries of a prompt in
    the chosen layers; and "unsteady" of every layer: the share of its channels, over all query heads, whose deviation
    is larger than the size of their mean.
    """
    at: dict[str, Any] = {"task": task, "length": length}
    shown, table = chosen_layers(layers, source.config.num_hidden_layers), Table()
    for layer, found in source.layers(task, length, 0, queries):
        assert found.queries is not None
        observed = found.queries[0].to(wide(found.queries))  # [Hq, n, D]
        mean, deviation = observed.mean(1), observed.std(1)
        if layer in shown:
            chosen_head(head, len(observed), "query")
            for name, each in (("mean", mean[head]), ("deviation", deviation[head])):
                table.add(name, "activation", each.cpu(), {"channel": range(len(each))}, layer=layer, head=head, **at)
        unsteady = float((deviation > mean.abs()).double().mean())
        table.add("unsteady", "share of channels", unsteady, layer=layer, **at)
    return table.frame


@analysis(
    Panel("logits", "layer", "error of logits", by=("method", "ratio")),
    Panel("outputs", "layer", "error of attention outputs", by=("method", "ratio")),
)
def layer_error(
    source: Given,
    task: str = "niah_single_2",
    length: Positive = 2048,
    samples: Positive = 4,
    ratios: Annotated[Sequence[Share], MinLen(1)] = (0.4, 0.6),
    queries: Positive = 32,
) -> pd.DataFrame:
    """Figure 3: relative errors of every layer when IAP or ThinK prunes the channels of all its keys.

      logits    ||Q K^T - Q S K^T||_F / ||Q K^T||_F        (the paper's Eq. 2)
      outputs   ||O - O_S||_F / ||O||_F                    (O = softmax(Q K^T / sqrt(D)) V, causal)

    Q are the last `queries` queries, which the methods observe as well. Both methods choose their channels in the full
    model's pass, so the error of a layer does not hold that of the layers below it. Rows of both errors by layer,
    sample, ratio and method.

    ratios: shares of the channels that are pruned.
    """
    table = Table()
    for sample in range(samples):
        prompt = source.observe(source.ids(source.sample(task, length, sample)), queries)
        for ratio in ratios:
            for name, rule in (("ThinK", ThinK(ratio, queries)), ("IAP", IAP(ratio, queries))):
                keep = rule.keep_mask(prompt, source.config)[0]  # [L, H, D]
                for index, layer in full_attention(prompt):
                    for measure, error in zip(("logits", "outputs"), errors(layer, keep[index], queries), strict=True):
                        table.add(measure, "relative error", error, layer=index, sample=sample, ratio=ratio,
                                  method=name, task=task, length=length)  # fmt: skip
    return table.frame


def errors(layer: PromptLayer, keep: Tensor, queries: int) -> tuple[float, float]:
    """Both relative errors of one prompt's layer, summed over heads, if only the channels keep [H, D] stay."""
    assert layer.queries is not None
    q, k = (x.to(wide(x)) for x in (layer.queries[:, :, -queries:], layer.keys))
    v, keep = layer.values.to(k.dtype), keep.to(k.device)
    matrix = interactions(q, k)[0][0]  # [H, D, D]
    gone = (~keep).to(k.dtype)
    lost = (gone[:, None] @ matrix @ gone[..., None]).sum()
    full, pruned = (dense.attend(q, keys, v, layer.scaling, None, layer.softmax) for keys in (k, k * keep[:, None]))
    return float((lost.clamp(min=0) / matrix.sum()).sqrt()), float((full - pruned).norm() / full.norm())
