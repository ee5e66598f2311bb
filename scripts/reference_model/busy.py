"""How busy a model's KV heads are: recall while their middles are removed, and what text gains from far context.

    python -m scripts.reference_model.busy MODEL --out DIR [--text TEXT]

The context is prefilled whole. The question and the teacher-forced answer then read it, but the query heads of a
removed KV head see sink and window alone. Each round removes the head whose loss harms least (ties: by the answers'
log-likelihood). DIR receives `busy.csv` (heads removed, the head, exact match per task and in the mean), `busy.png` and
`text.csv` (loss of natural text by position with the whole context, and with sink and window alone).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.reference_model.batches import Row, evaluation_rows

NAME = "busy_heads"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    removed: Tensor | None = None, near: Tensor | None = None, scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention whose removed KV heads see `near` keys alone.

    query: [B, Hq, n, D]; key, value: [B, H, T, D]; the queries are the last of the T positions.
    removed: bool [layers, H], or None. near: bool [n, T], sink and window of each query.
    """
    n, total, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    mask, causal = None, n == total
    if removed is not None and near is not None:
        rows = removed[module.layer_idx].repeat_interleave(group)  # type: ignore[index]
        seen = torch.ones(n, total, dtype=torch.bool, device=query.device).tril(total - n)
        mask, causal = torch.where(rows[:, None, None], near & seen, seen), False
    elif not causal:
        mask = torch.ones(n, total, dtype=torch.bool, device=query.device).tril(total - n)
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)


def near_keys(n: int, total: int, sink: int, window: int, device: torch.device) -> Tensor:
    """Which keys are sink or window of the last `n` of `total` positions: bool [n, total]."""
    at = torch.arange(total - n, total, device=device)[:, None]
    keys = torch.arange(total, device=device)[None]
    return (keys < sink) | (keys > at - window)


@dataclass(frozen=True)
class Probe:
    """One sample: the cache of its context [1, H, T, D] per layer, the tail's ids, the supervised positions."""

    task: str
    kv: list[tuple[Tensor, Tensor]]
    tail: Tensor
    supervised: list[int]


def prefill(model: LlamaForCausalLM, task: str, row: Row) -> Probe:
    """Read the context up to the last token before the first supervised position, densely."""
    # question and prefix are a part of the tail: at most this many tokens, the window holds them
    cut = max(1, row.supervised[0] - 63)
    ids = torch.tensor([row.ids], device=model.device)
    cache = DynamicCache(config=model.config)
    model.model(ids[:, :cut], past_key_values=cache, use_cache=True)
    kv = [(layer.keys, layer.values) for layer in cache.layers]
    return Probe(task, kv, ids[:, cut:], [p - cut for p in row.supervised])


@torch.no_grad()
def score(model: LlamaForCausalLM, probe: Probe, removed: Tensor, sink: int, window: int) -> tuple[bool, float]:
    """Whether every token of the answer is right, teacher-forced, and the answer's mean log-likelihood."""
    cache = DynamicCache(config=model.config)
    for i, (k, v) in enumerate(probe.kv):
        cache.update(k, v, i)
    n = probe.tail.shape[1]
    near = near_keys(n, probe.kv[0][0].shape[2] + n, sink, window, probe.tail.device)
    hidden = model.model(
        probe.tail, past_key_values=cache, use_cache=True, removed=removed, near=near
    ).last_hidden_state
    at = [p for p in probe.supervised if p + 1 < n]
    labels = probe.tail[0, [p + 1 for p in at]]
    logits = model.lm_head(hidden[0, at]).float()
    right = bool((logits.argmax(-1) == labels).all())
    return right, -float(nn.functional.cross_entropy(logits, labels))


def evaluate(probes: list[Probe], one: Callable[[Probe], tuple[bool, float]]) -> tuple[dict[str, float], float]:
    """Exact match per task in %, and the mean log-likelihood."""
    found = [(probe.task, *one(probe)) for probe in probes]
    tasks = dict.fromkeys(task for task, _, _ in found)
    match = {task: 100 * float(np.mean([right for t, right, _ in found if t == task])) for task in tasks}
    return match, float(np.mean([ll for _, _, ll in found]))


