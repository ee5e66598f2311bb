"""What the figures of Lethe's paper show.

Zeng et al., "Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving".
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from annotated_types import MinLen
from torch.nn.functional import normalize
from transformers import Cache

from leank.data_gen.amount import amount
from leank.eval.cache.graph import DecodeLoop
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer, extend, pad_left, prefill
from leank.eval.methods.base import Method
from leank.eval.methods.tokens.lethe import Lethe, hoyer
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


@analysis(Panel("held", "step", "tokens held, of the first sample", by=("layer",), where={"sample": 0}))
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
) -> pd.DataFrame:
    """Figure 3: what every layer of Lethe's cache holds while replies are written.

    Rows of every layer and sample: "held" and "seen" tokens, of the prompt and after every `flush` steps; and "growth":
    by how much the most that a layer held in the second half of the reply exceeds the most that it held in the first
    half, as a share of the tokens written in between. A dense cache has 1, a plateau 0.

    samples: replies that are written side by side.
    steps: tokens that are written; the model goes on past its end-of-text token.
    sink, window, flush: of the cache, tokens; a round can come every `flush` steps.
    evict_at: tokens that a layer holds before its first round; sparse_ratio: Lethe's tau, > 1.
    """
    table = Table()
    prompts = [source.ids(source.sample(task, length, index))[0].tolist() for index in range(samples)]
    settings, sizes = Lethe(evict_at=evict_at, sparse_ratio=sparse_ratio), Sizes(sink, window, flush)
    counts = held_while_decoding(source, prompts, steps, settings, sizes)
    for layer, sample in np.ndindex(*counts.shape[2:]):
        at: dict[str, Any] = {"layer": layer, "task": task, "length": length, "sample": sample}
        seen, held = counts[:, :, layer, sample].T
        for name, each in (("held", held), ("seen", seen)):
            table.add(name, "tokens", each, {"step": seen - seen[0]}, **at)
        table.add("growth", "share of tokens written", growth(seen, held), **at)
    return table.frame


def growth(seen: np.ndarray, held: np.ndarray) -> float:
    """By how much the peak of the second half exceeds that of the first, as a share of the tokens in between."""
    half = len(seen) // 2
    if not half:
        return np.nan
    return float((held[half:].max() - held[:half].max()) / (seen[-1] - seen[half - 1]))


@torch.no_grad()
def held_while_decoding(
    source: Source, prompts: list[list[int]], steps: int, settings: Lethe, sizes: Sizes
) -> np.ndarray:
    """Tokens seen and held after the prompts and every flush of `steps` steps, [times, 2, layers, samples]."""
    model, tokenizer = source.need_model()
    settings.check_sizes(sizes)
    ids, real = pad_left(prompts, getattr(tokenizer, "pad_token_id", None) or 0, model.device)
    prompt = prefill(model, ids, real, 0, column_sums=True)
    method = Method("lethe", tokens=settings, sink=sizes.sink, window=sizes.window, flush=sizes.flush)
    cache = method.compressed(model, prompt)
    loop, token, found = DecodeLoop(model, cache, prompt.lengths[:, None]), prompt.logits.argmax(-1, keepdim=True), []
    for step in range(steps):  # the last token is not read
        if step % sizes.flush == 0:
            stores = [layer.store for layer in cache.compressed if layer.store is not None]
            middle = [(store.prompt.length + store.tail.length).max(1) for store in stores]  # alike in all heads
            held = [sizes.sink + n + store.seen - store.start for n, store in zip(middle, stores, strict=True)]
            found.append((np.stack([store.seen for store in stores]), np.stack(held)))
        if real is not None:
            real = torch.cat([real, real.new_ones(len(prompts), 1)], 1)
        token = loop.step(token, real).argmax(-1, keepdim=True)
    return np.array(found)
