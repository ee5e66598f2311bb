"""Recall of pruned models on unseen samples: one prefill per document, and all masks decoded side by side.

This is a fast check inside a training run; figures come from the replay, `python -m eval`. Both decode alike: sink and
window keep all channels, `FLUSH` tokens leave the window at a time, empty heads drop the middle, and the first answer
token comes from the dense prefill. A test holds both to the same tokens and scores, sample by sample. Every mask sees
the same samples, so differences are paired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from leank import stats
from leank.backbone import Backbone
from leank.data_gen.sample import Document
from leank.mask import ChannelMask
from leank_train.data import pad
from leank_train.forward.branching import branch, decode, prefill
from leank_train.forward.prefix import Branch, Prefix
from leank_train.validation.baselines import think_mask

OBSERVED = 32  # queries that ThinK and the static norm observe
FLUSH = 32  # tokens that leave the window at a time: the default of the replay's cache.flush

PerSample = Callable[[Prefix, Branch], Tensor]
"""Makes masks [R, L, H, D] for the R branches of a batch."""


@dataclass(frozen=True)
class Result:
    """One sample under one method.

    length: tokens that the sample was made for.
    index: number of the sample within its task and length.
    recall: share of the references that the reply holds, 0 to 1 (RULER's score).
    """

    task: str
    length: int
    index: int
    method: str
    recall: float
    reply: str

    @property
    def exact(self) -> float:
        """1 if the reply holds every reference, else 0."""
        return float(self.recall == 1.0)


def think(ratio: float) -> PerSample:
    """ThinK's rule, which makes a mask for each sample."""
    return lambda prefix, question: think_mask(prefix, question, ratio)


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    methods: Mapping[str, ChannelMask | PerSample | None],
    documents: Iterable[Sequence[Document]],
    sink: int,
    window: int,
    progress: Callable[[int], None] | None = None,
    max_new_tokens: int | None = None,
) -> list[Result]:
    """Replies of every method to every question.

    methods: name -> mask, rule that makes masks for a batch, or None for the dense model.
    documents: batches; the documents of a batch have one task, about one length, and as many questions each.
    sink, window: tokens that keep all channels.
    progress: called after each batch with its number of documents.
    max_new_tokens: None for the task's own.

    Returns one result per question and method.
    """
    results: list[Result] = []
    for batch in documents:
        questions = [(d, q) for d in batch for q in d.questions]
        contexts = [backbone.encode_context(d.context) for d in batch]
        prompts = [backbone.encode_question(q.question, q.answer_prefix) for _, q in questions]
        device = backbone.model.device
        prefix = prefill(backbone.model, pad(contexts).to(device), [len(c) for c in contexts], OBSERVED)
        asked = branch(backbone.model, prefix, pad(prompts).to(device), [len(p) for p in prompts], OBSERVED)
        masks = torch.stack([_mask(m, backbone, prefix, asked) for m in methods.values()], 1)  # [R, methods, L, H, D]
        replies = decode(
            backbone.model, prefix, replace(asked, queries=None).repeat(len(methods)), masks.flatten(0, 1),
            max_new_tokens=max_new_tokens or batch[0].max_new_tokens, eos_id=backbone.eos_ids(),
            sink=sink, window=window, flush=FLUSH,
        )  # fmt: skip
        texts = backbone.tokenizer.batch_decode(replies, skip_special_tokens=True)
        for i, text in enumerate(texts):
            document, question = questions[i // len(methods)]
            name = list(methods)[i % len(methods)]
            recall = sum(a.lower() in text.lower() for a in question.answers) / len(question.answers)
            results.append(Result(document.task, document.length, document.index, name, recall, text))
        if progress is not None:
            progress(len(batch))
    return results


def _mask(method: ChannelMask | PerSample | None, backbone: Backbone, prefix: Prefix, asked: Branch) -> Tensor:
    device, branches = backbone.model.device, len(asked.lengths)
    if callable(method):
        return method(prefix, asked).to(device)
    keep = torch.ones(backbone.shape, dtype=torch.bool) if method is None else method.keep
    return keep.to(device).expand(branches, *backbone.shape)


def table(results: Sequence[Result], metric: str = "recall") -> dict[str, dict[str, float]]:
    """Method -> task -> mean of `metric` (recall or exact) in per cent, and the mean over tasks under "average"."""
    methods, tasks = (list(dict.fromkeys(getattr(r, k) for r in results)) for k in ("method", "task"))
    found: dict[str, dict[str, float]] = {}
    for m in methods:
        row = {
            t: 100 * float(np.mean([getattr(r, metric) for r in results if (r.method, r.task) == (m, t)]))
            for t in tasks
        }
        found[m] = {**row, "average": float(np.mean(list(row.values())))}
    return found


def paired_difference(results: Sequence[Result], a: str, b: str) -> tuple[float, float, float]:
    """Mean recall of method a minus that of b, over the samples that both have, and its 95% interval.

    Returns mean, low and high in percentage points (`common.bootstrap`).
    """
    recall: dict[str, dict[tuple[str, int, int], list[float]]] = {a: defaultdict(list), b: defaultdict(list)}
    for r in results:
        if r.method in recall:
            recall[r.method][r.task, r.length, r.index].append(100 * r.recall)
    strata: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (task, length, index), scores in recall[a].items():
        if others := recall[b].get((task, length, index)):
            strata[task, length] += [x - y for x, y in zip(scores, others, strict=True)]
    differences = list(strata.values())
    return stats.mean(differences), *stats.interval(differences)


def markdown(scores: Mapping[str, Mapping[str, float]]) -> str:
    """The result of `table` in Markdown: one row per method, one column per task."""
    tasks = list(next(iter(scores.values())))
    return str(
        pd.DataFrame(
            [[m, *(f"{row[t]:.1f}" for t in tasks)] for m, row in scores.items()], columns=["method", *tasks]
        ).to_markdown(index=False, disable_numparse=True)
    )
