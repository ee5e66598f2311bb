"""How busy a model's KV heads are: recall while their middles are removed, and what text gains from far context.

    python -m scripts.reference_model.busy MODEL --out DIR [--text TEXT]

The context is prefilled whole. The question and the teacher-forced answer then read it, but the query heads of a
removed KV head see sink and window alone. Each round removes the head whose loss harms least (ties: by the answers'
log-likelihood). DIR receives `busy.csv` (heads removed, the head, exact match per task and in the mean), `busy.png` and
`text.csv` (loss of natural text by position with the whole context, and with sink and window alone).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from leank.data_gen.amount import amount
from scripts.reference_model.batches import TrainingRow, evaluation_rows
from scripts.reference_model.evaluation import right_tokens
from scripts.reference_model.recipe import UNORDERED

NAME = "busy_heads"
_QUESTION = 63  # tokens before the answer that are read after the prefill: question and prefix, which the window holds
_IGNORED = -100


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    seen: Tensor | None = None, near: Tensor | None = None, removed: Tensor | None = None,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention whose removed KV heads see `near` keys alone.

    query: [B, Hq, n, D]; key, value: [B, H, T, D].
    seen: bool [B, n, T], the keys of every query; None: causal attention of n = T positions.
    near: bool [B, n, T], sink and window of every query. removed: bool [layers, H]; None: no head is removed.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    mask = None if seen is None else seen[:, None]
    if mask is not None and near is not None and removed is not None:
        rows = removed[module.layer_idx].repeat_interleave(group)  # type: ignore[index]
        mask = torch.where(rows[:, None, None], near[:, None], mask)  # [B, Hq, n, T]
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)


def visible(first: Tensor, n: int, total: int, sink: int, window: int) -> tuple[Tensor, Tensor]:
    """Return `seen` and `near` (see `attention`) of the last `n` of `total` columns, both bool [B, n, total].

    first: int [B], the column of each row's first token; those before it are padding.
    """
    keys = torch.arange(total, device=first.device)
    at, first = keys[total - n :, None], first[:, None, None]
    seen = (keys <= at) & (keys >= first) | (keys == at)  # padding sees itself: a softmax needs a key
    return seen, seen & ((keys < first + sink) | (keys > at - window))


@dataclass(frozen=True)
class Probe:
    """Samples of one task: their contexts end in the same column, and their tails begin behind it.

    kv: K and V of the contexts per layer, [B, H, T, D]. first: int [B], the column of the first token.
    tail: ids [B, n]. labels: int [B, n], the token that should follow, or -100.
    """

    kv: list[tuple[Tensor, Tensor]]
    first: Tensor
    tail: Tensor
    labels: Tensor


def prefill(model: LlamaForCausalLM, rows: Sequence[TrainingRow]) -> Probe:
    """Read the contexts of some rows densely, up to the question."""
    cuts = [max(1, row.supervised[0] - _QUESTION) for row in rows]
    widest, longest = max(cuts), max(len(row.ids) - cut for row, cut in zip(rows, cuts, strict=True))
    ids = torch.zeros(len(rows), widest + longest, dtype=torch.long)
    labels = torch.full((len(rows), widest + longest), _IGNORED)
    for i, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
        padding, tokens = widest - cut, torch.tensor(row.ids)
        ids[i, padding : padding + len(tokens)] = tokens
        supervised = torch.tensor([p for p in row.supervised if p + 1 < len(tokens)])
        labels[i, padding + supervised] = tokens[supervised + 1]
    ids, labels = ids.to(model.device), labels.to(model.device)
    first = widest - torch.tensor(cuts, device=model.device)
    seen, _ = visible(first, widest, widest, 0, 0)
    cache = DynamicCache(config=model.config)
    positions = (torch.arange(widest, device=model.device) - first[:, None]).clamp(min=0)
    model.model(ids[:, :widest], position_ids=positions, past_key_values=cache, use_cache=True, seen=seen)
    return Probe([(k, v) for k, v, *_ in cache], first, ids[:, widest:], labels[:, widest:])


def score(
    model: LlamaForCausalLM, probe: Probe, removed: Tensor, sink: int, window: int, unordered: bool = False
) -> tuple[Tensor, Tensor]:
    """Per sample [B]: whether every token of the answer is right, teacher-forced, and its mean log-likelihood.

    unordered: see `right_tokens`.
    """
    cache = DynamicCache(config=model.config)
    for i, (k, v) in enumerate(probe.kv):
        cache.update(k, v, i)
    n, context = probe.tail.shape[1], probe.kv[0][0].shape[2]
    seen, near = visible(probe.first, n, context + n, sink, window)
    positions = torch.arange(context, context + n, device=model.device) - probe.first[:, None]
    hidden = model.model(
        probe.tail, position_ids=positions, past_key_values=cache, use_cache=True, seen=seen, near=near, removed=removed
    ).last_hidden_state
    rows, at = (probe.labels != _IGNORED).nonzero(as_tuple=True)
    logits, labels = model.lm_head(hidden[rows, at]).float(), probe.labels[rows, at]
    counts = torch.zeros(3, len(probe.tail), device=model.device)  # labels, wrong ones, their log-likelihood
    likelihoods = -nn.functional.cross_entropy(logits, labels, reduction="none")
    wrong = ~right_tokens(logits.argmax(-1), labels, rows, unordered)
    counts.index_add_(1, rows, torch.stack([torch.ones_like(likelihoods), wrong.float(), likelihoods]))
    return counts[1] == 0, counts[2] / counts[0]


@dataclass(frozen=True)
class Score:
    """Exact match per task in %, and the mean log-likelihood of the answers' tokens."""

    match: Mapping[str, float]
    log_likelihood: float

    @property
    def mean(self) -> float:
        """Exact match in the mean over tasks."""
        return sum(self.match.values()) / len(self.match)


