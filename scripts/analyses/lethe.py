"""What the figures of Lethe's paper show.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from annotated_types import MinLen
from torch import Tensor
from torch.nn.functional import normalize
from transformers import Cache, PreTrainedConfig

from leank.data_gen.amount import amount
from leank.eval.cache.storage.eviction import Choice
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.decode import greedy
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer, extend, pad_left, prefill
from leank.eval.methods.base import Method
from leank.eval.methods.tokens.lethe import Lethe, Rounds, hoyer
from leank.typed import Count, Positive
from scripts.analyses.source import Given, Source, chosen_layers, full_attention
from scripts.analyses.table import Panel, Table, analysis


@analysis(Panel("hoyer", "step", "Hoyer sparsity", "layer", each="task"))
def sparsity(
    source: Given,
    tasks: Annotated[Sequence[str], MinLen(1)] = ("niah_multikey_3", "vt"),
    length: Positive = 1024,
    steps: Positive = 64,
    every: Positive = 2,
) -> pd.DataFrame:
    """Figure 1, Eq. 1: how sparse attention is in every layer while a reply is written.

      Hoyer(s) = (sqrt(n) - ||s||_1 / ||s||_2) / (sqrt(n) - 1)        (0: all tokens alike, 1: one token alone)

    s is the attention of each step's query, summed over the query heads of a layer; step 0 is the prompt's last query.
    The model writes on greedily, past its end-of-text token, too, so that every sample has all steps. Rows "hoyer" by
    task, layer and every `every`th step; of every task, "between_layers" is the standard deviation of the layers' means
    over steps, and "over_steps" the mean over layers of the standard deviation over steps.
    """
    table = Table()
    for task in tasks:
        at: dict[str, Any] = {"task": task, "length": length}
        found: dict[int, list[float]] = {}
        for step, layers in decoded(source, task, length, steps):
            for index, layer in layers if step % every == 0 else ():
                assert layer.queries is not None
                scores = received(layer.queries, layer.keys, scaling=layer.scaling, softmax=layer.softmax)
                found.setdefault(index, []).append(float(hoyer(scores[0].sum(0))))
                table.add("hoyer", "Hoyer sparsity", found[index][-1], layer=index, step=step, **at)
        each = np.array(list(found.values()))
        table.add("between_layers", "Hoyer sparsity", each.mean(1).std(), **at)
        table.add("over_steps", "Hoyer sparsity", each.std(1).mean(), **at)
    return table.frame


@torch.no_grad()
def decoded(source: Source, task: str, length: int, steps: int) -> Iterator[tuple[int, list[tuple[int, PromptLayer]]]]:
    """Write `steps` tokens after sample 0 of a task, with all K and V.

    Yields the number of each step, 0 for the prompt, and its layers, which hold the K so far and the step's query.
    """
    prompt = source.observe(source.ids(source.sample(task, length, 0)), 1, steps)
    cache, logits = Cache(layers=prompt.layers), prompt.logits
    yield 0, full_attention(prompt)
    for step in range(1, steps + 1):
        logits = extend(source.need_model()[0], cache, logits.argmax(-1)[:, None], None)
        yield step, full_attention(prompt)


@analysis(
    Panel("cosine", "other_head", "cosine without sink and window", "head", each="layer", where={"part": "middle"},
          limits=(0, 1)),
    Panel("mean_cosine", "layer", "mean cosine", by=("part",), limits=(0, 1.03)),
)  # fmt: skip
def head_similarity(
    source: Given,
    task: str = "niah_multikey_3",
    length: Positive = 2048,
    queries: Positive = 32,
    sink: Count = 16,
    window: Positive = 144,
    layers: Sequence[Count] | None = None,
) -> pd.DataFrame:
    """Figure 5: whether the heads of a layer look at the same tokens.

    Rows "cosine" of the attention that two query heads of a chosen layer give to the tokens, summed over the last
    queries; and "mean_cosine" of every layer. Most heads look at the first tokens and at the latest ones, whatever the
    text. So the cosine over the tokens between them (part "middle"), the only ones that can be evicted, stands beside
    that over all (part "all").

    sink, window: tokens left out of the middle.
    layers: whose pairs of heads are rows; None takes the first, the middle and the last.
    """
    shown, table = chosen_layers(layers, source.config.num_hidden_layers), Table()
    for index, layer in source.layers(task, length, 0, queries):
        assert layer.queries is not None
        given = received(layer.queries, layer.keys, scaling=layer.scaling, softmax=layer.softmax)[0]  # [Hq, T]
        end = given.shape[1] - window
        if end <= sink:
            raise ValueError(f"sink={sink} and window={window} leave none of {amount(given.shape[1], 'token')}")
        for part, some in (("all", given), ("middle", given[:, sink:end])):
            at: dict[str, Any] = {"layer": index, "task": task, "length": length, "part": part}
            unit = normalize(some.double(), dim=-1)
            cosine = (unit @ unit.mT).cpu()
            pairs = cosine[*torch.triu_indices(len(cosine), len(cosine), offset=1)]
            table.add("mean_cosine", "cosine", pairs.mean(), **at)
            for head, row in enumerate(cosine if index in shown else ()):
                others = range(head + 1, len(row))
                table.add("cosine", "cosine", row[head + 1 :], {"other_head": others}, head=head, **at)
    return table.frame


@analysis(
    Panel("held", "step", "tokens held, of the first sample", by=("layer",), where={"sample": 0}),
    Panel("retained", "bin", "share of tokens held at the end", "layer", limits=(0, 1)),
)
def retained_tokens(
    source: Given,
    task: str = "niah_multikey_3",
    length: Positive = 1024,
    samples: Positive = 1,
    steps: Positive = 192,
    sink: Count = 16,
    window: Positive = 32,
    flush: Positive = 16,
    evict_at: Positive = 512,
    sparse_ratio: float = 400.0,
    bins: Positive = 64,
) -> pd.DataFrame:
    """Figure 3: what every layer of Lethe's cache holds after each of its rounds, while replies are written.

    Rows of every layer and sample: "held" and "seen" tokens after a chance for a round, `flush` tokens apart or more;
    "retained" by bin at the end; and "growth": by how much the most that a layer held in the second half of the reply
    exceeds the most that it held in the first half, as a share of the tokens written in between. A dense cache has 1, a
    plateau 0.

    samples: replies that are written side by side.
    steps: tokens that are written; the model goes on past its end-of-text token.
    sink, window, flush: of the cache, tokens; a round can come every `flush` steps.
    evict_at: tokens that a layer holds before its first round.
    sparse_ratio: Lethe's tau, > 1.
    bins: equal parts of prompt and reply.
    """
    table = Table()
    prompts = [source.ids(source.sample(task, length, index))[0].tolist() for index in range(samples)]
    settings = Lethe(evict_at=evict_at, sparse_ratio=sparse_ratio)
    for layer, each in enumerate(recorded(source, prompts, steps, settings, Sizes(sink, window, flush))):
        for sample, record in enumerate(each):
            at: dict[str, Any] = {"layer": layer, "task": task, "length": length, "sample": sample}
            for seen, held in record.spaced(flush):
                table.add("held", "tokens", held, step=seen - record.prompt, **at)
                table.add("seen", "tokens", seen, step=seen - record.prompt, **at)
            table.add("growth", "share of tokens written", record.growth(), **at)
            there = torch.zeros(record.total, dtype=torch.double)
            there[record.places()] = 1
            edges = [record.total * number // bins for number in range(bins + 1)]
            for number, (first, last) in enumerate(pairwise(edges)):
                if last > first:
                    table.add("retained", "share of tokens", there[first:last].mean(), bin=number, **at)
    return table.frame


@dataclass
class Record:
    """What one layer holds of one sample, by place in the sequence.

    sink: tokens at the start that always stay.
    prompt: tokens of the prompt.
    total: tokens of prompt and reply in the cache, once the reply is written.
    middle: places of the middle's tokens, ascending.
    history: tokens seen and held, after every chance for a round.
    """

    sink: int
    prompt: int
    total: int = 0
    middle: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    joined: int = 0  # places before this one are in the middle, or have left it, or are the sink's
    window: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)

    def note(self, middle: int, window: int, stay: Tensor | None) -> None:
        """Take up the tokens that have joined the middle since, and drop those of it [middle] that do not stay."""
        self.joined = max(self.joined, self.sink)
        new = middle - len(self.middle)
        self.middle = torch.cat([self.middle, torch.arange(self.joined, self.joined + new)])
        self.joined += new
        if stay is not None:
            self.middle = self.middle[stay]
        self.window = window
        self.history.append((self.joined + window, self.sink + len(self.middle) + window))

    def finish(self, total: int) -> None:
        """Count the tokens that came after the last chance for a round; none of them has left the window."""
        self.total, self.window = total, total - self.joined

    def spaced(self, least: int) -> list[tuple[int, int]]:
        """Return the entries of `history` that are at least so many tokens apart, the first one among them."""
        found = self.history[:1]
        for entry in self.history[1:]:
            if entry[0] - found[-1][0] >= least:
                found.append(entry)
        return found

    def growth(self) -> float:
        """By how much the peak of the second half exceeds that of the first, as a share of the tokens in between."""
        half = len(self.history) // 2
        first, second = self.history[:half], self.history[half:]
        return (max(held for _, held in second) - max(held for _, held in first)) / (second[-1][0] - first[-1][0])

    def places(self) -> Tensor:
        """Places of all tokens held."""
        return torch.cat([torch.arange(self.sink), self.middle, torch.arange(self.joined, self.joined + self.window)])


class Recorded(Rounds):
    """Lethe's rounds in one layer, which note in `records` what stays of each sample."""

    def __init__(self, settings: Lethe, records: list[Record]) -> None:
        super().__init__(settings)
        self.records = records

    def chosen(
        self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray, kernel: bool = False
    ) -> Choice | None:
        """What stays (`Rounds.chosen`); all heads keep the same tokens."""
        found = super().chosen(prompt, tail, sink, window, kernel)
        middle = prompt.length + tail.length
        of_first_head = None if found is None else found.stay[:, 0].cpu()
        for index, record in enumerate(self.records):
            most = int(middle[index].max())
            record.note(most, int(window[index]), None if of_first_head is None else of_first_head[index, :most])
        return found


