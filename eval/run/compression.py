"""Whether a method compresses anything of a prompt, and the warnings where a score says nothing about the method."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import Cache

from leank.data_gen.amount import amount
from leank.eval.cache.graph import stores
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods import Method

log = logging.getLogger("eval")


class Compression:
    """What a cache with the prompts leaves out of the dense one; `found` is called once replies are there."""

    def __init__(self, method: Method, cache: Cache, prompt: Prefill) -> None:
        self.method, self.rows = method, len(prompt.logits)
        self.stores = stores(cache)
        self.sealed = [store.seen.copy() for store in self.stores]
        self.dropped = np.zeros(self.rows, dtype=bool)  # by the method's own prefill
        if prompt.given is not None:
            self.dropped |= np.array(prompt.given) > prompt.lengths.cpu().numpy()
        for layer in prompt.layers:
            if isinstance(layer, PromptLayer) and layer.kept is not None:
                self.dropped |= ((layer.kept >= 0).sum(-1) < prompt.lengths).cpu().numpy()

    def found(self, fed: Sequence[int], branch: Cache | None = None) -> list[tuple[int, bool]]:
        """Return per row the middle tokens of the layer with most, and whether less than all of them is held or read.

        fed: per row, the tokens that followed its prompt, given to a copy `branch` of the cache, None = the cache.
        """
        held_now = self.stores if branch is None else stores(branch)
        middle, less = np.zeros(self.rows, dtype=int), self.dropped.copy()
        budget = getattr(self.method.reads, "budget", None)
        for store, seen in zip(held_now, self.sealed, strict=True):
            size = store.sizes
            start = np.maximum(size.sink, seen - size.window)
            moved = np.maximum(0, seen + np.array(fed) - start - size.window) // size.flush * size.flush
            mine = start + moved - size.sink
            held = (store.prompt.length + store.tail.length).min(-1)
            narrow = (store.channels.count < store.ring_k.shape[-1]).any(-1) | (held < store.start - size.sink)
            if store.values is not None:
                narrow |= (store.values.count < store.ring_v.shape[-1]).any(-1)
            if store.reads is not None:
                narrow |= mine > (budget or 0) - size.sink - size.window
            middle, less = np.maximum(middle, mine), less | (mine > 0) & (narrow | (store.middle.bits is not None))
        return list(zip(middle.tolist(), less.tolist(), strict=True))


@dataclass
class Warnings:
    """Warns once per method and cell of scores that say nothing, and stops a run whose dense replies are all broken."""

    said: set[tuple[str, str, str]] = field(default_factory=set)  # those so far, as (message, method, place)
    dense: int = 0  # samples of the dense method so far
    broken: int = 0  # those of them with non-finite logits

    def say(self, what: str, method: str, where: str, *values: object) -> None:
        """Log `what` with method, place and values unless it has been said of them."""
        if (what, method, where) not in self.said:
            self.said.add((what, method, where))
            log.warning(what, method, where, *values)

    def note(self, method: Method, where: str, tokens: int, compressed: bool | None, dense_only: bool,
            non_finite: int | None) -> None:  # fmt: skip
        """Note one sample. tokens: of its prompt; the other values are those of its row."""
        if compressed is False:
            self.say(
                "%s, %s: nothing is compressed in a prompt of %d tokens, which sink=%d and window=%d (or a budget) "
                "hold whole; lower them or use longer prompts",
                method.label, where, tokens, method.sink, method.window,
            )  # fmt: skip
        if dense_only and method.axes:
            self.say(
                "%s, %s: a reply rests on the first token alone, which comes from the dense prefill; its score says "
                "nothing about the method: raise max_new_tokens or use compress=before_question",
                method.label, where,
            )  # fmt: skip
        if non_finite is not None:
            self.say("%s, %s: non-finite logits at step %d; such a sample scores 0", method.label, where, non_finite)
        if not method.axes:
            self.dense, self.broken = self.dense + 1, self.broken + (non_finite is not None)

    def stop_if_broken(self, model: str, dtype: str) -> None:
        """Raise ValueError if every sample of the dense method so far had non-finite logits."""
        if self.dense and self.broken == self.dense:
            raise ValueError(
                f"of {amount(self.dense, 'sample')} of the dense method so far, all had NaN or infinite logits with "
                f"model.dtype={dtype}: use model.dtype=bfloat16 or float32, and check the weights of model.name={model}"
            )