@torch.no_grad()
def measure(model: LlamaForCausalLM, probes: Mapping[str, Probe], removed: Tensor, sink: int, window: int) -> Score:
    """Score all tasks with some heads removed."""
    found = {t: score(model, probe, removed, sink, window, t in UNORDERED) for t, probe in probes.items()}
    match = {task: 100 * right.float().mean().item() for task, (right, _) in found.items()}
    return Score(match, torch.cat([likelihoods for _, likelihoods in found.values()]).mean().item())


def no_heads(model: LlamaForCausalLM) -> Tensor:
    """No head is removed: bool [layers, H]."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert heads is not None  # the config fills it in
    return torch.zeros(layers, heads, dtype=torch.bool, device=model.device)


def greedy(
    model: LlamaForCausalLM, probes: Mapping[str, Probe], sink: int, window: int, most: int
) -> list[tuple[str, Score]]:
    """Remove one KV head after the other, least harmful first; the removed head ("layer.head") and the score."""
    removed = no_heads(model)
    rounds = [("", measure(model, probes, removed, sink, window))]
    while not removed.all() and len(rounds) <= most:
        tried: dict[tuple[int, int], Score] = {}
        for layer, head in (~removed).nonzero().tolist():
            candidate = removed.clone()
            candidate[layer, head] = True
            tried[layer, head] = measure(model, probes, candidate, sink, window)
        layer, head = max(tried, key=lambda at: (round(tried[at].mean, 1), tried[at].log_likelihood))
        removed[layer, head] = True
        rounds.append((f"{layer}.{head}", tried[layer, head]))
        print(f"{len(rounds) - 1} removed, last {layer}.{head}: {tried[layer, head].mean:.1f}%", flush=True)
    return rounds


@torch.no_grad()
def text_losses(
    model: LlamaForCausalLM, stream: np.ndarray, length: int, rows: int, sink: int, window: int
) -> list[dict[str, float]]:
    """Mean loss of held-out text by position, with the whole context and with sink and window alone in every layer."""
    device, bos = model.device, model.config.bos_token_id
    assert bos is not None  # every model of this folder has one
    _, near = visible(torch.zeros(1, dtype=torch.long, device=device), length, length, sink, window)
    sums = torch.zeros(2, length, device=device)
    rows = min(rows, len(stream) // length)
    if not rows:
        raise ValueError(f"the text has {amount(len(stream), 'token')}, and one row takes {length}; give more text")
    for row in range(rows):
        ids = torch.from_numpy(stream[row * length : (row + 1) * length].astype(np.int64)).to(device)
        shown = torch.cat([ids.new_tensor([bos]), ids[:-1]])[None]
        for i, masks in enumerate(({}, {"seen": near})):
            hidden = model.model(shown, use_cache=False, **masks).last_hidden_state[0]
            sums[i] += nn.functional.cross_entropy(model.lm_head(hidden).float(), ids, reduction="none")
    losses = (sums / rows).cpu()
    step = max(1, length // 16)
    return [
        {"from": a, "to": min(a + step, length), "whole": losses[0, a : a + step].mean().item(),
         "sink_and_window": losses[1, a : a + step].mean().item()}
        for a in range(0, length, step)
    ]  # fmt: skip


def plot(path: Path, means: Sequence[float], heads: int) -> None:
    """Draw the mean exact match against the share of heads that are removed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([100 * removed / heads for removed in range(len(means))], means, marker="o")
    axes.set(xlabel="KV heads without their middle (%)", ylabel="exact match (%)", ylim=(0, 102))
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="folder with test.npy; see `scripts.reference_model.text`")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8, help="per task")
    parser.add_argument("--text-length", type=int, help="tokens of a row of text (default: the model's positions)")
    parser.add_argument("--text-rows", type=int, default=32)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=144)
    parser.add_argument("--most", type=int, default=1000, help="remove no more heads than this")
    parser.add_argument("--seed", type=int, default=3000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)  # as `make_tokenizer` wrote it
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=NAME).to(args.device).eval()
    if args.text is not None:
        stream, longest = np.load(args.text / "test.npy"), args.text_length or model.config.max_position_embeddings
        losses = text_losses(model, stream, longest, args.text_rows, args.sink, args.window)
        pd.DataFrame(losses).round(4).to_csv(args.out / "text.csv", index=False)
    rows = evaluation_rows(tokenizer, args.length, args.samples, args.seed)
    with torch.no_grad():
        probes = {task: prefill(model, found) for task, found in rows.items()}
    rounds = greedy(model, probes, args.sink, args.window, args.most)
    lines = [
        {"removed": i, "head": head, "mean": s.mean, "log_likelihood": s.log_likelihood, **s.match}
        for i, (head, s) in enumerate(rounds)
    ]
    pd.DataFrame(lines).round(4).to_csv(args.out / "busy.csv", index=False)
    plot(args.out / "busy.png", [s.mean for _, s in rounds], no_heads(model).numel())


if __name__ == "__main__":
    main()