@dataclass(frozen=True)
class RecordedLethe(Lethe):
    """Lethe that records every round. prompts: tokens of each prompt; records: by layer and sample."""

    prompts: tuple[int, ...] = ()
    records: list[list[Record]] = field(default_factory=list)

    def eviction(self, layer: PromptLayer, config: PreTrainedConfig, sizes: Sizes) -> Recorded:
        """The rounds of a layer."""
        self.records.append([Record(sizes.sink, prompt) for prompt in self.prompts])
        return Recorded(self, self.records[-1])


@torch.no_grad()
def recorded(source: Source, prompts: list[list[int]], steps: int, settings: Lethe, sizes: Sizes) -> list[list[Record]]:
    """Write `steps` tokens after every prompt, side by side; returns the records by layer and sample."""
    model, tokenizer = source.need_model()
    ids, real = pad_left(prompts, getattr(tokenizer, "pad_token_id", None) or 0, model.device)
    own = {one.name: getattr(settings, one.name) for one in fields(settings)}
    lethe = RecordedLethe(**own, prompts=tuple(map(len, prompts)))
    lethe.check_sizes(sizes)
    method = Method("lethe", tokens=lethe, sink=sizes.sink, window=sizes.window, flush=sizes.flush)
    prompt = prefill(model, ids, real, 0, column_sums=True)
    cache = method.cache(model, prompt)
    least = [0] * len(prompts)
    greedy(model, cache, prompt.logits, real, prompt.lengths, [], [steps] * len(prompts), least)
    for record in chain.from_iterable(lethe.records):
        record.finish(record.prompt + steps - 1)  # the last token is not read
    return lethe.records
