"""How sparse attention is in every layer while a reply is written.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving", figure 1, Eq. 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import MinLen
from matplotlib.figure import Figure
from transformers import Cache

from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer, extend
from leank.eval.methods.tokens.lethe import hoyer
from leank.eval.report.style import sheet
from leank.typed import Positive
from scripts.analyses.analysis import Analysis, Rows, Value, distinct, only, row, values
from scripts.analyses.drawing import heat_map
from scripts.analyses.source import Source, full_attention


@dataclass(frozen=True)
class Sparsity(Analysis):
    """Hoyer sparsity of the attention of each step's query, summed over the query heads of a layer.

      Hoyer(s) = (sqrt(n) - ||s||_1 / ||s||_2) / (sqrt(n) - 1)        (0: all tokens alike, 1: one token alone)

    Step 0 is the prompt's last query. The model writes on greedily, past its end-of-text token, too, so that every
    sample has all steps; a short reply says little about a reasoning model's long one.

    Settings
    tasks: list of names, default ("niah_multikey_3", "vt"): one sample of each.
    length: int, tokens, default 1024: of the prompts.
    steps: int, default 64: decoding steps.
    every: int, default 2: every how many steps one is a row.
    """

    tasks: Annotated[Sequence[str], MinLen(1)] = ("niah_multikey_3", "vt")
    length: Positive = 1024
    steps: Positive = 64
    every: Positive = 2

    def measure(self, source: Source) -> Rows:
        """Rows "hoyer" by task, layer and step.

        Of every task, "between_layers" is the standard deviation of the layers' means over steps, and "over_steps" the
        mean over layers of the standard deviation over steps.
        """
        rows: Rows = []
        for task in self.tasks:
            at: dict[str, Value] = {"task": task, "length": self.length}
            found: dict[int, list[float]] = {}
            for step, layers in decoded(source, task, self.length, self.steps):
                if step % self.every:
                    continue
                for index, layer in layers:
                    assert layer.queries is not None
                    scores = received(layer.queries, layer.keys, scaling=layer.scaling, softmax=layer.softmax)
                    found.setdefault(index, []).append(float(hoyer(scores[0].sum(0))))
                    rows.append(row("hoyer", found[index][-1], "Hoyer sparsity", layer=index, step=step, **at))
            each = np.array(list(found.values()))
            rows.append(row("between_layers", float(each.mean(1).std()), "Hoyer sparsity", **at))
            rows.append(row("over_steps", float(each.std(1).mean()), "Hoyer sparsity", **at))
        return rows

    def draw(self, rows: Rows) -> Figure:
        """A heat map of layers and steps per task."""
        tasks = distinct(rows, "task")
        figure = sheet(3.4)
        panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        found = values(only(rows, measure="hoyer"))
        limits = min(found), max(found)
        for panel, task in zip(panels, tasks, strict=True):
            mine = only(rows, measure="hoyer", task=task)
            layers, steps = distinct(mine, "layer"), distinct(mine, "step")
            matrix = np.array(values(mine)).reshape(len(steps), len(layers)).T
            image = heat_map(panel, matrix, steps, layers, limits, most=9)
            between, over = (values(only(rows, measure=m, task=task))[0] for m in ("between_layers", "over_steps"))
            panel.set(title=f"{task}\ndeviation: layers {between:.3f}, steps {over:.3f}", xlabel="step")
        panels[0].set_ylabel("layer")
        figure.colorbar(image, ax=panels, label="Hoyer sparsity")
        return figure


@torch.no_grad()
def decoded(source: Source, task: str, length: int, steps: int) -> Iterator[tuple[int, list[tuple[int, PromptLayer]]]]:
    """Write `steps` tokens after sample 0 of a task, with all K and V.

    Yields the number of each step, 0 for the prompt, and its layers, which hold the K so far and the step's query.
    """
    prompt = source.observe(source.ids(source.sample(task, length, 0)), 1, steps)
    model, _ = source.need_model()
    cache, logits = Cache(layers=prompt.layers), prompt.logits
    yield 0, full_attention(prompt)
    for step in range(1, steps + 1):
        logits = extend(model, cache, logits.argmax(-1)[:, None], None)
        yield step, full_attention(prompt)
