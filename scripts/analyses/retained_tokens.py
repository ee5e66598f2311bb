"""Which tokens Lethe retains in every layer while a reply is written.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving", figure 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.eviction import Choice
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import PromptLayer, pad_left, prefill
from leank.eval.methods.base import Method
from leank.eval.methods.tokens.lethe import Lethe, Rounds
from leank.eval.report.style import sheet
from leank.typed import Count, Positive
from scripts.analyses.analysis import Analysis, Rows, Value, distinct, only, row, values
from scripts.analyses.drawing import heat_map
from scripts.analyses.source import Source


@dataclass(frozen=True)
class RetainedTokens(Analysis):
    """Run Lethe's cache, and record what every layer holds after each of its rounds.

    Settings
    task: str, default "niah_multikey_3": task of the samples.
    length: int, tokens, default 1024: of the prompts.
    samples: int, default 1: how many replies are written side by side.
    steps: int, default 192: tokens that are written; the model goes on past its end-of-text token.
    sink, window, flush: int, tokens, default 16, 32, 16: of the cache; a round can come every `flush` steps.
    evict_at: int, tokens, default 512: what a layer holds before its first round.
    sparse_ratio: float > 1, default 400: Lethe's tau.
    bins: int, default 64: equal parts of prompt and reply, for the map of places.
    """

    task: str = "niah_multikey_3"
    length: Positive = 1024
    samples: Positive = 1
    steps: Positive = 192
    sink: Count = 16
    window: Positive = 32
    flush: Positive = 16
    evict_at: Positive = 512
    sparse_ratio: float = 400.0
    bins: Positive = 64

    def measure(self, source: Source) -> Rows:
        """Rows of every layer and sample.

        "held" and "seen" after a chance for a round, `flush` tokens apart or more; "retained" by bin at the end; and
        "growth": by how much the most that a layer held in the second half of the reply exceeds the most that it held
        in the first half, as a share of the tokens written in between. A dense cache has 1, a plateau 0.
        """
        rows: Rows = []
        records = self.run(source)
        for layer, each in enumerate(records):
            for sample, record in enumerate(each):
                at: dict[str, Value] = {"layer": layer, "task": self.task, "length": self.length, "sample": sample}
                for seen, held in record.spaced(self.flush):
                    step = seen - record.prompt
                    rows.append(row("held", held, "tokens", step=step, **at))
                    rows.append(row("seen", seen, "tokens", step=step, **at))
                rows.append(row("growth", record.growth(), "share of tokens written", **at))
                there = torch.zeros(record.total, dtype=torch.double)
                there[record.places()] = 1
                edges = [record.total * number // self.bins for number in range(self.bins + 1)]
                rows += [
                    row("retained", float(there[first:last].mean()), "share of tokens", bin=number, **at)
                    for number, (first, last) in enumerate(pairwise(edges))
                    if last > first
                ]
        return rows

    @torch.no_grad()
    def run(self, source: Source) -> list[list[Record]]:
        """Write the replies. Returns the record of every layer and sample."""
        model, tokenizer = source.need_model()
        prompts = [source.ids(source.sample(self.task, self.length, index))[0].tolist()
                   for index in range(self.samples)]  # fmt: skip
        ids, real = pad_left(prompts, getattr(tokenizer, "pad_token_id", None) or 0, model.device)
        lethe = _Recorded(evict_at=self.evict_at, sparse_ratio=self.sparse_ratio, prompts=tuple(map(len, prompts)))
        lethe.check_sizes(Sizes(self.sink, self.window, self.flush))
        method = Method("lethe", tokens=lethe, sink=self.sink, window=self.window, flush=self.flush)
        prompt = prefill(model, ids, real, 0, column_sums=True)
        cache = method.cache(model, prompt)
        least = [0] * self.samples
        greedy(model, cache, prompt.logits, real, prompt.lengths, [], [self.steps] * self.samples, least)
        for record in chain.from_iterable(lethe.records):
            record.finish(record.prompt + self.steps - 1)  # the last token is not read
        return lethe.records

    def draw(self, rows: Rows) -> Figure:
        """Left: the share of all tokens so far that a layer holds, by step. Right: which parts it holds at the end.

        Both are the mean over samples.
        """
        figure = sheet(3.6)
        left, right = figure.subplots(1, 2, sharey=True)
        held, seen = only(rows, measure="held"), only(rows, measure="seen")
        layers, steps = distinct(held, "layer"), sorted({int(step) for step in values(held, "step")})
        share = np.array([_shares(only(held, layer=layer), only(seen, layer=layer), steps) for layer in layers])
        shown = heat_map(left, 100 * share, steps, layers, (0, 100), most=7)
        left.set(xlabel="step", ylabel="layer", title="tokens held, % of all so far")
        retained = only(rows, measure="retained")
        bins = distinct(retained, "bin")
        matrix = 100 * np.array(values(retained)).reshape(len(layers), -1, len(bins)).mean(1)
        places = [f"{round(100 * i / matrix.shape[1])}%" for i in range(matrix.shape[1])]
        heat_map(right, matrix, places, layers, (0, 100), most=6)
        right.set(xlabel="place in prompt and reply", title="tokens held at the end, %")
        figure.colorbar(shown, ax=[left, right], label="%")
        return figure


def _shares(held: Rows, seen: Rows, steps: Sequence[int]) -> np.ndarray:
    """Return the share of the tokens seen that a layer holds at each step, the mean of all samples.

    Samples have their rounds at steps of their own: between them a sample counts as at its last one.
    """
    found = []
    for sample in distinct(held, "sample"):
        mine, all_ = only(held, sample=sample), only(seen, sample=sample)
        last = np.searchsorted(values(mine, "step"), steps, side="right") - 1
        found.append((np.array(values(mine)) / np.array(values(all_)))[last.clip(0)])
    return np.mean(found, 0)


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


@dataclass(frozen=True)
class _Recorded(Lethe):
    """Lethe that records every round of every layer. prompts: tokens of each prompt."""

    prompts: tuple[int, ...] = ()
    records: list[list[Record]] = field(default_factory=list)

    def eviction(self, layer: PromptLayer, config: PreTrainedConfig, sizes: Sizes) -> _RecordedRounds:
        self.records.append([Record(sizes.sink, prompt) for prompt in self.prompts])
        return _RecordedRounds(self, self.records[-1])


class _RecordedRounds(Rounds):
    def __init__(self, settings: Lethe, records: list[Record]) -> None:
        super().__init__(settings)
        self.records = records

    def chosen(
        self, prompt: Segment, tail: Segment, sink: np.ndarray, window: np.ndarray, kernel: bool = False
    ) -> Choice | None:
        """What stays (`Rounds.chosen`), which is recorded: all heads keep the same tokens."""
        found = super().chosen(prompt, tail, sink, window, kernel)
        middle = prompt.length + tail.length
        of_first_head = None if found is None else found.stay[:, 0].cpu()
        for index, record in enumerate(self.records):
            most = int(middle[index].max())
            record.note(most, int(window[index]), None if of_first_head is None else of_first_head[index, :most])
        return found