def greedy(model: LlamaForCausalLM, probes: list[Probe], sink: int, window: int, most: int) -> list[dict[str, object]]:
    """Remove one KV head after the other, least harmful first; a record for every number of removed heads."""
    config = model.config
    removed = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, dtype=torch.bool, device=model.device)

    def measure(mask: Tensor) -> tuple[float, float, dict[str, float]]:
        match, likelihood = evaluate(probes, lambda probe: score(model, probe, mask, sink, window))
        return float(np.mean(list(match.values()))), likelihood, match

    mean, likelihood, match = measure(removed)
    records: list[dict[str, object]] = [{"removed": 0, "head": "", "mean": mean, "log_likelihood": likelihood, **match}]
    while not removed.all() and len(records) <= most:
        tried = []
        for layer, head in (~removed).nonzero().tolist():
            candidate = removed.clone()
            candidate[layer, head] = True
            tried.append((*measure(candidate), layer, head))
        mean, likelihood, match, layer, head = max(tried, key=lambda found: (round(found[0], 1), found[1]))
        removed[layer, head] = True
        record = {
            "removed": len(records),
            "head": f"{layer}.{head}",
            "mean": mean,
            "log_likelihood": likelihood,
            **match,
        }
        records.append(record)
        print({k: v if isinstance(v, str) else round(float(v), 2) for k, v in record.items()}, flush=True)  # type: ignore[arg-type]
    return records


@torch.no_grad()
def text_losses(
    model: LlamaForCausalLM, stream: np.ndarray, length: int, rows: int, sink: int, window: int
) -> list[dict]:
    """Mean loss of held-out text by position, with the whole context and with sink and window alone in every layer."""
    config, device = model.config, model.device
    every = torch.ones(config.num_hidden_layers, config.num_key_value_heads, dtype=torch.bool, device=device)
    near = near_keys(length, length, sink, window, device)
    sums = torch.zeros(2, length, device=device)
    rows = min(rows, (len(stream) - 1) // length)
    for row in range(rows):
        ids = torch.from_numpy(stream[row * length : (row + 1) * length].astype(np.int64)).to(device)
        shown = torch.cat([ids.new_tensor([config.bos_token_id]), ids[:-1]])[None]
        for i, extra in enumerate(({}, {"removed": every, "near": near})):
            hidden = model.model(shown, use_cache=False, **extra).last_hidden_state[0]
            sums[i] += nn.functional.cross_entropy(model.lm_head(hidden).float(), ids, reduction="none")
    losses = (sums / rows).cpu()
    step = length // 16
    return [
        {"from": a, "to": a + step, "whole": float(losses[0, a : a + step].mean()),
         "sink_and_window": float(losses[1, a : a + step].mean())}
        for a in range(0, length, step)
    ]  # fmt: skip


def write(path: Path, records: list[dict]) -> None:
    """Write records as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in records)


def plot(path: Path, records: list[dict[str, object]], heads: int) -> None:
    """Draw the mean exact match against the share of heads that are removed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([100 * int(str(r["removed"])) / heads for r in records], [r["mean"] for r in records], marker="o")
    axes.set(xlabel="KV heads without their middle (%)", ylabel="exact match (%)", ylim=(0, 102))
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="folder with test.npy; see `scripts.reference_model.text`")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20, help="per task")
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=144)
    parser.add_argument("--most", type=int, default=1000, help="remove no more heads than this")
    parser.add_argument("--seed", type=int, default=3000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=NAME).to(args.device).eval()
    rows = evaluation_rows(tokenizer, args.length, args.samples, args.seed)
    with torch.no_grad():
        probes = [prefill(model, task, row) for task, found in rows.items() for row in found]
    records = greedy(model, probes, args.sink, args.window, args.most)
    write(args.out / "busy.csv", records)
    plot(args.out / "busy.png", records, model.config.num_hidden_layers * model.config.num_key_value_heads)
    if args.text is not None:
        stream = np.load(args.text / "test.npy")
        longest = model.config.max_position_embeddings
        write(args.out / "text.csv", text_losses(model, stream, longest, 32, args.sink, args.window))


if __name__ == "__main__":
    main()
